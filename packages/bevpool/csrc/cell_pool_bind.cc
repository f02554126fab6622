// SPDX-License-Identifier: Apache-2.0
// FFI exports of the sums per cell and of their gradients: checks, call of the launcher.
#include "bind_checks.h"
#include "cell_pool.h"

namespace muspace::bevpool {
namespace {

/// `count` rows of `channels` numbers: the axis of the channels is the last one (pixels 0) or has those of an image
/// behind it, count = images * pixels.
struct Matrix {
  void* data;
  Storage type;
  int64_t count, channels, pixels;

  Rows rows() const { return Rows{data, type, count, channels, pixels}; }
  Cells cells() const { return Cells{data, type, count, channels, pixels}; }
};

Matrix matrix_of(const TensorView& tensor, int64_t channel_axis, const char* name, DLDevice device) {
  const Storage type = row_storage(tensor, name);
  ffi::check_same_device(tensor, name, device);
  ffi::check_dense(tensor, name);
  if (channel_axis < 0 || channel_axis >= tensor.ndim()) {
    TVM_FFI_THROW(ValueError) << name << ": expected channels along axis " << channel_axis << ", got shape "
                              << ffi::shape_text(ffi::sizes_of(tensor));
  }
  const int64_t images = count_of(tensor, 0, channel_axis, name);
  if (channel_axis == tensor.ndim() - 1) {
    return Matrix{ffi::data_of(tensor), type, images, tensor.size(channel_axis), 0};
  }
  const int64_t pixels = count_of(tensor, channel_axis + 1, tensor.ndim(), name);
  check_count(images * pixels, name);
  return Matrix{ffi::data_of(tensor), type, images * pixels, tensor.size(channel_axis), pixels};
}

Weights weights_of(const TensorView& weights, Storage row_type, DLDevice device) {
  if (is_absent(weights)) return Weights{nullptr, Storage::f32, 0};
  ffi::check_same_device(weights, "weights", device);
  ffi::check_dense(weights, "weights");
  const int64_t count = count_of(weights, 0, weights.ndim(), "weights");
  return Weights{ffi::data_of(weights), ffi::companion_storage(weights, "weights", row_type), count};
}

void check_channels(const Matrix& rows, const Matrix& cells, const char* name) {
  if (rows.channels == cells.channels) return;
  TVM_FFI_THROW(ValueError) << name << ": expected " << rows.channels << " channels like the rows, got "
                            << cells.channels;
}

Storage storage_of_bits(int64_t bits, const char* name) {
  if (bits == 16) return Storage::f16;
  if (bits == 32) return Storage::f32;
  if (bits == 64) return Storage::f64;
  TVM_FFI_THROW(ValueError) << name << ": expected 16, 32 or 64, got " << bits;
}

/// For sizes, which depend only on whether there are weights.
Weights stated_weights(bool weighted) {
  static const float one = 1;
  return Weights{weighted ? &one : nullptr, Storage::f32, 0};
}

int64_t pool_workspace(int64_t rows, int64_t channels, int64_t row_pixels, int64_t cells, int64_t cell_pixels,
                       int64_t points, int64_t weighted, int64_t row_bits, int64_t output_bits) {
  return pool_workspace_bytes(Rows{nullptr, storage_of_bits(row_bits, "row_bits"), rows, channels, row_pixels},
                              stated_weights(weighted != 0),
                              Cells{nullptr, storage_of_bits(output_bits, "output_bits"), cells, channels, cell_pixels},
                              points);
}

int64_t gather_workspace(int64_t cells, int64_t channels, int64_t cell_pixels, int64_t points, int64_t output_bits) {
  return gather_workspace_bytes(
      Cells{nullptr, storage_of_bits(output_bits, "output_bits"), cells, channels, cell_pixels}, points);
}

int64_t backward_workspace(int64_t rows, int64_t channels, int64_t row_pixels, int64_t cells, int64_t cell_pixels,
                           int64_t points, int64_t row_bits, int64_t output_bits) {
  return pool_backward_workspace_bytes(
      Rows{nullptr, storage_of_bits(row_bits, "row_bits"), rows, channels, row_pixels}, stated_weights(true),
      Cells{nullptr, storage_of_bits(output_bits, "output_bits"), cells, channels, cell_pixels}, points);
}

void check_plan(const TensorView& plan, const char* name, int64_t points, int64_t cells, bool weighted,
                DLDevice device) {
  check_like(plan, name, kInt32, {plan_words(points, cells, weighted)}, device);
  check_buffer(plan, name, 0, device);
}

void pool(TensorView output, int64_t output_channel_axis, TensorView rows, int64_t rows_channel_axis,
          TensorView weights, TensorView plan, int64_t points, int64_t launch, TensorView workspace, int64_t ctx) {
  const DLDevice device = ffi::check_device(output, "output");
  const Matrix cells = matrix_of(output, output_channel_axis, "output", device);
  const Matrix source = matrix_of(rows, rows_channel_axis, "rows", device);
  const Weights weight = weights_of(weights, source.type, device);
  check_channels(source, cells, "output");
  check_count(points, "points");
  if (launch < 0 || launch > static_cast<int64_t>(PoolLaunch::packed)) {
    TVM_FFI_THROW(ValueError) << "launch: expected a code of 0 to 3, got " << launch;
  }
  const Place place{device.device_id, ctx};
  if (cells.count == 0 || cells.channels == 0) return;
  if (source.count == 0 || points == 0) return ffi::fill_zero(output, place);
  check_plan(plan, "plan", points, cells.count, weight.data != nullptr, device);
  check_buffer(workspace, "workspace", pool_workspace_bytes(source.rows(), weight, cells.cells(), points), device);
  raise_unless_ok(launch_pool(source.rows(), weight, int32_data(plan), points, cells.cells(),
                              static_cast<PoolLaunch>(launch), ffi::data_of(workspace), place));
}

void gather(TensorView grad_rows, TensorView grad_output, int64_t output_channel_axis, TensorView keys,
            TensorView workspace, int64_t ctx) {
  const DLDevice device = ffi::check_device(grad_rows, "grad_rows");
  const Matrix target = matrix_of(grad_rows, grad_rows.ndim() - 1, "grad_rows", device);
  const Matrix cells = matrix_of(grad_output, output_channel_axis, "grad_output", device);
  check_channels(target, cells, "grad_output");
  check_like(keys, "keys", kInt32, {target.count}, device);
  const Place place{device.device_id, ctx};
  if (target.count == 0 || target.channels == 0) return;
  if (cells.count == 0) return ffi::fill_zero(grad_rows, place);
  check_buffer(workspace, "workspace", gather_workspace_bytes(cells.cells(), target.count), device);
  raise_unless_ok(launch_gather(cells.cells(), int32_data(keys), target.count, target.data, target.type,
                                ffi::data_of(workspace), place));
}

void check_frustum(int64_t points, int64_t rows, int64_t weights, int64_t depth_bins, int64_t pixels) {
  check_count(depth_bins, "depth_bins");
  check_count(pixels, "pixels");
  const bool known = depth_bins > 0 && pixels > 0 && points % (depth_bins * pixels) == 0;
  if (known && rows == points / depth_bins && weights == points) return;
  TVM_FFI_THROW(ValueError) << "keys: expected images * depth_bins * pixels points with as many weights and images * "
                            << "pixels rows, got " << points << " points, " << weights << " weights, " << rows
                            << " rows, depth_bins " << depth_bins << " and pixels " << pixels;
}

/// fp32, or fp64 for fp64 rows.
void backward(TensorView grad_rows, TensorView grad_weights, TensorView grad_output, int64_t output_channel_axis,
              TensorView rows, int64_t rows_channel_axis, TensorView weights, TensorView keys, TensorView row_plan,
              int64_t depth_bins, int64_t pixels, int64_t route, int64_t depth_warp, TensorView workspace,
              int64_t ctx) {
  const DLDevice device = ffi::check_device(grad_rows, "grad_rows");
  const Matrix source = matrix_of(rows, rows_channel_axis, "rows", device);
  const Matrix cells = matrix_of(grad_output, output_channel_axis, "grad_output", device);
  const Weights weight = weights_of(weights, source.type, device);
  check_channels(source, cells, "grad_output");
  ffi::check_rank(keys, "keys", 1);
  const int64_t points = keys.size(0);
  check_count(points, "points");
  check_like(keys, "keys", kInt32, {points}, device);
  ffi::check_route(route, 3);
  const auto code = static_cast<WeightRoute>(route);
  check_like(grad_rows, "grad_rows", rows.dtype(), ffi::sizes_of(rows), device);
  const DLDataType sums = sum_dtype(source.type);
  ffi::check_dtype(grad_weights, "grad_weights", sums.code, sums.bits);
  check_flat(grad_weights, "grad_weights", code == WeightRoute::per_point ? points : weight.count, device);
  const Place place{device.device_id, ctx};
  if (source.count == 0 || source.channels == 0 || weight.count == 0 || points == 0 || cells.count == 0) {
    ffi::fill_zero(grad_rows, place);
    ffi::fill_zero(grad_weights, place);
    return;
  }
  const bool frustum = is_absent(row_plan);
  if (frustum) {
    check_frustum(points, source.count, weight.count, depth_bins, pixels);
  } else {
    check_plan(row_plan, "row_plan", points, source.count, true, device);
  }
  check_buffer(workspace, "workspace",
               pool_backward_workspace_bytes(source.rows(), weight, cells.cells(), points), device);
  const PoolGradients gradients{cells.cells(), ffi::data_of(grad_rows), ffi::data_of(grad_weights)};
  const int32_t* by_rows = frustum ? nullptr : int32_data(row_plan);
  raise_unless_ok(launch_pool_backward(source.rows(), weight, int32_data(keys), by_rows, points, depth_bins, pixels,
                                       code, depth_warp != 0, gradients, ffi::data_of(workspace), place));
}

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool_workspace, muspace::bevpool::pool_workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool, muspace::bevpool::pool)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool_gather_workspace, muspace::bevpool::gather_workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool_gather, muspace::bevpool::gather)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool_backward_workspace, muspace::bevpool::backward_workspace)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_pool_backward, muspace::bevpool::backward)
