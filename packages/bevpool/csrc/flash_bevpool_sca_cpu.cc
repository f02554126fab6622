// SPDX-License-Identifier: Apache-2.0
// flash_bevpool_sca on the cpu.
//
// Forward, and the gradients of offsets and weights: a task is a tile of queries and owns what it writes; the cameras
// of a query are added in order. The gradient of the features: a task is (batch item, camera, head, level, band of
// rows) and owns these rows, which receive their additions in the order of tile, query and point. Nothing is added
// atomically, and results do not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "flash_bevpool_sca.h"
#include "flash_bevpool_sca_math.h"
#include "flash_bevpool_sca_points_cpu.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"
#include "rows_cpu.h"

namespace muspace::bevpool {
namespace {

constexpr const char* kName = "flash_bevpool_sca";

// ---- forward

// A point ready for its channels; the weights of corners outside are 0.
template <class V>
struct Gather {
  const V* rows[4];
  arithmetic_t<V> weights[4];
};

template <class V>
struct GatherWindow {
  int count = 0;
  Gather<V> gathers[kWindow];
};

template <class V>
MSP_CPU_INLINE void gather_window(const Problem<arithmetic_t<V>>& problem, const Window& window,
                                  const Hit<arithmetic_t<V>>& hit, const V* plane, GatherWindow<V>& out) {
  using T = arithmetic_t<V>;
  const ScaInputs& in = problem.inputs;
  const WindowNumbers<T> numbers(problem, window);
  const int64_t bytes = problem.head_channels() * static_cast<int64_t>(sizeof(V));
  const V* const zeros = static_cast<const V*>(problem.zeros);
  out.count = 0;
  visit_points(problem, window, numbers.offsets, hit.references,
               [&](int k, int64_t level, const LevelSample<T>& sample) MSP_CPU_LAMBDA {
                 Gather<V>& gather = out.gathers[out.count++];
                 corner_rows(sample, static_cast<int32_t>(in.level_height[level]),
                             static_cast<int32_t>(in.level_width[level]), plane + in.level_start[level] * in.channels,
                             in.channels, zeros, gather.rows);
                 const CornerWeights<T> corners = bilinear_weights(sample.fx, sample.fy);
                 for (int c = 0; c < 4; ++c) {
                   prefetch(gather.rows[c], bytes);
                   gather.weights[c] = gather.rows[c] == zeros ? T(0) : numbers.weights[k] * corners.at[c];
                 }
               });
}

// sums[c] += the gathered points, for N vectors of channels from `first`, kept in registers over the points.
template <int N, class V, class T>
MSP_CPU_INLINE void gather_vectors(const GatherWindow<V>& window, int64_t first, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sum[N];
  for (int n = 0; n < N; ++n) sum[n] = cpu::load_lanes(sums + first + n * kWidth);
  for (int s = 0; s < window.count; ++s) {
    const Gather<V>& gather = window.gathers[s];
    const T w0 = gather.weights[0], w1 = gather.weights[1], w2 = gather.weights[2], w3 = gather.weights[3];
    const V *r0 = gather.rows[0] + first, *r1 = gather.rows[1] + first, *r2 = gather.rows[2] + first,
            *r3 = gather.rows[3] + first;
    for (int n = 0; n < N; ++n) {
      const int c = n * kWidth;
      sum[n] += (w0 * cpu::load_lanes(r0 + c) + w1 * cpu::load_lanes(r1 + c)) +
                (w2 * cpu::load_lanes(r2 + c) + w3 * cpu::load_lanes(r3 + c));
    }
  }
  for (int n = 0; n < N; ++n) cpu::store_lanes(sums + first + n * kWidth, sum[n]);
}

template <class V, class T>
MSP_CPU_INLINE void add_window(const GatherWindow<V>& window, int64_t channels, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  int64_t c = 0;
  for (; c + 4 * kWidth <= channels; c += 4 * kWidth) gather_vectors<4>(window, c, sums);
  for (; c + kWidth <= channels; c += kWidth) gather_vectors<1>(window, c, sums);
  if (c == channels) return;
  for (int s = 0; s < window.count; ++s) {
    const Gather<V>& gather = window.gathers[s];
    for (int64_t rest = c; rest < channels; ++rest) {
      sums[rest] += (gather.weights[0] * cpu::load(gather.rows[0] + rest) +
                     gather.weights[1] * cpu::load(gather.rows[1] + rest)) +
                    (gather.weights[2] * cpu::load(gather.rows[2] + rest) +
                     gather.weights[3] * cpu::load(gather.rows[3] + rest));
    }
  }
}

template <class V>
MSP_CPU_INLINE void write_average(const Problem<arithmetic_t<V>>& problem, int64_t hits, arithmetic_t<V>* sums,
                                  V* output) {
  using T = arithmetic_t<V>;
  const int64_t channels = problem.head_channels();
  const T scale = camera_scale<T>(hits, problem.inputs.average_hit_cameras);
  for (int64_t c = 0; c < channels; ++c) {
    cpu::store(output + c, sums[c] * scale);
    sums[c] = T(0);
  }
}

template <class V>
MSP_CPU_INLINE void forward_tile(const Problem<arithmetic_t<V>>& problem, void* output, const Tile& tile) {
  using T = arithmetic_t<V>;
  const ScaInputs& in = problem.inputs;
  const TileHits<T> found(problem, tile);
  const int64_t channels = problem.head_channels(), base = tile.batch * problem.queries();
  V* const rows = static_cast<V*>(output) + base * in.channels;
  for (int64_t index = 0; index < tile.size(); ++index) {
    if (found.counts[index] > 0) continue;
    std::memset(rows + query_of(in, tile, index) * in.channels, 0, static_cast<size_t>(in.channels) * sizeof(V));
  }
  GatherWindow<V> gathered[2];
  std::vector<T> sums(static_cast<size_t>(channels));
  for (int64_t head = 0; head < in.heads; ++head) {
    walk_windows(
        problem, tile, found, head,
        [&](const Hit<T>& hit, const Window& window, int slot) MSP_CPU_LAMBDA {
          gather_window<V>(problem, window, hit, plane_of<V>(in, tile.batch, hit.camera, head), gathered[slot]);
        },
        [&](const Hit<T>&, int slot) MSP_CPU_LAMBDA { add_window(gathered[slot], channels, sums.data()); },
        [&](const Hit<T>& hit) MSP_CPU_LAMBDA {
          V* const row = rows + hit.query * in.channels + head * channels;
          write_average<V>(problem, found.counts[hit.index], sums.data(), row);
        });
  }
}

// ---- gradients of offsets and weights

// dots[k] = <grad, rows[k]>
template <class V, class T>
MSP_CPU_INLINE void dot_corners(const V* grad, const V* const* rows, int64_t channels, T* dots) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sums[4] = {};
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    const cpu::Lanes<T> g = cpu::load_lanes(grad + c);
    for (int k = 0; k < 4; ++k) sums[k] += g * cpu::load_lanes(rows[k] + c);
  }
  cpu::sum_lanes(sums, dots);
  for (; c < channels; ++c) {
    for (int k = 0; k < 4; ++k) dots[k] += cpu::load(grad + c) * cpu::load(rows[k] + c);
  }
}

