// SPDX-License-Identifier: Apache-2.0
// flash_bevpool on the cpu.
//
// Forward: a task is a block of neighbouring cells. The samples of a camera are tested together; the few that count are
// then summed over their channels, by camera and height.
//
// Backward: the samples that count, found by the same tests, are sorted by feature map row and column. A task owns the
// samples of one map row and writes the gradients of that row and of the one below; even rows run first, then odd ones.
// Nothing is added atomically, and every gradient receives its additions in one order: results do not depend on the
// number of threads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "flash_bevpool.h"
#include "flash_bevpool_math.h"
#include "flash_bevpool_samples_cpu.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"
#include "rows_cpu.h"

namespace muspace::bevpool {
namespace {

constexpr const char* kName = "flash_bevpool";

constexpr int64_t kMostBands = 64;  // parts of the grid whose samples are collected apart

// ---- forward

// sum += the four rows, weighted.
template <class T>
MSP_CPU_INLINE void add_corners(const T* const* rows, const T* weights, int64_t channels, T* sum) {
  constexpr int kWidth = cpu::kLanes<T>;
  const T *r0 = rows[0], *r1 = rows[1], *r2 = rows[2], *r3 = rows[3];
  const T w0 = weights[0], w1 = weights[1], w2 = weights[2], w3 = weights[3];
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    cpu::store_lanes(sum + c, cpu::load_lanes(sum + c) +
                                  ((w0 * cpu::load_lanes(r0 + c) + w1 * cpu::load_lanes(r1 + c)) +
                                   (w2 * cpu::load_lanes(r2 + c) + w3 * cpu::load_lanes(r3 + c))));
  }
  for (; c < channels; ++c) sum[c] += (w0 * r0[c] + w1 * r1[c]) + (w2 * r2[c] + w3 * r3[c]);
}

// The rows of the corners of a sample in the map of `camera`.
template <class T>
MSP_CPU_INLINE void corner_rows(const FlashInputs& in, const MapSample<T>& place, const T* map, const T** rows) {
  rows[0] = map + (place.y0 * in.width + place.x0) * in.channels;
  rows[1] = rows[0] + right_step(place, in.width) * in.channels;
  const int64_t down = lower_step(place, in.height, in.width) * in.channels;
  rows[2] = rows[0] + down;
  rows[3] = rows[1] + down;
}

template <class T>
MSP_CPU_INLINE void forward_block(const Problem<T>& problem, void* output, const Block& block) {
  const FlashInputs& in = problem.inputs;
  std::vector<T> sums(static_cast<size_t>(block.cells * in.channels));
  int64_t counts[kBlock] = {};
  visit_samples(problem, block, [&](int64_t camera, const Samples<T>& samples) MSP_CPU_LAMBDA {
    const T* const map =
        problem.features + (block.batch * in.cameras + camera) * in.height * in.width * in.channels;
    for (int i = 0; i < samples.used; ++i) {
      const int s = samples.kept[i], cell = samples.cells[s];
      const T* rows[4];
      corner_rows(in, samples.place_of(s), map, rows);
      CornerWeights<T> weights = bilinear_weights(samples.fx[s], samples.fy[s]);
      for (T& weight : weights.at) weight *= samples.weights[s];
      add_corners(rows, weights.at, in.channels, &sums[static_cast<size_t>(cell * in.channels)]);
      ++counts[cell];
    }
  });
  const int64_t first = (block.batch * in.grid.y_cells + block.y) * in.grid.x_cells + block.x;
  for (int cell = 0; cell < block.cells; ++cell) {
    T* const sum = &sums[static_cast<size_t>(cell * in.channels)];
    const T scale = inverse_count<T>(counts[cell]);
    for (int64_t c = 0; c < in.channels; ++c) sum[c] *= scale;
  }
  narrow(sums.data(), block.cells * in.channels, output, in.feature_type, first * in.channels);
}

// ---- backward

// A sample that counts, for the gradients: `share` is its weight over the count of its cell, `mean` and `scale` the
// derivatives of the logarithm of the weight.
template <class T>
struct Record {
  int32_t row;     // of all cameras' maps
  int32_t column;  // of the map
  int32_t cell;    // of the batch item
  T fx, fy, share, mean, scale;
};

// The records of neighbouring blocks, and how many there are in each map row.
template <class T>
struct Band {
  std::vector<Record<T>> records;
  std::vector<int64_t> rows;
};

template <class T>
MSP_CPU_INLINE void collect_block(const Problem<T>& problem, const Block& block, Band<T>& band) {
  const FlashInputs& in = problem.inputs;
  const size_t begin = band.records.size();
  int64_t counts[kBlock] = {};
  visit_samples(problem, block, [&](int64_t camera, const Samples<T>& samples) MSP_CPU_LAMBDA {
    for (int i = 0; i < samples.used; ++i) {
      const int s = samples.kept[i], cell = samples.cells[s];
      const DepthSlope<T> slope = depth_slope(problem.geometry, samples.depth_weight_of(s));
      band.records.push_back(Record<T>{static_cast<int32_t>(camera * in.height + samples.y0[s]), samples.x0[s], cell,
                                       samples.fx[s], samples.fy[s], samples.weights[s], slope.mean, slope.scale});
      ++counts[cell];
    }
  });
  const int32_t first = static_cast<int32_t>(block.y * in.grid.x_cells + block.x);
  for (size_t i = begin; i < band.records.size(); ++i) {
    Record<T>& record = band.records[i];
    record.share *= inverse_count<T>(counts[record.cell]);
    record.cell += first;
    ++band.rows[static_cast<size_t>(record.row)];
  }
}

// Samples of one map cell, to be added together; `step` leads to the right corner, `down` to the lower ones, in rows.
template <class T>
struct Group {
  const T* features;  // row of the upper left corner
  T *grad_features, *grad_params;
  int64_t step, down;
};

constexpr int kTogether = 4;  // samples whose channels are read in one loop
constexpr int kAhead = 12;    // samples between a prefetch and its use

template <class V, class T>
struct Gathered {
  const V* grads[kTogether];
  T corners[kTogether][4];  // share * corner weight
};

// dots[s] = <gradient of sample s, its weighted feature>; sums[k] += the weighted gradients at corner k.
template <class V, class T>
MSP_CPU_INLINE void dot_and_add(const Gathered<V, T>& samples, const T* const* rows, int64_t channels, T* sums,
                                T* dots) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> products[kTogether] = {};
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    cpu::Lanes<T> feature[4], sum[4];
    for (int k = 0; k < 4; ++k) {
      feature[k] = cpu::load_lanes(rows[k] + c);
      sum[k] = cpu::load_lanes(sums + k * channels + c);
    }
    for (int s = 0; s < kTogether; ++s) {
      const T* const w = samples.corners[s];
      const cpu::Lanes<T> grad = cpu::load_lanes(samples.grads[s] + c);
      products[s] += grad * ((w[0] * feature[0] + w[1] * feature[1]) + (w[2] * feature[2] + w[3] * feature[3]));
      for (int k = 0; k < 4; ++k) sum[k] += w[k] * grad;
    }
    for (int k = 0; k < 4; ++k) cpu::store_lanes(sums + k * channels + c, sum[k]);
  }
  cpu::sum_lanes(products, dots);
  for (; c < channels; ++c) {
    for (int s = 0; s < kTogether; ++s) {
      const T* const w = samples.corners[s];
      const T grad = cpu::load(samples.grads[s] + c);
      dots[s] += grad * ((w[0] * rows[0][c] + w[1] * rows[1][c]) + (w[2] * rows[2][c] + w[3] * rows[3][c]));
      for (int k = 0; k < 4; ++k) sums[k * channels + c] += w[k] * grad;
    }
  }
}

