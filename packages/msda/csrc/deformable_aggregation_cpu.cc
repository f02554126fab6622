// SPDX-License-Identifier: Apache-2.0
// CPU loops of deformable aggregation.
//
// Forward, and the gradients of locations and weights: a task is a block of anchors. Gradient of the feature: a task is
// (image, level, band of rows of the level) and owns those rows, which receive their additions in the order of anchor
// and point whatever the number of bands. Results do not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "deformable_aggregation.h"
#include "deformable_aggregation_math.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"
#include "sampling_cpu.h"

namespace muspace::msda {
namespace {

constexpr const char* kName = "deformable_aggregation";

constexpr int64_t kAnchorBlock = 8;   // anchors of one task
constexpr int kPrefetchBytes = 1024;  // of a corner row, fetched while the pair before it is summed

struct Problem {
  AggregationInputs inputs;
  const Level* levels;  // [camera, scale]
  const void* zeros;    // one row of zero channels, read in place of a corner outside the map
  int64_t pairs() const { return inputs.points * inputs.cameras; }
};

// The scales at which one (point, camera) pair is sampled.
template <class V, class T>
struct PairStep {
  explicit PairStep(const AggregationInputs& in)
      : gathers(static_cast<size_t>(in.scales)), samples(gathers.size()), scales(gathers.size()),
        buffer(gathers.size() * static_cast<size_t>(in.groups)) {}
  int64_t pair = 0;  // number of the pair among all
  int camera = 0, count = 0;
  std::vector<Gather<V, T>> gathers;  // `weights` hold the corner weights times the weight of one group
  std::vector<Sample<T>> samples;
  std::vector<int> scales;
  std::vector<T> buffer;
  const T* weights = nullptr;  // [scale, group]
};

// False if the pair does not count. Otherwise its rows are on their way.
template <class V, class T>
MSP_CPU_INLINE bool prepare_pair(const Problem& problem, const V* image, int64_t pair, int camera,
                                 PairStep<V, T>& step) {
  const AggregationInputs& in = problem.inputs;
  T buffer[2];
  const T* xy = read_numbers(in.sampling_location, in.location_type, 2 * pair, 2, buffer);
  if (!in_image(xy[0], xy[1])) return false;
  const int64_t numbers = in.scales * in.groups;
  const int row_bytes = static_cast<int>(std::min<int64_t>(in.channels * sizeof(V), kPrefetchBytes));
  step.pair = pair;
  step.camera = camera;
  step.count = 0;
  step.weights =
      read_numbers(in.weights, in.weight_type, pair * numbers, static_cast<int>(numbers), step.buffer.data());
  for (int scale = 0; scale < static_cast<int>(in.scales); ++scale) {
    const Level& level = problem.levels[camera * in.scales + scale];
    const Sample<T> sample = locate(xy[0], xy[1], level.height, level.width);
    if (!sample.inside) continue;
    const auto place = static_cast<size_t>(step.count++);
    step.samples[place] = sample;
    step.scales[place] = scale;
    corner_rows(sample, level, image + level.start * in.channels, in.channels, static_cast<const V*>(problem.zeros),
                step.gathers[place].rows);
    for (const V* corner : step.gathers[place].rows) prefetch(corner, row_bytes);
  }
  return true;
}

template <class V, class T>
MSP_CPU_INLINE void add_pair(const AggregationInputs& in, PairStep<V, T>& step, T* sums) {
  const int64_t channels = in.channels / in.groups;
  for (int64_t group = 0; group < in.groups; ++group) {
    for (size_t i = 0; i < static_cast<size_t>(step.count); ++i) {
      const Corners<T> corner = corner_weights(step.samples[i].fx, step.samples[i].fy);
      const T weight = step.weights[step.scales[i] * in.groups + group];
      step.gathers[i].weights[0] = weight * corner.v00;
      step.gathers[i].weights[1] = weight * corner.v01;
      step.gathers[i].weights[2] = weight * corner.v10;
      step.gathers[i].weights[3] = weight * corner.v11;
    }
    gather_row(step.gathers.data(), step.count, group * channels, (group + 1) * channels, sums);
  }
}

// Anchors [first, last) of all images. The geometry runs one pair ahead of the channels.
template <class V>
MSP_CPU_INLINE void forward_task(const Problem& problem, V* output, int64_t first, int64_t last) {
  using T = arithmetic_t<V>;
  const AggregationInputs& in = problem.inputs;
  PairStep<V, T> steps[2] = {PairStep<V, T>(in), PairStep<V, T>(in)};
  std::vector<T> sums(static_cast<size_t>(in.channels));
  for (int64_t row = first; row < last; ++row) {
    const V* image = static_cast<const V*>(in.feature) + row / in.anchors * in.rows * in.channels;
    int64_t prepared = 0;
    int camera = 0;
    for (int64_t pair = 0; pair < problem.pairs(); ++pair) {
      if (prepare_pair(problem, image, row * problem.pairs() + pair, camera, steps[prepared % 2])) {
        if (++prepared > 1) add_pair(in, steps[prepared % 2], sums.data());
      }
      if (++camera == in.cameras) camera = 0;
    }
    if (prepared > 0) add_pair(in, steps[(prepared - 1) % 2], sums.data());
    V* out = output + row * in.channels;
    for (int64_t c = 0; c < in.channels; ++c) {
      cpu::store(out + c, sums[static_cast<size_t>(c)]);
      sums[static_cast<size_t>(c)] = T(0);
    }
  }
}

// Inner products of the output gradient with the four corner rows over the channels [first, last).
template <class V, class T>
MSP_CPU_INLINE Corners<T> corner_dots(const V* grad, const V* const* rows, int64_t first, int64_t last) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sums[4] = {};
  int64_t c = first;
  for (; c + kWidth <= last; c += kWidth) {
    const cpu::Lanes<T> g = cpu::load_lanes(grad + c);
    for (int k = 0; k < 4; ++k) sums[k] += g * cpu::load_lanes(rows[k] + c);
  }
  T dots[4];
  cpu::sum_lanes(sums, dots);
  for (; c < last; ++c) {
    for (int k = 0; k < 4; ++k) dots[k] += cpu::load(grad + c) * cpu::load(rows[k] + c);
  }
  return Corners<T>{dots[0], dots[1], dots[2], dots[3]};
}

// Gradients of the weights and the location of a pair that counts.
template <class V, class T>
MSP_CPU_INLINE void write_pair(const Problem& problem, const AggregationGradients& out, const PairStep<V, T>& step,
                               const V* grad) {
  const AggregationInputs& in = problem.inputs;
  const int64_t channels = in.channels / in.groups, numbers = in.scales * in.groups;
  T x = T(0), y = T(0);
  size_t place = 0;
  for (int scale = 0; scale < static_cast<int>(in.scales); ++scale) {
    const bool used = place < static_cast<size_t>(step.count) && step.scales[place] == scale;
    const Level& level = problem.levels[step.camera * in.scales + scale];
    for (int64_t group = 0; group < in.groups; ++group) {
      const int64_t number = scale * in.groups + group;
      SampleGradient<T> gradient{T(0), T(0), T(0)};
      if (used) {
        const Corners<T> dots =
            corner_dots<V, T>(grad, step.gathers[place].rows, group * channels, (group + 1) * channels);
        gradient = sample_gradient(dots, step.samples[place].fx, step.samples[place].fy, step.weights[number],
                                   level.height, level.width);
      }
      write_number(out.weights, in.weight_type, step.pair * numbers + number, gradient.weight);
      x += gradient.x, y += gradient.y;
    }
    if (used) ++place;
  }
  write_number(out.sampling_location, in.location_type, 2 * step.pair, x);
  write_number(out.sampling_location, in.location_type, 2 * step.pair + 1, y);
}

template <class V>
MSP_CPU_INLINE void points_task(const Problem& problem, const AggregationGradients& out, int64_t first, int64_t last) {
  using T = arithmetic_t<V>;
  const AggregationInputs& in = problem.inputs;
  const int64_t numbers = in.scales * in.groups;
  PairStep<V, T> steps[2] = {PairStep<V, T>(in), PairStep<V, T>(in)};
  for (int64_t row = first; row < last; ++row) {
    const V* image = static_cast<const V*>(in.feature) + row / in.anchors * in.rows * in.channels;
    const V* grad = static_cast<const V*>(out.output) + row * in.channels;
    int64_t prepared = 0;
    int camera = 0;
    for (int64_t i = 0; i < problem.pairs(); ++i) {
      const int64_t pair = row * problem.pairs() + i;
      if (prepare_pair(problem, image, pair, camera, steps[prepared % 2])) {
        if (++prepared > 1) write_pair(problem, out, steps[prepared % 2], grad);
      } else {
        for (int64_t k = 0; k < numbers; ++k) write_number(out.weights, in.weight_type, pair * numbers + k, T(0));
        for (int k = 0; k < 2; ++k) write_number(out.sampling_location, in.location_type, 2 * pair + k, T(0));
      }
      if (++camera == in.cameras) camera = 0;
    }
    if (prepared > 0) write_pair(problem, out, steps[(prepared - 1) % 2], grad);
  }
}

// Rows [first, last) of one level of an image; bands partition the rows of a level.
struct Band {
  int64_t image, level;
  int32_t first, last;
};

// One sample of the level on its way to the gradient of the feature.
template <class V, class T>
struct ScatterStep {
  explicit ScatterStep(const AggregationInputs& in) : buffer(static_cast<size_t>(in.groups)) {}
  Scatter<T> scatter;  // `weights` hold the corner weights
  const V* grad = nullptr;
  std::vector<T> buffer;
  const T* weights = nullptr;  // of the groups
};

// rows[k] += weights[k] * grad for the channels [first, last). Not fused, as in the other loops.
template <class V, class T>
MSP_CPU_INLINE void scatter_row(const Scatter<T>& scatter, T weight, const V* grad, int64_t first, int64_t last) {
  constexpr int kWidth = cpu::kLanes<T>;
  const T weights[4] = {weight * scatter.weights[0], weight * scatter.weights[1], weight * scatter.weights[2],
                        weight * scatter.weights[3]};
  int64_t c = first;
  for (; c + kWidth <= last; c += kWidth) {
    const cpu::Lanes<T> g = cpu::load_lanes(grad + c);
    for (int k = 0; k < 4; ++k) {
      cpu::store_lanes(scatter.rows[k] + c, cpu::load_lanes(scatter.rows[k] + c) + weights[k] * g);
    }
  }
  for (; c < last; ++c) {
    for (int k = 0; k < 4; ++k) scatter.rows[k][c] += weights[k] * cpu::load(grad + c);
  }
}

template <class V, class T>
MSP_CPU_INLINE void scatter_sample(const AggregationInputs& in, const ScatterStep<V, T>& step) {
  const int64_t channels = in.channels / in.groups;
  for (int64_t group = 0; group < in.groups; ++group) {
    scatter_row(step.scatter, step.weights[group], step.grad, group * channels, (group + 1) * channels);
  }
}

// False if the sample lies outside the image or touches no row of the band.
template <class V, class T>
MSP_CPU_INLINE bool prepare_scatter(const Problem& problem, const Band& band, int64_t pair, T* plane, T* scrap,
                                    ScatterStep<V, T>& step) {
  const AggregationInputs& in = problem.inputs;
  const Level& level = problem.levels[band.level];
  T buffer[2];
  const T* xy = read_numbers(in.sampling_location, in.location_type, 2 * pair, 2, buffer);
  if (!in_image(xy[0], xy[1])) return false;
  const Sample<T> sample = locate(xy[0], xy[1], level.height, level.width);
  const bool upper = sample.y0 >= band.first && sample.y0 < band.last;
  const bool lower = sample.y0 + 1 >= band.first && sample.y0 + 1 < band.last;
  if (!sample.inside || (!upper && !lower)) return false;
  const int64_t scale = band.level % in.scales, offset = (pair * in.scales + scale) * in.groups;
  step.weights = read_numbers(in.weights, in.weight_type, offset, static_cast<int>(in.groups), step.buffer.data());
  const Corners<T> corner = corner_weights(sample.fx, sample.fy);
  step.scatter.weights[0] = corner.v00, step.scatter.weights[1] = corner.v01;
  step.scatter.weights[2] = corner.v10, step.scatter.weights[3] = corner.v11;
  const T* rows[4];
  corner_rows<T, T>(sample, level, plane, in.channels, nullptr, rows);
  const int row_bytes = static_cast<int>(std::min<int64_t>(in.channels * sizeof(T), kPrefetchBytes));
  for (int k = 0; k < 4; ++k) {
    const bool owned = rows[k] != nullptr && (k < 2 ? upper : lower);
    step.scatter.rows[k] = owned ? plane + (rows[k] - plane) : scrap + k * in.channels;
    if (owned) prefetch(step.scatter.rows[k], row_bytes);
  }
  return true;
}

// As in the forward, the geometry runs one sample ahead.
template <class V>
MSP_CPU_INLINE void feature_task(const Problem& problem, const AggregationGradients& out, const Band& band) {
  using T = arithmetic_t<V>;
  const AggregationInputs& in = problem.inputs;
  ScatterStep<V, T> steps[2] = {ScatterStep<V, T>(in), ScatterStep<V, T>(in)};
  std::vector<T> scrap(static_cast<size_t>(4 * in.channels));
  T* plane = static_cast<T*>(out.feature) + (band.image * in.rows + problem.levels[band.level].start) * in.channels;
  const int64_t camera = band.level / in.scales;
  int64_t prepared = 0;
  for (int64_t anchor = 0; anchor < in.anchors; ++anchor) {
    const int64_t row = band.image * in.anchors + anchor;
    for (int64_t point = 0; point < in.points; ++point) {
      ScatterStep<V, T>& step = steps[prepared % 2];
      const int64_t pair = (row * in.points + point) * in.cameras + camera;
      if (!prepare_scatter(problem, band, pair, plane, scrap.data(), step)) continue;
      step.grad = static_cast<const V*>(out.output) + row * in.channels;
      if (++prepared > 1) scatter_sample(in, steps[prepared % 2]);
    }
  }
  if (prepared > 0) scatter_sample(in, steps[(prepared - 1) % 2]);
}

// target_clones takes no template, hence functions per storage type.
#define MSP_AGGREGATION_CPU_INSTANCE(suffix, V)                                                                       \
  MSP_CPU_CLONES void forward_##suffix(const Problem& problem, void* output, int64_t first, int64_t last) {           \
    forward_task<V>(problem, static_cast<V*>(output), first, last);                                                   \
  }                                                                                                                   \
  MSP_CPU_CLONES void points_##suffix(const Problem& problem, const AggregationGradients& out, int64_t first,         \
                                      int64_t last) {                                                                 \
    points_task<V>(problem, out, first, last);                                                                        \
  }                                                                                                                   \
  MSP_CPU_CLONES void feature_##suffix(const Problem& problem, const AggregationGradients& out, const Band& band) {   \
    feature_task<V>(problem, out, band);                                                                              \
  }
