// SPDX-License-Identifier: Apache-2.0
// Gradients of the sums of rows per cell, on the cpu.
//
// A task owns the points or rows that it writes. Gradients of rows are summed by ascending point, and the inner product
// of a weight is formed in one place, in one order of channels: results depend neither on the number of threads nor on
// the instruction set.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cell_plan_cpu.h"
#include "cell_pool.h"
#include "cell_pool_cpu.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"

namespace muspace::bevpool {
namespace {

// ---- gradient of the unweighted sum

struct Gathering {
  const void* rows;  // [cells, channels]
  Storage from, to;
  int64_t cells, channels;
  const int32_t* keys;
  void* target;
};

template <class T>
MSP_CPU_INLINE void gather_block(const Gathering& g, int64_t first, int64_t last) {
  const int64_t size = size_of(g.to), bytes = g.channels * size;
  std::vector<T> wide(static_cast<size_t>(g.channels));
  for (int64_t point = first; point < last; ++point) {
    const int64_t key = g.keys[point];
    char* const row = static_cast<char*>(g.target) + point * bytes;
    if (key < 0 || key >= g.cells) {
      std::memset(row, 0, static_cast<size_t>(bytes));
    } else if (g.from == g.to) {
      std::memcpy(row, static_cast<const char*>(g.rows) + key * bytes, static_cast<size_t>(bytes));
    } else {
      widen(g.rows, g.from, key * g.channels, g.channels, wide.data());
      narrow(wide.data(), g.channels, g.target, g.to, point * g.channels);
    }
  }
}
MSP_CPU_CLONES void gather_block_f32(const Gathering& g, int64_t first, int64_t last) {
  gather_block<float>(g, first, last);
}
MSP_CPU_CLONES void gather_block_f64(const Gathering& g, int64_t first, int64_t last) {
  gather_block<double>(g, first, last);
}

void run_gather(const Cells& gradient, const int32_t* keys, int64_t points, void* target, Storage type, void* workspace,
                int64_t threads) {
  Gathering g{gradient.data, gradient.type, type, gradient.cells, gradient.channels, keys, target};
  threads = useful_threads((points + gradient.cells) * gradient.channels, threads);
  if (gradient.pixels > 0) {
    // in the type of the result where that is no wider than the workspace
    g.from = size_of(type) <= size_of(arithmetic_storage(gradient.type)) ? type : gradient.type;
    stage(Staging{gradient.data, gradient.type, g.from, gradient.channels, gradient.pixels, workspace}, gradient.cells,
          threads);
    g.rows = workspace;
  }
  constexpr int64_t kPoints = 512;
  const auto task = gradient.type == Storage::f64 ? gather_block_f64 : gather_block_f32;
  cpu::prefer_huge_pages(target, points * gradient.channels * size_of(type));
  parallel_for((points + kPoints - 1) / kPoints, threads, [&](int64_t block) {
    task(g, block * kPoints, std::min(points, (block + 1) * kPoints));
  });
}

// ---- gradient of the weighted sum

constexpr int kWindow = 64;  // points found before their channels are read

struct PoolBackward {
  Rows rows;
  Weights weights;
  const void* grad_output;  // [cells, channels] of grad_type
  Storage grad_type;
  int64_t cells, points;
  const int32_t* keys;            // frustum order
  int64_t depth_bins, pixels;     // frustum order
  PlanView row_plan;              // any other order
  void* grad_rows;                // as rows
  void* grad_weights;             // arithmetic type; by weight index, or by point
  bool by_point;                  // with a row plan
  const void* zeros;              // one row of zeros, read in place of a point that is not there
};

// Points of one row: their gradient rows, weights, and where the inner products go.
template <class V>
struct PointWindow {
  using T = arithmetic_t<V>;
  int count = 0;
  const V* grads[kWindow + 4];
  T weights[kWindow + 4];
  int64_t slots[kWindow];