// Adds the records to the gradients of the four corners of their map cell. `sums` has room for four rows.
template <class V, class T>
MSP_CPU_INLINE void add_group(const Group<T>& group, const Record<T>* const* records, int64_t count,
                              const V* grad_output, int64_t channels, const V* zeros, T* sums) {
  const int64_t corners[4] = {0, group.step, group.down, group.down + group.step};
  const T* rows[4];
  for (int k = 0; k < 4; ++k) rows[k] = group.features + corners[k] * channels;
  T params[4][2] = {};
  std::memset(sums, 0, static_cast<size_t>(4 * channels) * sizeof(T));
  for (int64_t i = 0; i < count; i += kTogether) {
    const int used = static_cast<int>(std::min<int64_t>(kTogether, count - i));
    for (int64_t ahead = i + kAhead; ahead < std::min(count, i + kAhead + kTogether); ++ahead) {
      prefetch(grad_output + records[ahead]->cell * channels, channels * static_cast<int64_t>(sizeof(V)));
    }
    Gathered<V, T> samples;
    CornerWeights<T> weights[kTogether];
    for (int s = 0; s < kTogether; ++s) {
      samples.grads[s] = s < used ? grad_output + records[i + s]->cell * channels : zeros;
      if (s < used) weights[s] = bilinear_weights(records[i + s]->fx, records[i + s]->fy);
      for (int k = 0; k < 4; ++k) samples.corners[s][k] = s < used ? records[i + s]->share * weights[s].at[k] : T(0);
    }
    T dots[kTogether];
    dot_and_add(samples, rows, channels, sums, dots);
    for (int s = 0; s < used; ++s) {
      const T mean = dots[s] * records[i + s]->mean, scale = dots[s] * records[i + s]->scale;
      for (int k = 0; k < 4; ++k) {
        params[k][0] += mean * weights[s].at[k];
        params[k][1] += scale * weights[s].at[k];
      }
    }
  }
  for (int k = 0; k < 4; ++k) {  // one after the other: at the border corners coincide
    T* const target = group.grad_features + corners[k] * channels;
    for (int64_t c = 0; c < channels; ++c) target[c] += sums[k * channels + c];
    group.grad_params[2 * corners[k]] += params[k][0];
    group.grad_params[2 * corners[k] + 1] += params[k][1];
  }
}

