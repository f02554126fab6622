// SPDX-License-Identifier: Apache-2.0
// CPU loops of multi-scale deformable attention.
//
// Forward: a task is (image, head, block of queries). Backward: a task is (image, head, level, band of rows of the
// level) and owns those rows of grad_value, so nothing is added atomically. Every row receives its additions in the
// order of query and point, whatever the number of bands: results do not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "multi_scale_deformable_attn.h"
#include "multi_scale_deformable_attn_math.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"
#include "sampling_cpu.h"

namespace muspace::msda {
namespace {

constexpr const char* kName = "multi_scale_deformable_attn";

constexpr int64_t kQueryBlock = 256;  // queries of one forward task
constexpr int kSampleBlock = 64;      // samples whose geometry is computed before their channels are read
constexpr int kPrefetchBytes = 256;   // of a corner row, fetched while the samples before it are summed

struct Problem {
  Inputs inputs;
  const Level* levels;
  const void* zeros;  // one row of zero channels, read in place of a corner outside the level
};

// Corner rows and weights of the samples [begin, begin + count) of one (query, head); returns how many count.
template <class V, class T>
MSP_CPU_INLINE int gather_samples(const Problem& problem, int64_t row, int begin, int count, const V* plane,
                                  Gather<V, T>* gathers) {
  const Inputs& in = problem.inputs;
  const Extent& e = in.extent;
  const int64_t pitch = e.heads * e.channels, offset = row * e.levels * e.points + begin;
  const int row_bytes = static_cast<int>(std::min<int64_t>(e.channels * sizeof(V), kPrefetchBytes));
  T location_buffer[2 * kSampleBlock], attention_buffer[kSampleBlock];
  const T* locations = read_numbers(in.sampling_locations, in.location_type, 2 * offset, 2 * count, location_buffer);
  const T* attention = read_numbers(in.attention_weights, in.weight_type, offset, count, attention_buffer);
  int used = 0, points = static_cast<int>(e.points);
  int index = begin / points, point = begin % points;
  for (int s = 0; s < count; ++s) {
    const Level& level = problem.levels[index];
    const Sample<T> sample = locate(locations[2 * s], locations[2 * s + 1], level.height, level.width);
    if (sample.inside) {
      const Corners<T> weights = corner_weights(sample.fx, sample.fy);
      Gather<V, T>& gather = gathers[used++];
      corner_rows(sample, level, plane + level.start * pitch, pitch, static_cast<const V*>(problem.zeros), gather.rows);
      for (const V* corner : gather.rows) prefetch(corner, row_bytes);
      gather.weights[0] = attention[s] * weights.v00;
      gather.weights[1] = attention[s] * weights.v01;
      gather.weights[2] = attention[s] * weights.v10;
      gather.weights[3] = attention[s] * weights.v11;
    }
    if (++point == points) {
      point = 0;
      ++index;
    }
  }
  return used;
}

// The geometry runs one step of at most kSampleBlock samples ahead of the channels, so that corner rows are on their
// way.
template <class V>
MSP_CPU_INLINE void forward_task(const Problem& problem, V* output, int64_t image, int64_t head, int64_t first,
                                 int64_t last) {
  using T = arithmetic_t<V>;
  const Extent& e = problem.inputs.extent;
  const V* plane = static_cast<const V*>(problem.inputs.value) + (image * e.rows * e.heads + head) * e.channels;
  const int samples = static_cast<int>(e.levels * e.points), blocks = (samples + kSampleBlock - 1) / kSampleBlock;
  Gather<V, T> gathers[2][kSampleBlock];
  int used[2];
  std::vector<T> sums(static_cast<size_t>(e.channels));
  const auto row_of = [&](int64_t query) { return (image * e.queries + query) * e.heads + head; };
  const int64_t steps = (last - first) * blocks;
  for (int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      const int begin = static_cast<int>(step % blocks) * kSampleBlock;
      used[step % 2] = gather_samples<V, T>(problem, row_of(first + step / blocks), begin,
                                            std::min(kSampleBlock, samples - begin), plane, gathers[step % 2]);
    }
    if (step == 0) continue;
    const int64_t done = step - 1;
    gather_row(gathers[done % 2], used[done % 2], 0, e.channels, sums.data());
    if (done % blocks == blocks - 1) {
      V* out = output + row_of(first + done / blocks) * e.channels;
      for (int64_t c = 0; c < e.channels; ++c) {
        cpu::store(out + c, sums[c]);
        sums[c] = T(0);
      }
    }
  }
}

// The inner products of `grad` with the corner rows, and the additions to grad_value. Products and sums are not fused:
// the baseline instruction set has no fused multiply-add, and a library call per channel would be far slower than both.
template <class V, class T>
MSP_CPU_INLINE Corners<T> dot_and_scatter(const V* grad, const V* const* rows, const Scatter<T>& scatter,
                                          int64_t channels) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sums[4] = {};
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    const cpu::Lanes<T> g = cpu::load_lanes(grad + c);
    for (int k = 0; k < 4; ++k) {
      sums[k] += g * cpu::load_lanes(rows[k] + c);
      cpu::store_lanes(scatter.rows[k] + c, cpu::load_lanes(scatter.rows[k] + c) + scatter.weights[k] * g);
    }
  }
  T dots[4];
  cpu::sum_lanes(sums, dots);
  for (; c < channels; ++c) {
    const T g = cpu::load(grad + c);
    for (int k = 0; k < 4; ++k) {
      dots[k] += g * cpu::load(rows[k] + c);
      scatter.rows[k][c] += scatter.weights[k] * g;
    }
  }
  return Corners<T>{dots[0], dots[1], dots[2], dots[3]};
}