MSP_AGGREGATION_CPU_INSTANCE(f32, float)
MSP_AGGREGATION_CPU_INSTANCE(f16, half_t)
MSP_AGGREGATION_CPU_INSTANCE(bf16, bfloat16_t)
MSP_AGGREGATION_CPU_INSTANCE(f64, double)
#undef MSP_AGGREGATION_CPU_INSTANCE

constexpr auto kForward = {forward_f32, forward_f16, forward_bf16, forward_f64};
constexpr auto kPoints = {points_f32, points_f16, points_bf16, points_f64};
constexpr auto kFeature = {feature_f32, feature_f16, feature_bf16, feature_f64};

std::vector<Level> read_levels(const AggregationInputs& in) {
  std::vector<Level> levels;
  for (int64_t l = 0; l < in.cameras * in.scales; ++l) {
    levels.push_back(read_level(in.spatial_shape, in.scale_start_index, l, in.rows));
  }
  return levels;
}

// Calls task(first, last) for blocks of the rows of the output.
template <class Task>
void for_anchors(const AggregationInputs& in, int64_t threads, const Task& task) {
  const int64_t rows = in.batch * in.anchors, blocks = (rows + kAnchorBlock - 1) / kAnchorBlock;
  parallel_for(blocks, threads, [&](int64_t index) {
    task(index * kAnchorBlock, std::min((index + 1) * kAnchorBlock, rows));
  });
}