// The records of one map row of one batch item, and what they add to.
template <class T>
struct MapRow {
  const Record<T>* records;
  int64_t count, batch, row;
  const void* grad_output;  // of the whole call
  T *grad_features, *grad_params;
};

template <class V>
MSP_CPU_INLINE void backward_row(const Problem<arithmetic_t<V>>& problem, const MapRow<arithmetic_t<V>>& work) {
  using T = arithmetic_t<V>;
  const FlashInputs& in = problem.inputs;
  std::vector<int64_t> starts(static_cast<size_t>(in.width + 1));
  for (int64_t i = 0; i < work.count; ++i) ++starts[static_cast<size_t>(work.records[i].column + 1)];
  for (size_t column = 1; column < starts.size(); ++column) starts[column] += starts[column - 1];
  std::vector<const Record<T>*> sorted(static_cast<size_t>(work.count));
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < work.count; ++i) {
    sorted[static_cast<size_t>(next[static_cast<size_t>(work.records[i].column)]++)] = work.records + i;
  }
  const std::vector<double> zeros(static_cast<size_t>(in.channels));
  std::vector<T> sums(static_cast<size_t>(4 * in.channels));
  const V* const grads = static_cast<const V*>(work.grad_output) +
                         work.batch * in.grid.y_cells * in.grid.x_cells * in.channels;
  const int64_t first = (work.batch * in.cameras * in.height + work.row) * in.width;
  const int64_t down = work.row % in.height + 1 < in.height ? in.width : 0;
  for (int64_t column = 0; column < in.width; ++column) {
    const int64_t begin = starts[static_cast<size_t>(column)], end = starts[static_cast<size_t>(column) + 1];
    if (begin == end) continue;
    const int64_t pixel = first + column;
    const Group<T> group{problem.features + pixel * in.channels, work.grad_features + pixel * in.channels,
                         work.grad_params + 2 * pixel, column + 1 < in.width ? 1 : 0, down};
    add_group(group, &sorted[static_cast<size_t>(begin)], end - begin, grads, in.channels,
              reinterpret_cast<const V*>(zeros.data()), sums.data());
  }
}

#define MSP_FLASH_CPU_INSTANCE(suffix, T)                                                              \
  MSP_CPU_CLONES void forward_##suffix(const Problem<T>& problem, void* output, const Block& block) {  \
    forward_block(problem, output, block);                                                             \
  }                                                                                                    \
  MSP_CPU_CLONES void collect_##suffix(const Problem<T>& problem, const Block& block, Band<T>& band) { \
    collect_block(problem, block, band);                                                               \
  }