// One (image, head, level) with its rows [band.first, band.last); bands partition the rows of a level.
struct Band {
  int64_t image, head, level;
  int32_t first, last;
};

template <class V>
struct BandPlanes {
  using T = arithmetic_t<V>;
  const V* value;  // first row of the level, at the head
  T* grad_value;
  int64_t pitch;
};

template <class V, class T>
MSP_CPU_INLINE void write_gradient(const Inputs& in, const Gradients& out, int64_t index, const SampleGradient<T>& g) {
  write_number(out.attention_weights, in.weight_type, index, g.weight);
  write_number(out.sampling_locations, in.location_type, 2 * index, g.x);
  write_number(out.sampling_locations, in.location_type, 2 * index + 1, g.y);
}

// The samples of one query at one level, at most kSampleBlock of them, with their corner rows.
template <class V, class T>
struct Step {
  const V* grad;
  int64_t index;  // of the first sample
  int count;
  T attention[kSampleBlock];
  Sample<T> samples[kSampleBlock];
  const V* rows[kSampleBlock][4];
};

template <class V, class T>
MSP_CPU_INLINE void prepare_step(const Problem& problem, const Gradients& gradients, const Band& band,
                                 const BandPlanes<V>& planes, int64_t query, int begin, Step<V, T>& step) {
  const Inputs& in = problem.inputs;
  const Extent& e = in.extent;
  const Level& level = problem.levels[band.level];
  const int64_t row = (band.image * e.queries + query) * e.heads + band.head;
  const int row_bytes = static_cast<int>(std::min<int64_t>(e.channels * sizeof(V), kPrefetchBytes));
  step.grad = static_cast<const V*>(gradients.output) + row * e.channels;
  step.index = (row * e.levels + band.level) * e.points + begin;
  step.count = static_cast<int>(std::min<int64_t>(kSampleBlock, e.points - begin));
  T location_buffer[2 * kSampleBlock], attention_buffer[kSampleBlock];
  const T* locations =
      read_numbers(in.sampling_locations, in.location_type, 2 * step.index, 2 * step.count, location_buffer);
  const T* attention = read_numbers(in.attention_weights, in.weight_type, step.index, step.count, attention_buffer);
  for (int s = 0; s < step.count; ++s) {
    step.attention[s] = attention[s];
    step.samples[s] = locate(locations[2 * s], locations[2 * s + 1], level.height, level.width);
    if (!step.samples[s].inside) continue;
    corner_rows(step.samples[s], level, planes.value, planes.pitch, static_cast<const V*>(problem.zeros), step.rows[s]);
    for (const V* corner : step.rows[s]) {
      prefetch(corner, row_bytes);
      if (corner != problem.zeros)
        prefetch(planes.grad_value + (corner - planes.value), row_bytes * (sizeof(T) / sizeof(V)));
    }
  }
}

// One sample that is inside. The band with the sample's upper row (row 0 for a sample above it) writes its gradients.
template <class V, class T>
MSP_CPU_INLINE void backward_sample(const Problem& problem, const Gradients& gradients, const Band& band,
                                    const BandPlanes<V>& planes, const Step<V, T>& step, int s, T* scrap) {
  const Level& level = problem.levels[band.level];
  const int64_t channels = problem.inputs.extent.channels;
  const Sample<T>& sample = step.samples[s];
  const T attention = step.attention[s];
  const bool upper = sample.y0 >= band.first && sample.y0 < band.last;
  const bool lower = sample.y0 + 1 >= band.first && sample.y0 + 1 < band.last;
  if (!upper && !lower) return;
  const Corners<T> weights = corner_weights(sample.fx, sample.fy);
  Scatter<T> scatter{
      {scrap, scrap + channels, scrap + 2 * channels, scrap + 3 * channels},
      {attention * weights.v00, attention * weights.v01, attention * weights.v10, attention * weights.v11}};
  for (int k = 0; k < 4; ++k) {
    const V* corner = step.rows[s][k];
    if (corner != problem.zeros && (k < 2 ? upper : lower))
      scatter.rows[k] = planes.grad_value + (corner - planes.value);
  }
  const Corners<T> dots = dot_and_scatter(step.grad, step.rows[s], scatter, channels);
  if (!upper && !(sample.y0 < 0 && band.first == 0)) return;
  write_gradient<V>(problem.inputs, gradients, step.index + s,
                    sample_gradient(dots, sample.fx, sample.fy, attention, level.height, level.width));
}

