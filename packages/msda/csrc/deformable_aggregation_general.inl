// SPDX-License-Identifier: Apache-2.0
// Forward and backward of deformable_aggregation, route "general": any number of channels, points, cameras, scales and
// groups, extents beyond 32 bits.
#pragma once

#include "deformable_aggregation.h"
#include "deformable_aggregation_math.h"
#include "multi_scale_deformable_attn_general.inl"

namespace muspace::msda {

template <class T>
struct GeneralAggregation {
  const T* feature;
  Coordinates<AnyAccess<false>> points;
  LevelSource levels;
  int64_t batch, channels, anchors, pairs, cameras, scales, groups;  // pairs (point, camera) of an anchor
  T* output;             // forward
  const T* grad_output;  // backward
  float* grad_feature;   // null: only the gradients of locations and weights are wanted
  CoordinateGradients<AnyAccess<false>> grad_points;

  MSP_DEVICE Level level(int64_t pair, int64_t scale) const {
    return read_level(levels.spatial_shapes, levels.level_start_index, pair % cameras * scales + scale, levels.rows);
  }
  /// Whether pair `number` of all counts; its location.
  MSP_DEVICE bool locate_pair(int64_t number, float (&xy)[2]) const {
    points.location_access.load_pair(points.locations, number, xy);
    return in_image(xy[0], xy[1]);
  }
};

/// One thread per output element.
template <class T>
MSP_KERNEL(kGeneralThreads, 1)
aggregation_forward_general(const GeneralAggregation<T> a) {
  const int64_t total = a.batch * a.anchors * a.channels, threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += threads) {
    const int64_t row = i / a.channels, channel = i - row * a.channels, group = channel / (a.channels / a.groups);
    const T* feature = a.feature + row / a.anchors * a.levels.rows * a.channels + channel;
    float sum = 0.f;
    for (int64_t pair = 0; pair < a.pairs; ++pair) {
      float xy[2];
      if (!a.locate_pair(row * a.pairs + pair, xy)) continue;
      for (int64_t s = 0; s < a.scales; ++s) {
        const Level level = a.level(pair, s);
        const Sample<float> sample = locate(xy[0], xy[1], level.height, level.width);
        if (!sample.inside) continue;
        const float weight = a.points.weight_access.load(
            a.points.weights, ((row * a.pairs + pair) * a.scales + s) * a.groups + group);
        bool mask[4];
        float weights[4];
        int64_t offsets[4];
        masked_weights(sample, level, mask, weights);
        corner_offsets(level.start, sample.x0, sample.y0, level.width, a.channels, offsets);
        for (int k = 0; k < 4; ++k) {
          if (mask[k]) sum = muspace::fma(weight * weights[k], to_float(feature[offsets[k]]), sum);
        }
      }
    }
    a.output[i] = from_float<T>(sum);
  }
}

/// The four inner products of one sample over the channels of one group, and its share of the gradient of the feature.
template <class T>
MSP_DEVICE Corners<float> group_dots(const GeneralAggregation<T>& a, const Sample<float>& sample, const Level& level,
                                     int64_t first_element, const T* grad_output, float weight) {
  bool mask[4];
  float weights[4], dots[4] = {};
  int64_t offsets[4];
  masked_weights(sample, level, mask, weights);
  corner_offsets(level.start, sample.x0, sample.y0, level.width, a.channels, offsets);
  for (int64_t c = lane_id(); sample.inside && c < a.channels / a.groups; c += kLanes) {
    const float gradient = to_float(grad_output[c]);
    for (int k = 0; k < 4; ++k) {
      if (!mask[k]) continue;
      const int64_t element = first_element + offsets[k] + c;
      dots[k] = muspace::fma(gradient, to_float(a.feature[element]), dots[k]);
      if (a.grad_feature) atomic_add(a.grad_feature + element, weight * weights[k] * gradient);
    }
  }
  for (int k = 0; k < 4; ++k) {
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) dots[k] += shuffle_xor(dots[k], lanes);
  }
  return {dots[0], dots[1], dots[2], dots[3]};
}

