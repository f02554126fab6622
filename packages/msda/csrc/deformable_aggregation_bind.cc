// SPDX-License-Identifier: Apache-2.0
// FFI exports of deformable_aggregation: checks, dtype switch, call of the launcher. One text for every backend.
#include "deformable_aggregation.h"
#include "multi_scale_deformable_attn.h"
#include "muspace/ffi.h"

namespace muspace::msda {
namespace {

using ffi::check_like;
using ffi::check_route;
using ffi::fill_zero;
using ffi::kInt64;
using ffi::TensorView;

#if defined(MSP_BACKEND_CPU)
constexpr bool kAggregatesFloat64 = true;
#else
constexpr bool kAggregatesFloat64 = false;
#endif

AggregationInputs checked_inputs(const TensorView& feature, const TensorView& spatial_shape,
                                 const TensorView& scale_start_index, const TensorView& location,
                                 const TensorView& weights) {
  const DLDevice device = ffi::check_device(feature, "mc_ms_feat");
  ffi::check_rank(feature, "mc_ms_feat", 3);
  ffi::check_rank(location, "sampling_location", 5);
  ffi::check_rank(weights, "weights", 6);
  AggregationInputs in{};
  in.batch = feature.size(0), in.rows = feature.size(1), in.channels = feature.size(2);
  in.anchors = location.size(1), in.points = location.size(2), in.cameras = location.size(3);
  in.scales = weights.size(4), in.groups = weights.size(5);
  ffi::check_dense(feature, "mc_ms_feat");
  check_like(spatial_shape, "spatial_shape", kInt64, {in.cameras, in.scales, 2}, device);
  check_like(scale_start_index, "scale_start_index", kInt64, {in.cameras, in.scales}, device);
  check_like(location, "sampling_location", location.dtype(), {in.batch, in.anchors, in.points, in.cameras, 2}, device);
  check_like(weights, "weights", weights.dtype(),
             {in.batch, in.anchors, in.points, in.cameras, in.scales, in.groups}, device);
  if (in.groups > 0 && in.channels % in.groups != 0) {
    TVM_FFI_THROW(ValueError) << "weights: expected a number of groups that divides the " << in.channels
                              << " channels, got " << in.groups;
  }
  in.feature_type = ffi::storage_of(feature, "mc_ms_feat");
  if (in.feature_type == Storage::f64 && !kAggregatesFloat64) {
    TVM_FFI_THROW(TypeError) << "mc_ms_feat: expected float32, float16 or bfloat16 (float64 runs on the cpu only), got "
                             << "float64";
  }
  in.location_type = ffi::companion_storage(location, "sampling_location", in.feature_type);
  in.weight_type = ffi::companion_storage(weights, "weights", in.feature_type);
  in.feature = ffi::data_of(feature);
  in.spatial_shape = static_cast<const int64_t*>(ffi::data_of(spatial_shape));
  in.scale_start_index = static_cast<const int64_t*>(ffi::data_of(scale_start_index));
  in.sampling_location = ffi::data_of(location);
  in.weights = ffi::data_of(weights);
  return in;
}

bool has_work(const AggregationInputs& in) {
  return in.batch > 0 && in.rows > 0 && in.channels > 0 && in.anchors > 0 && in.points > 0 && in.cameras > 0 &&
         in.scales > 0 && in.groups > 0;
}

AggregationInputs extents(int64_t batch, int64_t rows, int64_t channels, int64_t anchors, int64_t points,
                          int64_t cameras, int64_t scales, int64_t groups, int64_t is_float64) {
  AggregationInputs in{};
  in.batch = batch, in.rows = rows, in.channels = channels, in.anchors = anchors, in.points = points;
  in.cameras = cameras, in.scales = scales, in.groups = groups;
  in.feature_type = is_float64 != 0 ? Storage::f64 : Storage::f32;
  return in;
}

void check_workspace(const TensorView& workspace, int64_t needed, DLDevice device) {
  const int64_t given = ffi::byte_count(workspace);
  ffi::check_same_device(workspace, "workspace", device);
  ffi::check_dense(workspace, "workspace");
  if (given < needed) {
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << needed << " bytes, got " << given;
  }
}

// Returns 1 if the table of scales is known to be wrong (scales that do not fit contribute zero all the same): the
// caller has the words for it. 0 otherwise, always so where the table lies in device memory.
int64_t aggregation_forward(TensorView output, TensorView feature, TensorView spatial_shape,
                            TensorView scale_start_index, TensorView sampling_location, TensorView weights,
                            TensorView workspace, int64_t route, int64_t ctx) {
  const AggregationInputs in = checked_inputs(feature, spatial_shape, scale_start_index, sampling_location, weights);
  check_like(output, "output", feature.dtype(), {in.batch, in.anchors, in.channels}, feature.device());
  check_route(route, 2);
  const auto code = static_cast<AggregationForwardRoute>(route);
  const Place place{feature.device().device_id, ctx};
  if (has_work(in)) {
    check_workspace(workspace, aggregation_forward_workspace_bytes(in, code), feature.device());
    ffi::raise_unless_ok(launch_aggregation(in, ffi::data_of(output), ffi::data_of(workspace), code, place));
  } else {
    fill_zero(output, place);
  }
  if (!ffi::kHostMemory) return 0;
  return levels_fill(in.spatial_shape, in.scale_start_index, in.cameras * in.scales, in.rows) ? 0 : 1;
}

void aggregation_backward(TensorView grad_feature, TensorView grad_location, TensorView grad_weights,
                          TensorView grad_output, TensorView feature, TensorView spatial_shape,
                          TensorView scale_start_index, TensorView sampling_location, TensorView weights,
                          TensorView workspace, int64_t route, int64_t ctx) {
  const AggregationInputs in = checked_inputs(feature, spatial_shape, scale_start_index, sampling_location, weights);
  const DLDevice device = feature.device();
  const uint8_t bits = in.feature_type == Storage::f64 ? 64 : 32;
  check_like(grad_output, "grad_output", feature.dtype(), {in.batch, in.anchors, in.channels}, device);
  check_like(grad_feature, "grad_feat", DLDataType{kDLFloat, bits, 1}, {in.batch, in.rows, in.channels}, device);
  check_like(grad_location, "grad_location", sampling_location.dtype(),
             {in.batch, in.anchors, in.points, in.cameras, 2}, device);
  check_like(grad_weights, "grad_weights", weights.dtype(),
             {in.batch, in.anchors, in.points, in.cameras, in.scales, in.groups}, device);
  check_route(route, 3);
  const auto code = static_cast<AggregationBackwardRoute>(route);
  const Place place{device.device_id, ctx};
  if (!has_work(in)) {
    fill_zero(grad_feature, place);
    fill_zero(grad_location, place);
    fill_zero(grad_weights, place);
    return;
  }
  check_workspace(workspace, aggregation_backward_workspace_bytes(in, code), device);
  const AggregationGradients gradients{ffi::data_of(grad_output), ffi::data_of(grad_feature),
                                       ffi::data_of(grad_location), ffi::data_of(grad_weights)};
  ffi::raise_unless_ok(launch_aggregation_backward(in, gradients, ffi::data_of(workspace), ffi::byte_count(workspace),
                                                   code, place));
}

int64_t aggregation_forward_workspace(int64_t batch, int64_t rows, int64_t channels, int64_t anchors, int64_t points,
                                      int64_t cameras, int64_t scales, int64_t groups, int64_t is_float64,
                                      int64_t route) {
  check_route(route, 2);
  const AggregationInputs in =
      extents(batch, rows, channels, anchors, points, cameras, scales, groups, is_float64);
  return has_work(in) ? aggregation_forward_workspace_bytes(in, static_cast<AggregationForwardRoute>(route)) : 0;
}

int64_t aggregation_backward_workspace(int64_t batch, int64_t rows, int64_t channels, int64_t anchors, int64_t points,
                                       int64_t cameras, int64_t scales, int64_t groups, int64_t is_float64,
                                       int64_t route) {
  check_route(route, 3);
  const AggregationInputs in =
      extents(batch, rows, channels, anchors, points, cameras, scales, groups, is_float64);
  return has_work(in) ? aggregation_backward_workspace_bytes(in, static_cast<AggregationBackwardRoute>(route)) : 0;
}

// The route code that a forward (pass 0) or backward (pass 1) takes when `wanted` is asked for.
int64_t aggregation_route(int64_t batch, int64_t rows, int64_t channels, int64_t anchors, int64_t points,
                          int64_t cameras, int64_t scales, int64_t groups, int64_t is_float64, int64_t pass,
                          int64_t wanted) {
  if (pass != 0 && pass != 1) TVM_FFI_THROW(ValueError) << "pass: expected 0 (forward) or 1 (backward), got " << pass;
  check_route(wanted, pass == 0 ? 2 : 3);
  const AggregationInputs in =
      extents(batch, rows, channels, anchors, points, cameras, scales, groups, is_float64);
  if (!has_work(in)) return wanted;  // nothing is launched
  if (pass == 0) {
    return static_cast<int64_t>(aggregation_reached_route(in, static_cast<AggregationForwardRoute>(wanted)));
  }
  return static_cast<int64_t>(aggregation_reached_route(in, static_cast<AggregationBackwardRoute>(wanted)));
}

}  // namespace
}  // namespace muspace::msda

TVM_FFI_DLL_EXPORT_TYPED_FUNC(deformable_aggregation_forward, muspace::msda::aggregation_forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(deformable_aggregation_forward_workspace, muspace::msda::aggregation_forward_workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(deformable_aggregation_backward, muspace::msda::aggregation_backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(deformable_aggregation_backward_workspace, muspace::msda::aggregation_backward_workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(deformable_aggregation_route, muspace::msda::aggregation_route)