// The rows of a band without the other heads between them: a few cache lines a page become whole pages. Measured, that pays
// once the samples touch a row about as often as copying does, and not for 16-bit values, whose sums cost more to copy.
template <class V>
struct DensePlanes {
  using T = arithmetic_t<V>;
  std::unique_ptr<V[]> value;
  std::unique_ptr<T[]> grad_value;

  static bool pay(const Extent& e, const Level& level) {
    return sizeof(V) == sizeof(T) && e.heads > 1 && 4 * e.queries * e.points >= int64_t{level.height} * level.width;
  }

  // Value also of the rows above and below, which samples of the band read.
  MSP_CPU_INLINE BandPlanes<V> gather(const BandPlanes<V>& from, const Extent& e, const Level& level, const Band& band) {
    const int64_t rows = int64_t{level.height} * level.width, channels = e.channels;
    value.reset(new V[static_cast<size_t>(rows * channels)]);
    grad_value.reset(new T[static_cast<size_t>(rows * channels)]);
    const int64_t above = std::max<int64_t>(band.first - 1, 0), below = std::min<int64_t>(band.last + 1, level.height);
    for (int64_t row = above * level.width; row < below * level.width; ++row) {
      std::memcpy(&value[row * channels], from.value + row * from.pitch, static_cast<size_t>(channels) * sizeof(V));
    }
    for (int64_t row = int64_t{band.first} * level.width; row < int64_t{band.last} * level.width; ++row) {
      std::memcpy(&grad_value[row * channels], from.grad_value + row * from.pitch, static_cast<size_t>(channels) * sizeof(T));
    }
    return BandPlanes<V>{value.get(), grad_value.get(), channels};
  }

  MSP_CPU_INLINE void scatter(const BandPlanes<V>& to, const Extent& e, const Level& level, const Band& band) const {
    for (int64_t row = int64_t{band.first} * level.width; row < int64_t{band.last} * level.width; ++row) {
      const T* source = grad_value.get() + row * e.channels;
      std::memcpy(to.grad_value + row * to.pitch, source, static_cast<size_t>(e.channels) * sizeof(T));
    }
  }
};

// As in the forward, the geometry runs one step ahead of the channels.
template <class V>
MSP_CPU_INLINE void backward_band(const Problem& problem, const Gradients& gradients, const Band& band) {
  using T = arithmetic_t<V>;
  const Inputs& in = problem.inputs;
  const Extent& e = in.extent;
  const Level& level = problem.levels[band.level];
  const int64_t first = ((band.image * e.rows + level.start) * e.heads + band.head) * e.channels;
  const BandPlanes<V> strided{static_cast<const V*>(in.value) + first, static_cast<T*>(gradients.value) + first,
                              e.heads * e.channels};
  DensePlanes<V> dense;
  const bool copied = DensePlanes<V>::pay(e, level);
  const BandPlanes<V> planes = copied ? dense.gather(strided, e, level, band) : strided;
  std::vector<T> scrap(static_cast<size_t>(4 * e.channels));
  Step<V, T> steps[2];
  const int64_t blocks = (e.points + kSampleBlock - 1) / kSampleBlock, count = e.queries * blocks;
  for (int64_t next = 0; next <= count; ++next) {
    if (next < count) {
      prepare_step(problem, gradients, band, planes, next / blocks, static_cast<int>(next % blocks) * kSampleBlock,
                   steps[next % 2]);
    }
    if (next == 0) continue;
    const Step<V, T>& step = steps[(next - 1) % 2];
    for (int s = 0; s < step.count; ++s) {
      if (step.samples[s].inside) {
        backward_sample<V>(problem, gradients, band, planes, step, s, scrap.data());
      } else if (band.first == 0) {
        write_gradient<V>(in, gradients, step.index + s, SampleGradient<T>{T(0), T(0), T(0)});
      }
    }
  }
  if (copied) dense.scatter(strided, e, level, band);
}

// target_clones takes no template, hence one pair of functions per storage type.
#define MSP_MSDA_CPU_INSTANCE(suffix, V)                                                                        \
  MSP_CPU_CLONES void forward_##suffix(const Problem& problem, void* output, int64_t image, int64_t head,       \
                                       int64_t first, int64_t last) {                                           \
    forward_task<V>(problem, static_cast<V*>(output), image, head, first, last);                                \
  }                                                                                                             \
  MSP_CPU_CLONES void backward_##suffix(const Problem& problem, const Gradients& gradients, const Band& band) { \
    backward_band<V>(problem, gradients, band);                                                                 \
  }