MSP_FLASH_CPU_INSTANCE(f32, float)
MSP_FLASH_CPU_INSTANCE(f64, double)
#undef MSP_FLASH_CPU_INSTANCE

void forward_task(const Problem<float>& problem, void* output, const Block& block) {
  forward_f32(problem, output, block);
}
void forward_task(const Problem<double>& problem, void* output, const Block& block) {
  forward_f64(problem, output, block);
}
void collect_task(const Problem<float>& problem, const Block& block, Band<float>& band) {
  collect_f32(problem, block, band);
}
void collect_task(const Problem<double>& problem, const Block& block, Band<double>& band) {
  collect_f64(problem, block, band);
}

#define MSP_FLASH_CPU_INSTANCE(suffix, V)                                                                          \
  MSP_CPU_CLONES void row_##suffix(const Problem<arithmetic_t<V>>& problem, const MapRow<arithmetic_t<V>>& work) { \
    backward_row<V>(problem, work);                                                                                \
  }
MSP_FLASH_CPU_INSTANCE(f32, float)
MSP_FLASH_CPU_INSTANCE(f16, half_t)
MSP_FLASH_CPU_INSTANCE(bf16, bfloat16_t)
MSP_FLASH_CPU_INSTANCE(f64, double)
#undef MSP_FLASH_CPU_INSTANCE

constexpr auto kRowTasks = {row_f32, row_f16, row_bf16};

void row_task(Storage type, const Problem<float>& problem, const MapRow<float>& work) {
  kRowTasks.begin()[static_cast<int>(type)](problem, work);
}
void row_task(Storage, const Problem<double>& problem, const MapRow<double>& work) { row_f64(problem, work); }

// A tensor as T: in place, or converted.
template <class T>
class Widened {
 public:
  Widened(const void* data, Storage type, int64_t count, int64_t threads) : data_(static_cast<const T*>(data)) {
    if (size_of(type) == static_cast<int64_t>(sizeof(T))) return;
    constexpr int64_t kPart = 1 << 16;
    copy_.reset(new T[static_cast<size_t>(count)]);
    data_ = copy_.get();
    parallel_for((count + kPart - 1) / kPart, threads, [&](int64_t part) {
      const int64_t first = part * kPart;
      widen_part(data, type, first, std::min(kPart, count - first), copy_.get() + first);
    });
  }
  const T* data() const { return data_; }

 private:
  static void widen_part(const void* data, Storage type, int64_t offset, int64_t count, T* target) {
    widen(data, type, offset, count, target);
  }

  std::unique_ptr<T[]> copy_;
  const T* data_;
};

template <class T>
struct Call {
  Widened<T> features, depth_params;
  Problem<T> problem;

  Call(const FlashInputs& in, int64_t threads)
      : features(in.image_feats, in.feature_type, in.batch * in.cameras * in.height * in.width * in.channels, threads),
        depth_params(in.depth_params, in.depth_type, in.batch * in.cameras * in.height * in.width * 2, threads),
        problem{in, flash_geometry<T>(in), features.data(), depth_params.data()} {}
};

template <class T>
void run_forward(const FlashInputs& in, void* output, int64_t threads) {
  const Call<T> call(in, threads);
  const int64_t blocks = in.grid.y_cells * blocks_of_row(in), cells = in.grid.y_cells * in.grid.x_cells;
  cpu::prefer_huge_pages(output, in.batch * cells * in.channels * size_of(in.feature_type));
  parallel_for(in.batch * blocks, threads, [&](int64_t index) {
    forward_task(call.problem, output, block_at(in, index / blocks, index % blocks));
  });
}

// The records of a batch item by map row, in the order of the bands; starts[row] .. starts[row + 1] are those of a row.
template <class T>
struct SortedRecords {
  std::unique_ptr<Record<T>[]> records;
  std::vector<int64_t> starts;
};