  MSP_CPU_INLINE void add(const V* grad, T weight, int64_t slot) {
    grads[count] = grad;
    weights[count] = weight;
    slots[count++] = slot;
  }
};

// sum += the weighted gradient rows of four points; dots[k] = <grads[k], row>.
template <class V, class T>
MSP_CPU_INLINE void add_and_dot(const V* const* grads, const T* weights, const T* row, T* sum, int64_t channels,
                                T* dots) {
  constexpr int kWidth = cpu::kLanes<T>;
  const V *g0 = grads[0], *g1 = grads[1], *g2 = grads[2], *g3 = grads[3];
  const T w0 = weights[0], w1 = weights[1], w2 = weights[2], w3 = weights[3];
  cpu::Lanes<T> products[4] = {};
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    const cpu::Lanes<T> feature = cpu::load_lanes(row + c), a = cpu::load_lanes(g0 + c), b = cpu::load_lanes(g1 + c),
                        d = cpu::load_lanes(g2 + c), e = cpu::load_lanes(g3 + c);
    products[0] += a * feature;
    products[1] += b * feature;
    products[2] += d * feature;
    products[3] += e * feature;
    cpu::store_lanes(sum + c, (((cpu::load_lanes(sum + c) + w0 * a) + w1 * b) + w2 * d) + w3 * e);
  }
  cpu::sum_lanes(products, dots);
  for (; c < channels; ++c) {
    for (int k = 0; k < 4; ++k) {
      const T grad = cpu::load(grads[k] + c);
      dots[k] += grad * row[c];
      sum[c] += weights[k] * grad;
    }
  }
}

// Adds the points of the window to the gradient of their row, writes their weights' gradients, and empties it.
template <class V, class T>
MSP_CPU_INLINE void flush(const PoolBackward& problem, PointWindow<V>& window, const T* row, T* sum) {
  T* const grad_weights = static_cast<T*>(problem.grad_weights);
  for (int k = window.count; k < ((window.count + 3) & ~3); ++k) {
    window.grads[k] = static_cast<const V*>(problem.zeros);
    window.weights[k] = T(0);
  }
  for (int k = 0; k < window.count; k += 4) {
    T dots[4];
    add_and_dot(window.grads + k, window.weights + k, row, sum, problem.rows.channels, dots);
    for (int i = 0; i < 4 && k + i < window.count; ++i) grad_weights[window.slots[k + i]] = dots[i];
  }
  window.count = 0;
}

template <class V, class T>
MSP_CPU_INLINE void frustum_row(const PoolBackward& problem, int64_t index, const T* row, T* sum) {
  const int64_t channels = problem.rows.channels, image = index / problem.pixels;
  const int64_t base = image * problem.depth_bins * problem.pixels + index % problem.pixels;
  PointWindow<V> window;
  for (int64_t bin = 0; bin < problem.depth_bins; ++bin) {
    const int64_t point = base + bin * problem.pixels;
    if (point >= problem.points || point >= problem.weights.count) break;
    const int64_t key = problem.keys[point];
    if (key < 0 || key >= problem.cells) {
      static_cast<T*>(problem.grad_weights)[point] = T(0);
      continue;
    }
    window.add(static_cast<const V*>(problem.grad_output) + key * channels,
               read_number<T>(problem.weights.data, problem.weights.type, point), point);
    if (window.count == kWindow) flush(problem, window, row, sum);
  }
  flush(problem, window, row, sum);
}

template <class V, class T>
MSP_CPU_INLINE void planned_row(const PoolBackward& problem, int64_t index, const T* row, T* sum) {
  const int64_t channels = problem.rows.channels;
  const EntryRange range = entries_of(problem.row_plan, problem.points, index);
  PointWindow<V> window;
  for (int64_t k = range.begin; k < range.end; ++k) {
    const int64_t key = problem.row_plan.entries[k].row, weight = problem.row_plan.entries[k].weight,
                  slot = problem.by_point ? problem.row_plan.order[k] : weight;
    if (key < 0 || key >= problem.cells || weight < 0 || weight >= problem.weights.count) continue;
    if (problem.by_point && (slot < 0 || slot >= problem.points)) continue;
    window.add(static_cast<const V*>(problem.grad_output) + key * channels,
               read_number<T>(problem.weights.data, problem.weights.type, weight), slot);
    if (window.count == kWindow) flush(problem, window, row, sum);
  }
  flush(problem, window, row, sum);
}

template <class V>
MSP_CPU_INLINE void backward_rows(const PoolBackward& problem, int64_t first, int64_t last) {
  using T = arithmetic_t<V>;
  const int64_t channels = problem.rows.channels, numbers = channels * (last - first);
  std::vector<T> buffer(static_cast<size_t>(3 * numbers));
  T *const rows = buffer.data(), *const sums = rows + numbers, *const tile = sums + numbers;
  const bool channels_first = problem.rows.pixels > 0;
  const PixelRun run = channels_first ? pixel_run(first, last, channels, problem.rows.pixels) : PixelRun{};
  if (channels_first) {
    read_pixels(problem.rows.data, problem.rows.type, run, channels, tile, rows);
  } else {
    widen(problem.rows.data, problem.rows.type, first * channels, numbers, rows);
  }
  for (int64_t r = first; r < last; ++r) {
    const int64_t offset = (r - first) * channels;
    if (problem.keys != nullptr) {
      frustum_row<V>(problem, r, rows + offset, sums + offset);
    } else {
      planned_row<V>(problem, r, rows + offset, sums + offset);
    }
  }
  if (channels_first) {
    write_pixels(sums, channels, tile, problem.grad_rows, problem.rows.type, run);
  } else {
    narrow(sums, numbers, problem.grad_rows, problem.rows.type, first * channels);
  }
}

#define MSP_CELL_POOL_CPU_INSTANCE(suffix, V)                                                              \
  MSP_CPU_CLONES void backward_rows_##suffix(const PoolBackward& problem, int64_t first, int64_t last) {   \
    backward_rows<V>(problem, first, last);                                                                \
  }
MSP_CELL_POOL_CPU_INSTANCE(f32, float)
MSP_CELL_POOL_CPU_INSTANCE(f16, half_t)
MSP_CELL_POOL_CPU_INSTANCE(bf16, bfloat16_t)
MSP_CELL_POOL_CPU_INSTANCE(f64, double)
#undef MSP_CELL_POOL_CPU_INSTANCE

