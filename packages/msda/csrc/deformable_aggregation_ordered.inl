// SPDX-License-Identifier: Apache-2.0
// The ordered gradient of the feature. In the terms of multi_scale_deformable_attn an anchor is a query, a group of
// channels a head and a (camera, scale) a level; heads share their samples and differ in the weights.
#pragma once

#include "deformable_aggregation_launch.inl"
#include "ordered_launch.inl"

namespace muspace::msda {

struct AnchorSamples {
  static constexpr bool kShared = true;
  AggregationPoints<AnyAccess<false>> points;
  int scales;

  MSP_DEVICE int level(const Extent32& e, int sample) const { return sample % e.levels; }
  MSP_DEVICE void load(const Extent32&, int64_t number, float (&xy)[2], float& attention) const {
    points.location_access.load_pair(points.locations, number / scales, xy);
    if (!in_image(xy[0], xy[1])) xy[0] = NAN;
    attention = 1.f;
  }
  MSP_DEVICE float factor(const Extent32& e, int64_t number, int head) const {
    return points.weight_access.load(points.weights, number * e.heads + head);
  }
};

namespace {

Extent ordered_extent(const AggregationInputs& in) {
  return {in.batch, in.rows, in.groups, in.channels / in.groups, in.anchors, in.cameras * in.scales, in.points};
}

bool ordered_aggregation_reaches(const AggregationInputs& in) {
  return in.scales <= kInt32Max && in.cameras <= kInt32Max / in.scales &&
         in.points <= kInt32Max / (in.cameras * in.scales) && ordered_reaches<AnchorSamples>(ordered_extent(in));
}

/// Writes the gradient of the feature completely.
template <class T>
const char* run_ordered_feature(const AggregationInputs& in, const AggregationGradients& gradients, void* workspace,
                                stream_t stream) {
  using Access = AnyAccess<false>;
  OrderedArguments<T, AnchorSamples> a{};
  a.source.points = {in.sampling_location, in.weights, Access::of(in.location_type), Access::of(in.weight_type)};
  a.source.scales = static_cast<int>(in.scales);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_value = static_cast<float*>(gradients.feature);
  const LevelSource levels{in.spatial_shape, in.scale_start_index, in.rows};
  return run_ordered_rows(a, ordered_extent(in), levels, workspace, stream);
}

}  // namespace
}  // namespace muspace::msda