void run_forward(const AggregationInputs& in, void* output, int64_t threads) {
  const std::vector<Level> levels = read_levels(in);
  const std::vector<double> zeros(static_cast<size_t>(in.channels));
  const Problem problem{in, levels.data(), zeros.data()};
  const auto task = kForward.begin()[static_cast<int>(in.feature_type)];
  for_anchors(in, threads, [&](int64_t first, int64_t last) { task(problem, output, first, last); });
}

void run_feature_gradient(const Problem& problem, const AggregationGradients& out, const std::vector<Level>& levels,
                          int64_t threads) {
  const AggregationInputs& in = problem.inputs;
  const auto task = kFeature.begin()[static_cast<int>(in.feature_type)];
  const int64_t count = static_cast<int64_t>(levels.size());
  cpu::fill_zero(out.feature, in.batch * in.rows * in.channels * (in.feature_type == Storage::f64 ? 8 : 4), threads);
  if (levels_overlap(levels)) {
    parallel_for(in.batch, threads, [&](int64_t image) {
      for (int64_t l = 0; l < count; ++l) task(problem, out, Band{image, l, 0, levels[static_cast<size_t>(l)].height});
    });
    return;
  }
  const int64_t planes = in.batch * count, bands = (threads + planes - 1) / planes;
  parallel_for(planes * bands, threads, [&](int64_t index) {
    const int64_t plane = index / bands, band = index % bands, level = plane % count;
    const int64_t height = levels[static_cast<size_t>(level)].height;
    const auto first = static_cast<int32_t>(height * band / bands);
    const auto last = static_cast<int32_t>(height * (band + 1) / bands);
    if (last > first) task(problem, out, Band{plane / count, level, first, last});
  });
}