constexpr auto kBackwardRows = {backward_rows_f32, backward_rows_f16, backward_rows_bf16, backward_rows_f64};

// grad_weights[weight] = the sum of by_point over the points of the weight, by ascending point.
template <class T>
void add_by_point(const PlanView& plan, int64_t rows, int64_t points, int64_t weights, const T* by_point,
                  T* grad_weights) {
  std::vector<int32_t> weight_of(static_cast<size_t>(points), -1);
  const int64_t entries = entries_of(plan, points, rows - 1).end;
  for (int64_t k = 0; k < entries; ++k) {
    const int64_t point = plan.order[k];
    if (point >= 0 && point < points) weight_of[static_cast<size_t>(point)] = plan.entries[k].weight;
  }
  for (int64_t point = 0; point < points; ++point) {
    const int64_t weight = weight_of[static_cast<size_t>(point)];
    if (weight >= 0 && weight < weights) grad_weights[weight] += by_point[point];
  }
}

void run_tasks(const PoolBackward& problem, int64_t threads) {
  // 16 pixels share the cache lines of keys and weights in frustum order
  const int64_t image = problem.keys != nullptr ? problem.pixels : problem.rows.pixels;
  const Blocks blocks(problem.rows.rows, image, 16);
  const auto task = kBackwardRows.begin()[static_cast<int>(problem.grad_type)];
  parallel_for(blocks.count(), threads, [&](int64_t b) { task(problem, blocks.first(b), blocks.last(b)); });
}

void run_backward(PoolBackward& problem, WeightRoute route, int64_t threads) {
  const int64_t size = size_of(arithmetic_storage(problem.rows.type)), weights = problem.weights.count;
  void* const grad_weights = problem.grad_weights;
  if (problem.keys != nullptr) {
    if (weights > problem.points) cpu::fill_zero(grad_weights, weights * size, threads);
    return run_tasks(problem, threads);
  }
  problem.by_point = route != WeightRoute::unique;
  cpu::fill_zero(grad_weights, (route == WeightRoute::per_point ? problem.points : weights) * size, threads);
  if (route != WeightRoute::atomic) return run_tasks(problem, threads);
  cpu::in_sum_type(problem.rows.type, [&](auto zero) {
    using Sum = decltype(zero);
    std::vector<Sum> by_point(static_cast<size_t>(problem.points));
    problem.grad_weights = by_point.data();
    run_tasks(problem, threads);
    add_by_point(problem.row_plan, problem.rows.rows, problem.points, weights, by_point.data(),
                 static_cast<Sum*>(grad_weights));
  });
}

}  // namespace

int64_t gather_workspace_bytes(const Cells& grad_output, int64_t) {
  if (grad_output.pixels == 0) return 0;
  return grad_output.cells * grad_output.channels * size_of(arithmetic_storage(grad_output.type));
}

Status launch_gather(const Cells& grad_output, const int32_t* keys, int64_t points, void* grad_rows, Storage type,
                     void* workspace, const Place& place) {
  return cpu::guarded("cell_pool gather",
                      [&] { run_gather(grad_output, keys, points, grad_rows, type, workspace, place.ctx); });
}

int64_t pool_backward_workspace_bytes(const Rows&, const Weights&, const Cells& grad_output, int64_t points) {
  if (!staged(grad_output.type, grad_output.cells, grad_output.pixels, points)) return 0;
  return grad_output.cells * grad_output.channels * size_of(arithmetic_storage(grad_output.type));
}

Status launch_pool_backward(const Rows& rows, const Weights& weights, const int32_t* keys, const int32_t* row_plan,
                            int64_t points, int64_t depth_bins, int64_t pixels, WeightRoute route, bool,
                            const PoolGradients& gradients, void* workspace, const Place& place) {
  return cpu::guarded("cell_pool backward", [&] {
    const Cells& output = gradients.output;
    const int64_t threads = useful_threads((points + output.cells) * rows.channels, place.ctx);
    const std::vector<double> zeros(static_cast<size_t>(rows.channels));
    PoolBackward problem{rows, weights,    output.data, output.type,    output.cells,      points, keys,
                         depth_bins, pixels, {},          gradients.rows, gradients.weights, false,  zeros.data()};
    if (row_plan != nullptr) {
      problem.keys = nullptr;
      problem.row_plan = plan_view(row_plan, points, rows.rows, true);
    }
    if (staged(output.type, output.cells, output.pixels, points)) {
      const Storage arithmetic = arithmetic_storage(output.type);
      stage(Staging{output.data, output.type, arithmetic, rows.channels, output.pixels, workspace}, output.cells,
            threads);
      problem.grad_output = workspace;
      problem.grad_type = arithmetic;
    }
    cpu::prefer_huge_pages(gradients.rows, rows.rows * rows.channels * size_of(rows.type));
    run_backward(problem, route, threads);
  });
}

}  // namespace muspace::bevpool
