// SPDX-License-Identifier: Apache-2.0
// FFI exports of the msda family: checks, dtype switch, call of the launcher. One text for every backend.
#include "multi_scale_deformable_attn.h"
#include "muspace/ffi.h"

namespace muspace::msda {
namespace {

using ffi::check_like;
using ffi::check_route;
using ffi::companion_storage;
using ffi::fill_zero;
using ffi::kInt64;
using ffi::storage_of;
using ffi::TensorView;

Inputs checked_inputs(const TensorView& value, const TensorView& spatial_shapes, const TensorView& level_start_index,
                      const TensorView& locations, const TensorView& weights) {
  const DLDevice device = ffi::check_device(value, "value");
  ffi::check_rank(value, "value", 4);
  ffi::check_rank(locations, "sampling_locations", 6);
  Inputs inputs;
  inputs.extent = {value.size(0),     value.size(1),     value.size(2),    value.size(3),
                   locations.size(1), locations.size(3), locations.size(4)};
  const Extent& e = inputs.extent;
  ffi::check_dense(value, "value");
  check_like(spatial_shapes, "spatial_shapes", kInt64, {e.levels, 2}, device);
  const bool derived = level_start_index.ndim() == 1 && level_start_index.size(0) == 0;
  check_like(level_start_index, "level_start_index", kInt64, {derived ? 0 : e.levels}, device);
  check_like(locations, "sampling_locations", locations.dtype(), {e.batch, e.queries, e.heads, e.levels, e.points, 2},
             device);
  check_like(weights, "attention_weights", weights.dtype(), {e.batch, e.queries, e.heads, e.levels, e.points}, device);
  inputs.value_type = storage_of(value, "value");
  inputs.location_type = companion_storage(locations, "sampling_locations", inputs.value_type);
  inputs.weight_type = companion_storage(weights, "attention_weights", inputs.value_type);
  inputs.value = ffi::data_of(value);
  inputs.spatial_shapes = static_cast<const int64_t*>(ffi::data_of(spatial_shapes));
  inputs.level_start_index = derived ? nullptr : static_cast<const int64_t*>(ffi::data_of(level_start_index));
  inputs.sampling_locations = ffi::data_of(locations);
  inputs.attention_weights = ffi::data_of(weights);
  return inputs;
}

bool has_work(const Extent& e) {
  return e.batch > 0 && e.rows > 0 && e.heads > 0 && e.channels > 0 && e.queries > 0 && e.levels > 0 && e.points > 0;
}

// Returns 1 if the level table is known to be wrong (levels that do not fit contribute zero all the same): the caller has
// the words for it. 0 otherwise, always so where the table lies in device memory.
int64_t forward(TensorView output, TensorView value, TensorView spatial_shapes, TensorView level_start_index,
                TensorView sampling_locations, TensorView attention_weights, int64_t route, int64_t ctx) {
  const Inputs inputs = checked_inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights);
  const Extent& e = inputs.extent;
  check_like(output, "output", value.dtype(), {e.batch, e.queries, e.heads * e.channels}, value.device());
  check_route(route, 2);
  const Place place{value.device().device_id, ctx};
  if (has_work(e)) {
    ffi::raise_unless_ok(launch_forward(inputs, ffi::data_of(output), static_cast<ForwardRoute>(route), place));
  } else {
    fill_zero(output, place);
  }
  return ffi::kHostMemory && !levels_fill(inputs.spatial_shapes, inputs.level_start_index, e.levels, e.rows) ? 1 : 0;
}

int64_t workspace(int64_t batch, int64_t rows, int64_t heads, int64_t channels, int64_t queries, int64_t levels,
                  int64_t points, int64_t route) {
  check_route(route, 3);
  const Extent extent{batch, rows, heads, channels, queries, levels, points};
  return has_work(extent) ? workspace_bytes(extent, static_cast<BackwardRoute>(route)) : 0;
}

// The route code that a forward (pass 0) or backward (pass 1) takes when `wanted` is asked for.
int64_t route_taken(int64_t batch, int64_t rows, int64_t heads, int64_t channels, int64_t queries, int64_t levels,
                    int64_t points, int64_t is_float64, int64_t pass, int64_t wanted) {
  if (pass != 0 && pass != 1) TVM_FFI_THROW(ValueError) << "pass: expected 0 (forward) or 1 (backward), got " << pass;
  check_route(wanted, pass == 0 ? 2 : 3);
  const Extent extent{batch, rows, heads, channels, queries, levels, points};
  const Storage value_type = is_float64 != 0 ? Storage::f64 : Storage::f32;
  if (!has_work(extent)) return value_type == Storage::f64 && wanted == 1 ? 0 : wanted;  // nothing is launched
  if (pass == 0) return static_cast<int64_t>(reached_route(extent, value_type, static_cast<ForwardRoute>(wanted)));
  return static_cast<int64_t>(reached_route(extent, value_type, static_cast<BackwardRoute>(wanted)));
}

void backward(TensorView grad_value, TensorView grad_sampling_locations, TensorView grad_attention_weights,
              TensorView grad_output, TensorView value, TensorView spatial_shapes, TensorView level_start_index,
              TensorView sampling_locations, TensorView attention_weights, TensorView workspace, int64_t route,
              int64_t ctx) {
  const Inputs inputs = checked_inputs(value, spatial_shapes, level_start_index, sampling_locations, attention_weights);
  const Extent& e = inputs.extent;
  const DLDevice device = value.device();
  const uint8_t bits = inputs.value_type == Storage::f64 ? 64 : 32;
  check_like(grad_output, "grad_output", value.dtype(), {e.batch, e.queries, e.heads * e.channels}, device);
  check_like(grad_value, "grad_value", DLDataType{kDLFloat, bits, 1}, {e.batch, e.rows, e.heads, e.channels}, device);
  check_like(grad_sampling_locations, "grad_sampling_locations", sampling_locations.dtype(),
             {e.batch, e.queries, e.heads, e.levels, e.points, 2}, device);
  check_like(grad_attention_weights, "grad_attention_weights", attention_weights.dtype(),
             {e.batch, e.queries, e.heads, e.levels, e.points}, device);
  check_route(route, 3);
  const auto code = static_cast<BackwardRoute>(route);
  const Place place{device.device_id, ctx};
  if (!has_work(e)) {
    fill_zero(grad_value, place);
    fill_zero(grad_sampling_locations, place);
    fill_zero(grad_attention_weights, place);
    return;
  }
  const int64_t needed = workspace_bytes(e, code), given = ffi::byte_count(workspace);
  ffi::check_same_device(workspace, "workspace", device);
  ffi::check_dense(workspace, "workspace");
  if (given < needed) {
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << needed << " bytes, got " << given;
  }
  const Gradients gradients{ffi::data_of(grad_output), ffi::data_of(grad_value), ffi::data_of(grad_sampling_locations),
                            ffi::data_of(grad_attention_weights)};
  ffi::raise_unless_ok(launch_backward(inputs, gradients, ffi::data_of(workspace), given, code, place));
}

tvm::ffi::String abi_info() { return ffi::abi_text("msda"); }

}  // namespace
}  // namespace muspace::msda

TVM_FFI_DLL_EXPORT_TYPED_FUNC(abi_info, muspace::msda::abi_info)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multi_scale_deformable_attn_forward, muspace::msda::forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multi_scale_deformable_attn_backward, muspace::msda::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multi_scale_deformable_attn_workspace, muspace::msda::workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multi_scale_deformable_attn_route, muspace::msda::route_taken)
MSP_EXPORT_SANITIZER_PROBE();