template <class T>
SortedRecords<T> sort_records(const Problem<T>& problem, int64_t batch, int64_t threads) {
  const FlashInputs& in = problem.inputs;
  const int64_t blocks = in.grid.y_cells * blocks_of_row(in), rows = in.cameras * in.height,
                band_count = std::min(blocks, kMostBands);
  std::vector<Band<T>> bands(static_cast<size_t>(band_count));
  parallel_for(band_count, threads, [&](int64_t b) {
    Band<T>& band = bands[static_cast<size_t>(b)];
    band.rows.resize(static_cast<size_t>(rows));
    for (int64_t i = blocks * b / band_count; i < blocks * (b + 1) / band_count; ++i) {
      collect_task(problem, block_at(in, batch, i), band);
    }
  });
  SortedRecords<T> sorted;
  int64_t total = 0;
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    sorted.starts.push_back(total);
    for (Band<T>& band : bands) {
      const int64_t count = band.rows[row];
      band.rows[row] = total;
      total += count;
    }
  }
  sorted.starts.push_back(total);
  sorted.records.reset(new Record<T>[static_cast<size_t>(total)]);
  cpu::prefer_huge_pages(sorted.records.get(), total * static_cast<int64_t>(sizeof(Record<T>)));
  parallel_for(band_count, threads, [&](int64_t b) {
    Band<T>& band = bands[static_cast<size_t>(b)];
    for (const Record<T>& record : band.records) sorted.records[band.rows[static_cast<size_t>(record.row)]++] = record;
    band.records = {};
  });
  return sorted;
}

template <class T>
void run_backward(const FlashInputs& in, const FlashGradients& gradients, int64_t threads) {
  const Call<T> call(in, threads);
  const int64_t rows = in.cameras * in.height, pixels = in.batch * rows * in.width;
  if (in.grid.y_cells * in.grid.x_cells > std::numeric_limits<int32_t>::max() ||
      rows > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("expected fewer than 2^31 cells a batch item");
  }
  cpu::fill_zero(gradients.image_feats, pixels * in.channels * static_cast<int64_t>(sizeof(T)), threads);
  cpu::fill_zero(gradients.depth_params, pixels * 2 * static_cast<int64_t>(sizeof(T)), threads);
  const int64_t pairs = (in.height + 1) / 2;
  for (int64_t batch = 0; batch < in.batch; ++batch) {
    const SortedRecords<T> sorted = sort_records(call.problem, batch, threads);
    for (int64_t odd = 0; odd < 2; ++odd) {
      parallel_for(in.cameras * pairs, threads, [&](int64_t index) {
        const int64_t y = index % pairs * 2 + odd, row = index / pairs * in.height + y;
        if (y >= in.height) return;
        const int64_t begin = sorted.starts[static_cast<size_t>(row)];
        const int64_t end = sorted.starts[static_cast<size_t>(row) + 1];
        if (begin == end) return;
        row_task(in.feature_type, call.problem,
                 MapRow<T>{&sorted.records[begin], end - begin, batch, row, gradients.output,
                           static_cast<T*>(gradients.image_feats), static_cast<T*>(gradients.depth_params)});
      });
    }
  }
}

// Fewer tests than these a thread do not pay for waking it.
int64_t useful_threads(const FlashInputs& in, int64_t threads) {
  const int64_t tests = in.batch * in.cameras * in.grid.x_cells * in.grid.y_cells * in.grid.z_cells;
  return std::max<int64_t>(1, std::min(threads, tests >> 13));
}

}  // namespace

Status launch_flash_bevpool(const FlashInputs& inputs, void* output, const Place& place) {
  return cpu::guarded(kName, [&] {
    cpu::in_sum_type(inputs.feature_type, [&](auto zero) {
      run_forward<decltype(zero)>(inputs, output, useful_threads(inputs, place.ctx));
    });
  });
}

Status launch_flash_bevpool_backward(const FlashInputs& inputs, const FlashGradients& gradients, void*, int64_t,
                                     FlashBackwardRoute, const Place& place) {
  return cpu::guarded(kName, [&] {
    cpu::in_sum_type(inputs.feature_type, [&](auto zero) {
      run_backward<decltype(zero)>(inputs, gradients, useful_threads(inputs, place.ctx));
    });
  });
}

int64_t flash_bevpool_workspace_bytes(const FlashInputs&, FlashBackwardRoute) { return 0; }

FlashBackwardRoute flash_bevpool_reached_route(const FlashInputs&, FlashBackwardRoute) {
  return FlashBackwardRoute::ordered;
}

}  // namespace muspace::bevpool