MSP_MSDA_CPU_INSTANCE(f32, float)
MSP_MSDA_CPU_INSTANCE(f16, half_t)
MSP_MSDA_CPU_INSTANCE(bf16, bfloat16_t)
MSP_MSDA_CPU_INSTANCE(f64, double)
#undef MSP_MSDA_CPU_INSTANCE

constexpr auto kForward = {forward_f32, forward_f16, forward_bf16, forward_f64};
constexpr auto kBackward = {backward_f32, backward_f16, backward_bf16, backward_f64};

std::vector<Level> read_levels(const Inputs& inputs) {
  std::vector<Level> levels;
  for (int64_t l = 0; l < inputs.extent.levels; ++l) {
    levels.push_back(read_level(inputs.spatial_shapes, inputs.level_start_index, l, inputs.extent.rows));
  }
  return levels;
}

void run_forward(const Inputs& inputs, void* output, int64_t threads) {
  const Extent& e = inputs.extent;
  const std::vector<Level> levels = read_levels(inputs);
  const std::vector<double> zeros(static_cast<size_t>(e.channels));
  const Problem problem{inputs, levels.data(), zeros.data()};
  const auto task = kForward.begin()[static_cast<int>(inputs.value_type)];
  const int64_t blocks = (e.queries + kQueryBlock - 1) / kQueryBlock;
  parallel_for(e.batch * e.heads * blocks, threads, [&](int64_t index) {
    const int64_t first = index % blocks * kQueryBlock, plane = index / blocks;
    task(problem, output, plane / e.heads, plane % e.heads, first, std::min(first + kQueryBlock, e.queries));
  });
}

void run_backward(const Inputs& inputs, const Gradients& gradients, int64_t threads) {
  const Extent& e = inputs.extent;
  const std::vector<Level> levels = read_levels(inputs);
  const std::vector<double> zeros(static_cast<size_t>(e.channels));
  const Problem problem{inputs, levels.data(), zeros.data()};
  const auto task = kBackward.begin()[static_cast<int>(inputs.value_type)];
  const int64_t size = inputs.value_type == Storage::f64 ? 8 : 4;
  cpu::fill_zero(gradients.value, e.batch * e.rows * e.heads * e.channels * size, threads);
  if (levels_overlap(levels)) {
    parallel_for(e.batch * e.heads, threads, [&](int64_t index) {
      for (int64_t l = 0; l < e.levels; ++l) {
        task(problem, gradients, Band{index / e.heads, index % e.heads, l, 0, levels[static_cast<size_t>(l)].height});
      }
    });
    return;
  }
  const int64_t planes = e.batch * e.heads * e.levels, bands = (threads + planes - 1) / planes;
  parallel_for(planes * bands, threads, [&](int64_t index) {
    const int64_t plane = index / bands, band = index % bands, level = plane % e.levels, owner = plane / e.levels;
    const int64_t height = levels[static_cast<size_t>(level)].height;
    const int32_t first = static_cast<int32_t>(height * band / bands),
                  last = static_cast<int32_t>(height * (band + 1) / bands);
    if (last > first || band == bands - 1) {
      task(problem, gradients, Band{owner / e.heads, owner % e.heads, level, first, last});
    }
  });
}

// Work of fewer (query, head) pairs than this does not pay for waking a second thread.
int64_t useful_threads(const Extent& e, int64_t threads) {
  const int64_t pairs = e.batch * e.queries * e.heads;
  return std::max<int64_t>(1, std::min(threads, pairs / kQueryBlock));
}

}  // namespace

Status launch_forward(const Inputs& inputs, void* output, ForwardRoute, const Place& place) {
  return cpu::guarded(kName, [&] { run_forward(inputs, output, useful_threads(inputs.extent, place.ctx)); });
}

Status launch_backward(const Inputs& inputs, const Gradients& gradients, void*, int64_t, BackwardRoute,
                       const Place& place) {
  return cpu::guarded(kName, [&] { run_backward(inputs, gradients, useful_threads(inputs.extent, place.ctx)); });
}

int64_t workspace_bytes(const Extent&, BackwardRoute) { return 0; }

bool levels_fill(const int64_t* spatial_shapes, const int64_t* level_start_index, int64_t levels, int64_t rows) {
  return host_levels_fill(spatial_shapes, level_start_index, levels, rows);
}

ForwardRoute reached_route(const Extent&, Storage, ForwardRoute wanted) { return wanted; }
BackwardRoute reached_route(const Extent&, Storage, BackwardRoute) { return BackwardRoute::ordered; }

}  // namespace muspace::msda