void run_backward(const AggregationInputs& in, const AggregationGradients& out, int64_t threads) {
  const std::vector<Level> levels = read_levels(in);
  const std::vector<double> zeros(static_cast<size_t>(in.channels));
  const Problem problem{in, levels.data(), zeros.data()};
  const auto task = kPoints.begin()[static_cast<int>(in.feature_type)];
  for_anchors(in, threads, [&](int64_t first, int64_t last) { task(problem, out, first, last); });
  run_feature_gradient(problem, out, levels, threads);
}

// Fewer points than this do not pay for waking a second thread.
int64_t useful_threads(const AggregationInputs& in, int64_t threads) {
  constexpr int64_t kPairs = 256;
  return std::max<int64_t>(1, std::min(threads, in.batch * in.anchors * in.points * in.cameras / kPairs));
}

}  // namespace

Status launch_aggregation(const AggregationInputs& inputs, void* output, void*, AggregationForwardRoute,
                          const Place& place) {
  return cpu::guarded(kName, [&] { run_forward(inputs, output, useful_threads(inputs, place.ctx)); });
}

Status launch_aggregation_backward(const AggregationInputs& inputs, const AggregationGradients& gradients, void*,
                                   int64_t, AggregationBackwardRoute, const Place& place) {
  return cpu::guarded(kName, [&] { run_backward(inputs, gradients, useful_threads(inputs, place.ctx)); });
}

int64_t aggregation_forward_workspace_bytes(const AggregationInputs&, AggregationForwardRoute) { return 0; }
int64_t aggregation_backward_workspace_bytes(const AggregationInputs&, AggregationBackwardRoute) { return 0; }

AggregationForwardRoute aggregation_reached_route(const AggregationInputs&, AggregationForwardRoute wanted) {
  return wanted;
}
AggregationBackwardRoute aggregation_reached_route(const AggregationInputs&, AggregationBackwardRoute) {
  return AggregationBackwardRoute::ordered;
}

}  // namespace muspace::msda