// The points of a window, with what their gradients are made of.
template <class V>
struct DotWindow {
  int count = 0;
  int points[kWindow];
  arithmetic_t<V> fx[kWindow], fy[kWindow], weights[kWindow];
  const V* rows[kWindow][4];
};

template <class V>
MSP_CPU_INLINE void locate_window(const Problem<arithmetic_t<V>>& problem, const Window& window,
                                  const Hit<arithmetic_t<V>>& hit, const V* plane, DotWindow<V>& out) {
  using T = arithmetic_t<V>;
  const ScaInputs& in = problem.inputs;
  const WindowNumbers<T> numbers(problem, window);
  const int64_t bytes = problem.head_channels() * static_cast<int64_t>(sizeof(V));
  out.count = 0;
  visit_points(problem, window, numbers.offsets, hit.references,
               [&](int k, int64_t level, const LevelSample<T>& sample) MSP_CPU_LAMBDA {
                 const int s = out.count++;
                 out.points[s] = window.begin + k;
                 out.fx[s] = sample.fx, out.fy[s] = sample.fy, out.weights[s] = numbers.weights[k];
                 corner_rows(sample, static_cast<int32_t>(in.level_height[level]),
                             static_cast<int32_t>(in.level_width[level]), plane + in.level_start[level] * in.channels,
                             in.channels, static_cast<const V*>(problem.zeros), out.rows[s]);
                 for (const V* row : out.rows[s]) prefetch(row, bytes);
               });
}

