// SPDX-License-Identifier: Apache-2.0
// FFI exports of flash_bevpool: checks, dtype switch, call of the launcher. One text for every backend.
#include "bind_checks.h"
#include "flash_bevpool.h"

namespace muspace::bevpool {
namespace {

constexpr int64_t kMostSide = int64_t{1} << 24;  // exact in fp32

struct FlashTensors {
  const TensorView &image_feats, &depth_params, &projections;
};

void check_range(const char* name, double low, double high) {
  if (low < high) return;
  TVM_FFI_THROW(ValueError) << name << ": expected a lower bound below the upper one, got " << low << " and " << high;
}

void check_scalars(const FlashInputs& in) {
  const BevGrid& g = in.grid;
  check_range("roi_range x", g.x_min, g.x_max);
  check_range("roi_range y", g.y_min, g.y_max);
  check_range("roi_range z", g.z_min, g.z_max);
  if (g.x_cells < 0 || g.y_cells < 0 || g.z_cells < 0) {
    TVM_FFI_THROW(ValueError) << "grid_size: expected sizes of at least 0, got " << g.x_cells << ", " << g.y_cells
                              << ", " << g.z_cells;
  }
  if (!(in.image_height > 0) || !(in.image_width > 0)) {
    TVM_FFI_THROW(ValueError) << "image_size: expected positive sizes, got " << in.image_height << ", "
                              << in.image_width;
  }
  if (in.height > kMostSide || in.width > kMostSide) {
    TVM_FFI_THROW(ValueError) << "image_feats: expected height and width of at most " << kMostSide << ", got "
                              << in.height << " and " << in.width;
  }
}

FlashInputs checked_inputs(const FlashTensors& tensors, const BevGrid& grid, double image_height, double image_width,
                           int64_t distribution, double epsilon, double threshold) {
  const TensorView& feats = tensors.image_feats;
  const DLDevice device = ffi::check_device(feats, "image_feats");
  ffi::check_rank(feats, "image_feats", 5);
  ffi::check_dense(feats, "image_feats");
  FlashInputs in;
  in.batch = feats.size(0), in.cameras = feats.size(1), in.height = feats.size(2), in.width = feats.size(3);
  in.channels = feats.size(4);
  in.grid = grid;
  in.image_height = image_height, in.image_width = image_width;
  if (distribution != 0 && distribution != 1) {
    TVM_FFI_THROW(ValueError) << "depth_distribution: expected 0 (gaussian) or 1 (laplace), got " << distribution;
  }
  in.distribution = static_cast<DepthDistribution>(distribution);
  in.epsilon = epsilon, in.threshold = threshold;
  in.feature_type = row_storage(feats, "image_feats");
  in.depth_type = ffi::companion_storage(tensors.depth_params, "depth_params", in.feature_type);
  check_like(tensors.depth_params, "depth_params", tensors.depth_params.dtype(),
             {in.batch, in.cameras, in.height, in.width, 2}, device);
  check_like(tensors.projections, "projection_matrices", sum_dtype(in.feature_type), {in.batch, in.cameras, 3, 4},
             device);
  check_scalars(in);
  in.image_feats = ffi::data_of(feats);
  in.depth_params = ffi::data_of(tensors.depth_params);
  in.projections = ffi::data_of(tensors.projections);
  return in;
}

// Whether any sample can exist.
bool has_work(const FlashInputs& in) {
  const BevGrid& g = in.grid;
  return in.batch > 0 && in.cameras > 0 && in.height > 0 && in.width > 0 && in.channels > 0 && g.x_cells > 0 &&
         g.y_cells > 0 && g.z_cells > 0;
}

void forward(TensorView output, TensorView image_feats, TensorView depth_params, TensorView projections,
             double image_height, double image_width, double x_min, double x_max, double y_min, double y_max,
             double z_min, double z_max, int64_t x_cells, int64_t y_cells, int64_t z_cells, int64_t distribution,
             double epsilon, double threshold, int64_t ctx) {
  const BevGrid grid{x_min, x_max, y_min, y_max, z_min, z_max, x_cells, y_cells, z_cells};
  const FlashInputs in = checked_inputs({image_feats, depth_params, projections}, grid, image_height, image_width,
                                        distribution, epsilon, threshold);
  check_like(output, "output", image_feats.dtype(), {in.batch, y_cells, x_cells, in.channels}, image_feats.device());
  const Place place{image_feats.device().device_id, ctx};
  if (!has_work(in)) return ffi::fill_zero(output, place);
  ffi::raise_unless_ok(launch_flash_bevpool(in, ffi::data_of(output), place));
}

void backward(TensorView grad_image_feats, TensorView grad_depth_params, TensorView grad_output, TensorView image_feats,
              TensorView depth_params, TensorView projections, double image_height, double image_width, double x_min,
              double x_max, double y_min, double y_max, double z_min, double z_max, int64_t x_cells, int64_t y_cells,
              int64_t z_cells, int64_t distribution, double epsilon, double threshold, TensorView workspace,
              int64_t route, int64_t ctx) {
  const BevGrid grid{x_min, x_max, y_min, y_max, z_min, z_max, x_cells, y_cells, z_cells};
  const FlashInputs in = checked_inputs({image_feats, depth_params, projections}, grid, image_height, image_width,
                                        distribution, epsilon, threshold);
  const DLDevice device = image_feats.device();
  const DLDataType sums = sum_dtype(in.feature_type);
  check_like(grad_output, "grad_output", image_feats.dtype(), {in.batch, y_cells, x_cells, in.channels}, device);
  check_like(grad_image_feats, "grad_image_feats", sums, {in.batch, in.cameras, in.height, in.width, in.channels},
             device);
  check_like(grad_depth_params, "grad_depth_params", sums, {in.batch, in.cameras, in.height, in.width, 2}, device);
  ffi::check_route(route, 3);
  const auto code = static_cast<FlashBackwardRoute>(route);
  const Place place{device.device_id, ctx};
  if (!has_work(in)) {
    ffi::fill_zero(grad_image_feats, place);
    ffi::fill_zero(grad_depth_params, place);
    return;
  }
  const int64_t needed = flash_bevpool_workspace_bytes(in, code), given = ffi::byte_count(workspace);
  ffi::check_same_device(workspace, "workspace", device);
  ffi::check_dense(workspace, "workspace");
  if (given < needed) {
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << needed << " bytes, got " << given;
  }
  const FlashGradients gradients{ffi::data_of(grad_output), ffi::data_of(grad_image_feats),
                                 ffi::data_of(grad_depth_params)};
  ffi::raise_unless_ok(launch_flash_bevpool_backward(in, gradients, ffi::data_of(workspace), given, code, place));
}

FlashInputs extent(int64_t batch, int64_t cameras, int64_t height, int64_t width, int64_t channels, int64_t x_cells,
                   int64_t y_cells, int64_t z_cells, bool is_float64) {
  FlashInputs in{};
  in.batch = batch, in.cameras = cameras, in.height = height, in.width = width, in.channels = channels;
  in.grid.x_cells = x_cells, in.grid.y_cells = y_cells, in.grid.z_cells = z_cells;
  in.feature_type = in.depth_type = is_float64 ? Storage::f64 : Storage::f32;
  return in;
}

int64_t workspace_bytes(int64_t batch, int64_t cameras, int64_t height, int64_t width, int64_t channels,
                        int64_t x_cells, int64_t y_cells, int64_t z_cells, int64_t is_float64, int64_t route) {
  ffi::check_route(route, 3);
  const FlashInputs in = extent(batch, cameras, height, width, channels, x_cells, y_cells, z_cells, is_float64 != 0);
  return has_work(in) ? flash_bevpool_workspace_bytes(in, static_cast<FlashBackwardRoute>(route)) : 0;
}

// The code of the backward route that is taken when `wanted` is asked for.
int64_t route_taken(int64_t batch, int64_t cameras, int64_t height, int64_t width, int64_t channels, int64_t x_cells,
                    int64_t y_cells, int64_t z_cells, int64_t is_float64, int64_t wanted) {
  ffi::check_route(wanted, 3);
  const FlashInputs in = extent(batch, cameras, height, width, channels, x_cells, y_cells, z_cells, is_float64 != 0);
  if (!has_work(in)) return wanted;  // nothing is launched
  return static_cast<int64_t>(flash_bevpool_reached_route(in, static_cast<FlashBackwardRoute>(wanted)));
}

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_forward, muspace::bevpool::forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_backward, muspace::bevpool::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_workspace, muspace::bevpool::workspace_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_route, muspace::bevpool::route_taken)