/// A group of 32 lanes per pair; lanes go over the channels of one group after the other. Gradients of locations and
/// weights are summed in a fixed order, those of the feature by atomics.
template <class T>
MSP_KERNEL(kGeneralThreads, 1)
aggregation_backward_general(const GeneralAggregation<T> a) {
  const int64_t total = a.batch * a.anchors * a.pairs, step = static_cast<int64_t>(gridDim.x) * kGeneralGroups;
  const int64_t group_channels = a.channels / a.groups;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kGeneralGroups; first < total; first += step) {
    const bool active = first + warp_id() < total;  // an idle group takes part in the shuffles
    const int64_t number = active ? first + warp_id() : 0, row = number / a.pairs, pair = number - row * a.pairs;
    const int64_t image_element = row / a.anchors * a.levels.rows * a.channels;
    float xy[2], x = 0.f, y = 0.f;
    const bool inside = a.locate_pair(number, xy) && active;
    for (int64_t i = 0; i < a.scales * a.groups; ++i) {
      const int64_t scale = i / a.groups, group = i - scale * a.groups, weight_index = number * a.scales * a.groups + i;
      const Level level = a.level(pair, scale);
      Sample<float> sample = locate(xy[0], xy[1], level.height, level.width);
      sample.inside = sample.inside && inside;
      const float weight = a.points.weight_access.load(a.points.weights, weight_index);
      const Corners<float> dots = group_dots(a, sample, level, image_element + group * group_channels,
                                             a.grad_output + row * a.channels + group * group_channels, weight);
      SampleGradient<float> gradient{};
      if (sample.inside) {
        gradient = sample_gradient(dots, sample.fx, sample.fy, weight, level.height, level.width);
      }
      x += gradient.x, y += gradient.y;
      if (active && lane_id() == 0) {
        a.grad_points.weight_access.store(a.grad_points.weights, weight_index, gradient.weight);
      }
    }
    if (active && lane_id() == 0) a.grad_points.location_access.store_pair(a.grad_points.locations, number, x, y);
  }
}

template <class T>
GeneralAggregation<T> general_aggregation(const AggregationInputs& in) {
  using Access = AnyAccess<false>;
  GeneralAggregation<T> a{};
  a.feature = static_cast<const T*>(in.feature);
  a.points = {in.sampling_location, in.weights, Access::of(in.location_type), Access::of(in.weight_type)};
  a.levels = {in.spatial_shape, in.scale_start_index, in.rows};
  a.batch = in.batch, a.channels = in.channels, a.anchors = in.anchors, a.pairs = in.points * in.cameras;
  a.cameras = in.cameras, a.scales = in.scales, a.groups = in.groups;
  return a;
}

template <class T>
const char* run_aggregation_general(const AggregationInputs& in, void* output, stream_t stream) {
  GeneralAggregation<T> a = general_aggregation<T>(in);
  a.output = static_cast<T*>(output);
  const auto kernel = aggregation_forward_general<T>;
  MSP_LAUNCH(kernel, dim3(general_blocks(in.batch * in.anchors * in.channels, kGeneralThreads)), dim3(kGeneralThreads),
             0, stream, a);
  return launch_error();
}

/// With a null `gradients.feature` only the gradients of locations and weights are computed.
template <class T>
const char* run_aggregation_backward_general(const AggregationInputs& in, const AggregationGradients& gradients,
                                             stream_t stream) {
  GeneralAggregation<T> a = general_aggregation<T>(in);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_feature = static_cast<float*>(gradients.feature);
  a.grad_points = {gradients.sampling_location, gradients.weights, a.points.location_access, a.points.weight_access};
  const auto kernel = aggregation_backward_general<T>;
  MSP_LAUNCH(kernel, dim3(general_blocks(in.batch * in.anchors * a.pairs, kGeneralGroups)), dim3(kGeneralThreads), 0,
             stream, a);
  return launch_error();
}

}  // namespace muspace::msda