// Gradients of the points of one (query, head): offsets [points, 2] and weights [points].
template <class T>
struct PointSums {
  std::vector<T> offsets, weights;

  explicit PointSums(int64_t points) : offsets(static_cast<size_t>(2 * points)), weights(static_cast<size_t>(points)) {}

  // Writes the sums of `row` and sets them to zero.
  MSP_CPU_INLINE void write(const ScaInputs& in, const ScaGradients& gradients, int64_t row) {
    const int64_t points = static_cast<int64_t>(weights.size());
    if (gradients.sampling_offsets != nullptr) {
      narrow(offsets.data(), 2 * points, gradients.sampling_offsets, in.offset_type, 2 * row * points);
    }
    if (gradients.attention_weights != nullptr) {
      narrow(weights.data(), points, gradients.attention_weights, in.weight_type, row * points);
    }
    std::fill(offsets.begin(), offsets.end(), T(0));
    std::fill(weights.begin(), weights.end(), T(0));
  }
};

template <class V>
MSP_CPU_INLINE void add_dots(const DotWindow<V>& window, const V* grad, int64_t channels, arithmetic_t<V> scale,
                             PointSums<arithmetic_t<V>>& sums) {
  using T = arithmetic_t<V>;
  for (int s = 0; s < window.count; ++s) {
    T dots[4];
    dot_corners(grad, window.rows[s], channels, dots);
    const PointGradient<T> gradient = point_gradient(dots[0], dots[1], dots[2], dots[3], window.fx[s], window.fy[s],
                                                     window.weights[s], scale);
    const size_t point = static_cast<size_t>(window.points[s]);
    sums.offsets[2 * point] += gradient.offset_x;
    sums.offsets[2 * point + 1] += gradient.offset_y;
    sums.weights[point] += gradient.weight;
  }
}

template <class V>
MSP_CPU_INLINE void points_tile(const Problem<arithmetic_t<V>>& problem, const ScaGradients& gradients,
                                const Tile& tile) {
  using T = arithmetic_t<V>;
  const ScaInputs& in = problem.inputs;
  const TileHits<T> found(problem, tile);
  const int64_t channels = problem.head_channels(), base = tile.batch * problem.queries();
  const V* const grads = static_cast<const V*>(gradients.output) + base * in.channels;
  PointSums<T> sums(in.levels * in.points);
  for (int64_t index = 0; index < tile.size(); ++index) {
    if (found.counts[index] > 0) continue;
    const int64_t row = (base + query_of(in, tile, index)) * in.heads;
    for (int64_t head = 0; head < in.heads; ++head) sums.write(in, gradients, row + head);
  }
  DotWindow<V> located[2];
  for (int64_t head = 0; head < in.heads; ++head) {
    walk_windows(
        problem, tile, found, head,
        [&](const Hit<T>& hit, const Window& window, int slot) MSP_CPU_LAMBDA {
          prefetch(grads + hit.query * in.channels + head * channels, channels * static_cast<int64_t>(sizeof(V)));
          locate_window<V>(problem, window, hit, plane_of<V>(in, tile.batch, hit.camera, head), located[slot]);
        },
        [&](const Hit<T>& hit, int slot) MSP_CPU_LAMBDA {
          const T scale = camera_scale<T>(found.counts[hit.index], in.average_hit_cameras);
          add_dots(located[slot], grads + hit.query * in.channels + head * channels, channels, scale, sums);
        },
        [&](const Hit<T>& hit) MSP_CPU_LAMBDA { sums.write(in, gradients, (base + hit.query) * in.heads + head); });
  }
}

// ---- gradient of the features

// The queries that one camera hits, by tile, with the references of all anchors and what their sums are scaled by.
template <class T>
struct CameraHits {
  std::vector<int64_t> queries;
  std::vector<Reference<T>> references;
  std::vector<T> scales;
};

template <class T>
MSP_CPU_INLINE void find_camera_hits(const Problem<T>& problem, int64_t batch, int64_t camera, CameraHits<T>& out) {
  const ScaInputs& in = problem.inputs;
  std::vector<Reference<T>> references(static_cast<size_t>(in.anchors));
  for (int64_t t = 0; t < tile_count(in); ++t) {
    const Tile tile = tile_at(in, batch, t);
    for (int64_t index = 0; index < tile.size(); ++index) {
      const int64_t query = query_of(in, tile, index);
      if (!find_hit(problem, batch, camera, query, references.data())) continue;
      out.queries.push_back(query);
      out.references.insert(out.references.end(), references.begin(), references.end());
    }
  }
}

