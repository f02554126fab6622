// SPDX-License-Identifier: Apache-2.0
// Backward launcher of deformable_aggregation.
#pragma once

#include "deformable_aggregation_backward.inl"
#include "deformable_aggregation_general.inl"
#include "deformable_aggregation_launch.inl"
#include "deformable_aggregation_ordered.inl"

namespace muspace::msda {
namespace {

using SortedPlan = AggregationPlan<256, 128, 4, 4>;  // found by measurement on an H200

template <bool kAddFeature, class T, class Access>
const char* run_aggregation_sorted(const AggregationInputs& in, const AggregationGradients& gradients,
                                   stream_t stream) {
  const AggregationArguments<T, Access> a = aggregation_arguments<SortedPlan, T, Access>(in);
  const AggregationGradientArguments<T, Access> g{
      static_cast<const T*>(gradients.output),
      static_cast<float*>(gradients.feature),
      {gradients.sampling_location, gradients.weights, a.points.location_access, a.points.weight_access}};
  const auto kernel = aggregation_block_sorted<SortedPlan, kAddFeature, T, Access>;
  MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(a.anchors * a.slices), static_cast<unsigned>(in.batch)),
             dim3(SortedPlan::kThreads), 0, stream, a, g);
  return launch_error();
}

template <bool kAddFeature, class T>
const char* choose_aggregation_sorted(const AggregationInputs& in, const AggregationGradients& gradients,
                                      stream_t stream) {
  if (float32_points(in)) return run_aggregation_sorted<kAddFeature, T, Float32Access>(in, gradients, stream);
  return run_aggregation_sorted<kAddFeature, T, AnyAccess<false>>(in, gradients, stream);
}

template <class T>
const char* run_aggregation_backward(const AggregationInputs& in, const AggregationGradients& gradients,
                                     void* workspace, AggregationBackwardRoute route, stream_t stream) {
  if (route == AggregationBackwardRoute::ordered) {
    const char* error = run_ordered_feature<T>(in, gradients, workspace, stream);
    if (error) return error;
    AggregationGradients points = gradients;
    points.feature = nullptr;
    if (pixels_reach(in)) return choose_aggregation_sorted<false, T>(in, points, stream);
    return run_aggregation_backward_general<T>(in, points, stream);
  }
  const size_t bytes = static_cast<size_t>(in.batch * in.rows * in.channels) * sizeof(float);
  const char* error = zero_fill(gradients.feature, bytes, stream);
  if (error) return error;
  if (route == AggregationBackwardRoute::block_sorted && pixels_reach(in)) {
    return choose_aggregation_sorted<true, T>(in, gradients, stream);
  }
  return run_aggregation_backward_general<T>(in, gradients, stream);
}

}  // namespace

AggregationBackwardRoute aggregation_reached_route(const AggregationInputs& inputs, AggregationBackwardRoute wanted) {
  const bool unsorted = wanted == AggregationBackwardRoute::block_sorted && !pixels_reach(inputs);
  return unsorted ? AggregationBackwardRoute::general : wanted;
}

int64_t aggregation_backward_workspace_bytes(const AggregationInputs& in, AggregationBackwardRoute route) {
  const bool ordered = route == AggregationBackwardRoute::ordered && ordered_aggregation_reaches(in);
  return ordered ? OrderedWorkspace<AnchorSamples>(ordered_extent(in), nullptr).bytes : 0;
}

Status launch_aggregation_backward(const AggregationInputs& inputs, const AggregationGradients& gradients,
                                   void* workspace, int64_t, AggregationBackwardRoute route, const Place& place) {
  if (route == AggregationBackwardRoute::ordered && !ordered_aggregation_reaches(inputs)) {
    return failure(kValueError,
                   "deformable_aggregation backward: the ordered route takes fewer than 2^28 samples (points, cameras "
                   "and scales of all anchors) and 2^30 elements of the output per image");
  }
  const DeviceGuard guard(place.device);
  const char* error = with_feature_type(inputs, [&](auto type) {
    return run_aggregation_backward<decltype(type)>(inputs, gradients, workspace, route, stream_at(place.ctx));
  });
  return error ? failure(kRuntimeError, "deformable_aggregation backward: %s", error) : success();
}

}  // namespace muspace::msda
