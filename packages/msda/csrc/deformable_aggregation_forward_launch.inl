// SPDX-License-Identifier: Apache-2.0
// Forward launcher of deformable_aggregation.
#pragma once

#include "deformable_aggregation_forward.inl"
#include "deformable_aggregation_general.inl"
#include "deformable_aggregation_launch.inl"

namespace muspace::msda {
namespace {

using FusedPlan = AggregationPlan<128, 128, 8, 7>;  // found by measurement on an H200

template <class T, class Access>
const char* run_aggregation_fused(const AggregationInputs& in, void* output, void* workspace, stream_t stream) {
  const AggregationArguments<T, Access> a = aggregation_arguments<FusedPlan, T, Access>(in);
  const auto kernel = aggregation_fused<FusedPlan, T, Access>;
  float* const partial = static_cast<float*>(workspace);
  T* const result = static_cast<T*>(output);
  MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(a.anchors * a.slices), static_cast<unsigned>(in.batch)),
             dim3(FusedPlan::kThreads), 0, stream, a, result, partial);
  if (a.slices == 1) return launch_error();
  const int64_t elements = in.batch * in.anchors * in.channels;
  const auto sum = aggregation_sum_slices<T>;
  MSP_LAUNCH(sum, dim3(static_cast<unsigned>((elements + kSumThreads - 1) / kSumThreads)), dim3(kSumThreads), 0, stream,
             partial, result, elements, a.channels, a.slices);
  return launch_error();
}

}  // namespace

AggregationForwardRoute aggregation_reached_route(const AggregationInputs& inputs, AggregationForwardRoute wanted) {
  return pixels_reach(inputs) ? wanted : AggregationForwardRoute::general;
}

int64_t aggregation_forward_workspace_bytes(const AggregationInputs& in, AggregationForwardRoute route) {
  if (aggregation_reached_route(in, route) != AggregationForwardRoute::fused) return 0;
  const int64_t slices = aggregation_slices(in);
  return slices == 1 ? 0 : in.batch * in.anchors * slices * in.channels * 4;
}

Status launch_aggregation(const AggregationInputs& inputs, void* output, void* workspace, AggregationForwardRoute route,
                          const Place& place) {
  const bool fused = aggregation_reached_route(inputs, route) == AggregationForwardRoute::fused;
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  const char* error = with_feature_type(inputs, [&](auto type) {
    using T = decltype(type);
    if (!fused) return run_aggregation_general<T>(inputs, output, stream);
    if (float32_points(inputs)) return run_aggregation_fused<T, Float32Access>(inputs, output, workspace, stream);
    return run_aggregation_fused<T, AnyAccess<false>>(inputs, output, workspace, stream);
  });
  return error ? failure(kRuntimeError, "deformable_aggregation forward: %s", error) : success();
}

}  // namespace muspace::msda