// Rows [first, last) of one level of one camera, at one head; `grads` is the first row of the level.
template <class T>
struct Band {
  int64_t batch, head, level;
  int32_t first, last;
  T* grads;
};

// Where the channels of one point are added: rows of the band, or a scrap row.
template <class T>
struct Scatter {
  T* rows[4];
  T weights[4];
};

template <class V, class T>
MSP_CPU_INLINE void scatter_row(const V* grad, const Scatter<T>& scatter, int64_t channels) {
  constexpr int kWidth = cpu::kLanes<T>;
  int64_t c = 0;
  for (; c + kWidth <= channels; c += kWidth) {
    const cpu::Lanes<T> g = cpu::load_lanes(grad + c);
    for (int k = 0; k < 4; ++k) {
      cpu::store_lanes(scatter.rows[k] + c, cpu::load_lanes(scatter.rows[k] + c) + scatter.weights[k] * g);
    }
  }
  for (; c < channels; ++c) {
    for (int k = 0; k < 4; ++k) scatter.rows[k][c] += scatter.weights[k] * cpu::load(grad + c);
  }
}

template <class T>
struct ScatterWindow {
  int count = 0;
  Scatter<T> scatters[kWindow];
};

// Points [begin, begin + kWindow) of one hit that touch the band.
template <class T>
MSP_CPU_INLINE void scatter_window(const Problem<T>& problem, const Band<T>& band, const CameraHits<T>& hits,
                                   size_t index, int begin, T* scrap, ScatterWindow<T>& out) {
  const ScaInputs& in = problem.inputs;
  const int64_t row = (band.batch * problem.queries() + hits.queries[index]) * in.heads + band.head;
  const int count = static_cast<int>(std::min<int64_t>(kWindow, in.points - begin));
  const Window window{row, static_cast<int>(band.level * in.points) + begin, count};
  const WindowNumbers<T> numbers(problem, window);
  const int32_t height = static_cast<int32_t>(in.level_height[band.level]),
                width = static_cast<int32_t>(in.level_width[band.level]);
  const int64_t channels = problem.head_channels(), bytes = channels * static_cast<int64_t>(sizeof(T));
  out.count = 0;
  visit_points(problem, window, numbers.offsets, &hits.references[index * static_cast<size_t>(in.anchors)],
               [&](int k, int64_t, const LevelSample<T>& sample) MSP_CPU_LAMBDA {
                 if (sample.y0 + 1 < band.first || sample.y0 >= band.last) return;
                 Scatter<T>& scatter = out.scatters[out.count++];
                 corner_rows(sample, height, width, band.grads, in.channels, scrap, scatter.rows);
                 const CornerWeights<T> corners = bilinear_weights(sample.fx, sample.fy);
                 for (int c = 0; c < 4; ++c) {
                   const int32_t y = sample.y0 + (c >> 1);
                   if (y < band.first || y >= band.last) scatter.rows[c] = scrap;
                   scatter.weights[c] = hits.scales[index] * numbers.weights[k] * corners.at[c];
                   prefetch(scatter.rows[c], bytes);
                 }
               });
}

template <class V>
MSP_CPU_INLINE void scatter_band(const Problem<arithmetic_t<V>>& problem, const void* grad_output,
                                 const Band<arithmetic_t<V>>& band, const CameraHits<arithmetic_t<V>>& hits) {
  using T = arithmetic_t<V>;
  const ScaInputs& in = problem.inputs;
  const int64_t channels = problem.head_channels(), windows = (in.points + kWindow - 1) / kWindow;
  const int64_t steps = static_cast<int64_t>(hits.queries.size()) * windows;
  const V* const grads =
      static_cast<const V*>(grad_output) + band.batch * problem.queries() * in.channels + band.head * channels;
  std::vector<T> scrap(static_cast<size_t>(channels));
  ScatterWindow<T> located[2];
  for (int64_t step = 0; step <= steps; ++step) {
    if (step + kAhead < steps) {
      const int64_t query = hits.queries[static_cast<size_t>((step + kAhead) / windows)];
      prefetch(grads + query * in.channels, channels * static_cast<int64_t>(sizeof(V)));
      const int64_t row = ((band.batch * problem.queries() + query) * in.heads + band.head) * in.levels + band.level;
      prefetch_numbers(in, row * in.points, std::min<int64_t>(in.points, kWindow));
    }
    if (step < steps) {
      scatter_window(problem, band, hits, static_cast<size_t>(step / windows),
                     static_cast<int>(step % windows) * kWindow, scrap.data(), located[step % 2]);
    }
    if (step == 0) continue;
    const ScatterWindow<T>& window = located[(step - 1) % 2];
    const V* const grad = grads + hits.queries[static_cast<size_t>((step - 1) / windows)] * in.channels;
    for (int s = 0; s < window.count; ++s) scatter_row(grad, window.scatters[s], channels);
  }
}

#define MSP_SCA_CPU_INSTANCE(suffix, V)                                                                              \
  MSP_CPU_CLONES void forward_##suffix(const Problem<arithmetic_t<V>>& problem, void* output,                        \
                                       const Tile& tile) {                                                    \
    forward_tile<V>(problem, output, tile);                                                                      \
  }                                                                                                                  \
  MSP_CPU_CLONES void points_##suffix(const Problem<arithmetic_t<V>>& problem, const ScaGradients& gradients,        \
                                      const Tile& tile) {                                                     \
    points_tile<V>(problem, gradients, tile);                                                                     \
  }                                                                                                                  \
  MSP_CPU_CLONES void scatter_##suffix(const Problem<arithmetic_t<V>>& problem, const void* grad_output,             \
                                       const Band<arithmetic_t<V>>& band, const CameraHits<arithmetic_t<V>>& hits) { \
    scatter_band<V>(problem, grad_output, band, hits);                                                               \
  }
MSP_SCA_CPU_INSTANCE(f32, float)
MSP_SCA_CPU_INSTANCE(f16, half_t)
MSP_SCA_CPU_INSTANCE(bf16, bfloat16_t)
MSP_SCA_CPU_INSTANCE(f64, double)
#undef MSP_SCA_CPU_INSTANCE

#define MSP_SCA_CPU_INSTANCE(T)                                                              \
  MSP_CPU_CLONES void camera_hits(const Problem<T>& problem, int64_t batch, int64_t camera,  \
                                  CameraHits<T>& out) {                                      \
    find_camera_hits(problem, batch, camera, out);                                           \
  }
MSP_SCA_CPU_INSTANCE(float)
MSP_SCA_CPU_INSTANCE(double)
#undef MSP_SCA_CPU_INSTANCE

// The loops of a storage type.
template <class T>
struct Loops {
  void (*forward)(const Problem<T>&, void*, const Tile&);
  void (*points)(const Problem<T>&, const ScaGradients&, const Tile&);
  void (*scatter)(const Problem<T>&, const void*, const Band<T>&, const CameraHits<T>&);
};

constexpr Loops<float> kLoops[3] = {{forward_f32, points_f32, scatter_f32},
                                    {forward_f16, points_f16, scatter_f16},
                                    {forward_bf16, points_bf16, scatter_bf16}};
constexpr Loops<double> kWideLoops = {forward_f64, points_f64, scatter_f64};

template <class T>
const Loops<T>& loops_of(Storage type) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return kWideLoops;
  } else {
    return kLoops[static_cast<int>(type)];
  }
}

template <class T>
Problem<T> problem_of(const ScaInputs& in, const std::vector<double>& zeros) {
  return Problem<T>{in, sca_geometry<T>(in), static_cast<T>(1.0 / static_cast<double>(in.levels * in.points)),
                    zeros.data()};
}

template <class Task>
void for_tiles(const ScaInputs& in, int64_t threads, const Task& task) {
  const int64_t tiles = tile_count(in);
  parallel_for(in.batch * tiles, threads, [&](int64_t index) { task(tile_at(in, index / tiles, index % tiles)); });
}

template <class T>
void run_forward(const ScaInputs& in, void* output, int64_t threads) {
  const std::vector<double> zeros(static_cast<size_t>(in.channels));
  const Problem<T> problem = problem_of<T>(in, zeros);
  const Loops<T>& loops = loops_of<T>(in.feature_type);
  cpu::prefer_huge_pages(output, in.batch * problem.queries() * in.channels * size_of(in.feature_type));
  for_tiles(in, threads, [&](const Tile& tile) { loops.forward(problem, output, tile); });
}

// By batch item and camera.
template <class T>
std::vector<CameraHits<T>> all_hits(const Problem<T>& problem, int64_t threads) {
  const ScaInputs& in = problem.inputs;
  std::vector<CameraHits<T>> hits(static_cast<size_t>(in.batch * in.cameras));
  parallel_for(in.batch * in.cameras, threads, [&](int64_t index) {
    camera_hits(problem, index / in.cameras, index % in.cameras, hits[static_cast<size_t>(index)]);
  });
  parallel_for(in.batch, threads, [&](int64_t batch) {
    std::vector<int32_t> counts(static_cast<size_t>(problem.queries()));
    CameraHits<T>* const cameras = &hits[static_cast<size_t>(batch * in.cameras)];
    for (int64_t n = 0; n < in.cameras; ++n) {
      for (const int64_t query : cameras[n].queries) ++counts[static_cast<size_t>(query)];
    }
    for (int64_t n = 0; n < in.cameras; ++n) {
      for (const int64_t query : cameras[n].queries) {
        cameras[n].scales.push_back(camera_scale<T>(counts[static_cast<size_t>(query)], in.average_hit_cameras));
      }
    }
  });
  return hits;
}

template <class T>
void run_scatter(const Problem<T>& problem, const ScaGradients& gradients, int64_t threads) {
  const ScaInputs& in = problem.inputs;
  const std::vector<CameraHits<T>> hits = all_hits(problem, threads);
  const Loops<T>& loops = loops_of<T>(in.feature_type);
  const int64_t planes = in.batch * in.cameras * in.heads * in.levels;
  const int64_t bands = (2 * threads + planes - 1) / planes;
  parallel_for(planes * bands, threads, [&](int64_t index) {
    const int64_t band = index % bands, level = index / bands % in.levels, head = index / bands / in.levels % in.heads,
                  camera = index / bands / in.levels / in.heads;
    const int64_t height = in.level_height[level];
    const int32_t first = static_cast<int32_t>(height * band / bands),
                  last = static_cast<int32_t>(height * (band + 1) / bands);
    if (first == last) return;
    T* const grads = static_cast<T*>(gradients.image_feats) +
                     (camera * in.rows + in.level_start[level]) * in.channels + head * problem.head_channels();
    loops.scatter(problem, gradients.output, Band<T>{camera / in.cameras, head, level, first, last, grads},
                  hits[static_cast<size_t>(camera)]);
  });
}

template <class T>
void run_backward(const ScaInputs& in, const ScaGradients& gradients, int64_t threads) {
  const std::vector<double> zeros(static_cast<size_t>(in.channels));
  const Problem<T> problem = problem_of<T>(in, zeros);
  const Loops<T>& loops = loops_of<T>(in.feature_type);
  cpu::fill_zero(gradients.image_feats, in.batch * in.cameras * in.rows * in.channels * static_cast<int64_t>(sizeof(T)),
                 threads);
  run_scatter(problem, gradients, threads);
  if (gradients.sampling_offsets == nullptr && gradients.attention_weights == nullptr) return;
  for_tiles(in, threads, [&](const Tile& tile) { loops.points(problem, gradients, tile); });
}

// Fewer points than these a thread do not pay for waking it.
int64_t useful_threads(const ScaInputs& in, int64_t threads) {
  const int64_t points = in.batch * in.x_cells * in.y_cells * in.heads * in.levels * in.points;
  return std::max<int64_t>(1, std::min(threads, points >> 11));
}

}  // namespace

Status launch_flash_bevpool_sca(const ScaInputs& inputs, void* output, const Place& place) {
  return cpu::guarded(kName, [&] {
    cpu::in_sum_type(inputs.feature_type, [&](auto zero) {
      run_forward<decltype(zero)>(inputs, output, useful_threads(inputs, place.ctx));
    });
  });
}

Status launch_flash_bevpool_sca_backward(const ScaInputs& inputs, const ScaGradients& gradients, void*, int64_t,
                                         ScaBackwardRoute, const Place& place) {
  return cpu::guarded(kName, [&] {
    cpu::in_sum_type(inputs.feature_type, [&](auto zero) {
      run_backward<decltype(zero)>(inputs, gradients, useful_threads(inputs, place.ctx));
    });
  });
}

int64_t flash_bevpool_sca_workspace_bytes(const ScaInputs&, ScaBackwardRoute) { return 0; }

ScaBackwardRoute flash_bevpool_sca_reached_route(const ScaInputs&, ScaBackwardRoute) {
  return ScaBackwardRoute::ordered;
}

}  // namespace muspace::bevpool
