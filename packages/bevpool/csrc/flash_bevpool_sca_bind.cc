// SPDX-License-Identifier: Apache-2.0
// FFI exports of flash_bevpool_sca: checks, dtype switch, call of the launcher. One text for every backend.
#include <tvm/ffi/container/array.h>

#include "bind_checks.h"
#include "flash_bevpool_sca.h"

namespace muspace::bevpool {
namespace {

constexpr int64_t kMostSide = int64_t{1} << 24;  // exact in fp32

using Sizes = tvm::ffi::Array<int64_t>;  // h0, w0, h1, w1, ...

struct ScaTensors {
  const TensorView &image_feats, &projections, &z_anchors, &sampling_offsets, &attention_weights;
};

struct ScaScalars {
  int64_t heads, points;
  double x_min, x_max, y_min, y_max;
  int64_t x_cells, y_cells;
  double image_height, image_width, epsilon;
  int64_t average;
};

void check_scalars(const ScaScalars& s) {
  if (!(s.x_min < s.x_max) || !(s.y_min < s.y_max)) {
    TVM_FFI_THROW(ValueError) << "roi_range: expected lower bounds below the upper ones, got x " << s.x_min << ", "
                              << s.x_max << " and y " << s.y_min << ", " << s.y_max;
  }
  if (s.x_cells < 0 || s.y_cells < 0) {
    TVM_FFI_THROW(ValueError) << "grid_size: expected sizes of at least 0, got " << s.x_cells << ", " << s.y_cells;
  }
  if (!(s.image_height > 0) || !(s.image_width > 0)) {
    TVM_FFI_THROW(ValueError) << "image_size: expected positive sizes, got " << s.image_height << ", " << s.image_width;
  }
}

// Levels that do not fit into the rows count as empty.
void read_levels(const Sizes& sizes, ScaInputs& in) {
  const int64_t count = static_cast<int64_t>(sizes.size());
  if (count % 2 != 0 || count > 2 * kMaxScaLevels) {
    TVM_FFI_THROW(ValueError) << "level_sizes: expected height and width of at most " << kMaxScaLevels
                              << " levels, got " << count << " numbers";
  }
  in.levels = count / 2;
  int64_t start = 0;
  for (int64_t l = 0; l < in.levels; ++l) {
    const int64_t height = sizes[2 * l], width = sizes[2 * l + 1];
    const bool sides = height > 0 && width > 0 && height <= kMostSide && width <= kMostSide;
    const bool fits = sides && start >= 0 && start <= in.rows && height * width <= in.rows - start;
    in.level_height[l] = fits ? height : 0;
    in.level_width[l] = fits ? width : 0;
    in.level_start[l] = fits ? start : 0;
    if (!sides && (height > 0 && width > 0)) start = in.rows;  // so long a level leaves nothing behind it
    if (sides) start += height * width;
  }
}

void read_extent(const ScaScalars& s, ScaInputs& in) {
  in.heads = s.heads, in.points = s.points;
  in.x_min = s.x_min, in.x_max = s.x_max, in.y_min = s.y_min, in.y_max = s.y_max;
  in.x_cells = s.x_cells, in.y_cells = s.y_cells;
  in.image_height = s.image_height, in.image_width = s.image_width, in.epsilon = s.epsilon;
  in.average_hit_cameras = s.average != 0;
  if (s.heads < 1 || s.points < 0 || in.channels % s.heads != 0) {
    TVM_FFI_THROW(ValueError) << "heads: expected a positive divisor of " << in.channels
                              << " channels and at least 0 points, got " << s.heads << " heads and " << s.points
                              << " points";
  }
}

ScaInputs checked_inputs(const ScaTensors& t, const Sizes& sizes, const ScaScalars& scalars) {
  const TensorView& feats = t.image_feats;
  const DLDevice device = ffi::check_device(feats, "image_feats");
  ffi::check_rank(feats, "image_feats", 4);
  ffi::check_rank(t.z_anchors, "z_anchors", 1);
  ffi::check_dense(feats, "image_feats");
  check_scalars(scalars);
  ScaInputs in{};
  in.batch = feats.size(0), in.cameras = feats.size(1), in.rows = feats.size(2), in.channels = feats.size(3);
  in.anchors = t.z_anchors.size(0);
  read_extent(scalars, in);
  read_levels(sizes, in);
  in.feature_type = row_storage(feats, "image_feats");
  check_like(t.projections, "projection_matrices", sum_dtype(in.feature_type), {in.batch, in.cameras, 3, 4},
             device);
  check_like(t.z_anchors, "z_anchors", sum_dtype(in.feature_type), {in.anchors}, device);
  const int64_t queries = in.x_cells * in.y_cells;
  in.offset_type = in.weight_type = Storage::f32;
  if (!is_absent(t.sampling_offsets)) {
    check_like(t.sampling_offsets, "sampling_offsets", t.sampling_offsets.dtype(),
               {in.batch, queries, in.heads, in.levels, in.points, 2}, device);
    in.offset_type = ffi::companion_storage(t.sampling_offsets, "sampling_offsets", in.feature_type);
    in.sampling_offsets = ffi::data_of(t.sampling_offsets);
  }
  if (!is_absent(t.attention_weights)) {
    check_like(t.attention_weights, "attention_weights", t.attention_weights.dtype(),
               {in.batch, queries, in.heads, in.levels, in.points}, device);
    in.weight_type = ffi::companion_storage(t.attention_weights, "attention_weights", in.feature_type);
    in.attention_weights = ffi::data_of(t.attention_weights);
  }
  in.image_feats = ffi::data_of(feats);
  in.projections = ffi::data_of(t.projections);
  in.z_anchors = ffi::data_of(t.z_anchors);
  return in;
}

bool has_work(const ScaInputs& in) {
  return in.batch > 0 && in.cameras > 0 && in.rows > 0 && in.channels > 0 && in.levels > 0 && in.points > 0 &&
         in.anchors > 0 && in.x_cells > 0 && in.y_cells > 0;
}

void forward(TensorView output, TensorView image_feats, TensorView projections, TensorView z_anchors,
             TensorView sampling_offsets, TensorView attention_weights, Sizes level_sizes, int64_t heads,
             int64_t points, double x_min, double x_max, double y_min, double y_max, int64_t x_cells, int64_t y_cells,
             double image_height, double image_width, double epsilon, int64_t average, int64_t ctx) {
  const ScaScalars scalars{heads,   points,  x_min,        x_max,       y_min,   y_max,
                           x_cells, y_cells, image_height, image_width, epsilon, average};
  const ScaInputs in =
      checked_inputs({image_feats, projections, z_anchors, sampling_offsets, attention_weights}, level_sizes, scalars);
  check_like(output, "output", image_feats.dtype(), {in.batch, x_cells * y_cells, in.channels}, image_feats.device());
  const Place place{image_feats.device().device_id, ctx};
  if (!has_work(in)) return ffi::fill_zero(output, place);
  ffi::raise_unless_ok(launch_flash_bevpool_sca(in, ffi::data_of(output), place));
}

// An absent input has an absent gradient.
void check_gradient(const TensorView& gradient, const char* name, const TensorView& input) {
  if (is_absent(input)) return ffi::check_shape(gradient, name, {0});
  const std::vector<int64_t> expected = ffi::sizes_of(input), given = ffi::sizes_of(gradient);
  if (expected != given) {
    TVM_FFI_THROW(ValueError) << name << ": expected shape " << ffi::shape_text(expected) << ", got "
                              << ffi::shape_text(given);
  }
  ffi::check_dtype(gradient, name, input.dtype().code, input.dtype().bits);
  ffi::check_same_device(gradient, name, input.device());
  ffi::check_dense(gradient, name);
}

void backward(TensorView grad_image_feats, TensorView grad_offsets, TensorView grad_weights, TensorView grad_output,
              TensorView image_feats, TensorView projections, TensorView z_anchors, TensorView sampling_offsets,
              TensorView attention_weights, Sizes level_sizes, int64_t heads, int64_t points, double x_min,
              double x_max, double y_min, double y_max, int64_t x_cells, int64_t y_cells, double image_height,
              double image_width, double epsilon, int64_t average, TensorView workspace, int64_t route, int64_t ctx) {
  const ScaScalars scalars{heads,   points,  x_min,        x_max,       y_min,   y_max,
                           x_cells, y_cells, image_height, image_width, epsilon, average};
  const ScaInputs in =
      checked_inputs({image_feats, projections, z_anchors, sampling_offsets, attention_weights}, level_sizes, scalars);
  const DLDevice device = image_feats.device();
  check_like(grad_output, "grad_output", image_feats.dtype(), {in.batch, x_cells * y_cells, in.channels}, device);
  check_like(grad_image_feats, "grad_image_feats", sum_dtype(in.feature_type),
             {in.batch, in.cameras, in.rows, in.channels}, device);
  check_gradient(grad_offsets, "grad_offsets", sampling_offsets);
  check_gradient(grad_weights, "grad_weights", attention_weights);
  ffi::check_route(route, 3);
  const auto code = static_cast<ScaBackwardRoute>(route);
  const Place place{device.device_id, ctx};
  if (!has_work(in)) {
    ffi::fill_zero(grad_image_feats, place);
    ffi::fill_zero(grad_offsets, place);
    ffi::fill_zero(grad_weights, place);
    return;
  }
  const int64_t needed = flash_bevpool_sca_workspace_bytes(in, code), given = ffi::byte_count(workspace);
  ffi::check_same_device(workspace, "workspace", device);
  ffi::check_dense(workspace, "workspace");
  if (given < needed) {
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << needed << " bytes, got " << given;
  }
  ScaGradients gradients{ffi::data_of(grad_output), ffi::data_of(grad_image_feats), nullptr, nullptr};
  if (in.sampling_offsets != nullptr) gradients.sampling_offsets = ffi::data_of(grad_offsets);
  if (in.attention_weights != nullptr) gradients.attention_weights = ffi::data_of(grad_weights);
  ffi::raise_unless_ok(launch_flash_bevpool_sca_backward(in, gradients, ffi::data_of(workspace), given, code, place));
}

ScaInputs extent(int64_t batch, int64_t cameras, int64_t rows, int64_t channels, int64_t heads, int64_t levels,
                 int64_t points, int64_t anchors, int64_t x_cells, int64_t y_cells, bool is_float64) {
  ScaInputs in{};
  in.batch = batch, in.cameras = cameras, in.rows = rows, in.heads = heads, in.channels = channels;
  in.levels = levels, in.points = points, in.anchors = anchors, in.x_cells = x_cells, in.y_cells = y_cells;
  in.feature_type = in.offset_type = in.weight_type = is_float64 ? Storage::f64 : Storage::f32;
  return in;
}

int64_t workspace_bytes(int64_t batch, int64_t cameras, int64_t rows, int64_t channels, int64_t heads, int64_t levels,
                        int64_t points, int64_t anchors, int64_t x_cells, int64_t y_cells, int64_t is_float64,
                        int64_t route) {
  ffi::check_route(route, 3);
  const ScaInputs in =
      extent(batch, cameras, rows, channels, heads, levels, points, anchors, x_cells, y_cells, is_float64 != 0);
  return has_work(in) ? flash_bevpool_sca_workspace_bytes(in, static_cast<ScaBackwardRoute>(route)) : 0;
}

// The code of the backward route that is taken when `wanted` is asked for.
int64_t route_taken(int64_t batch, int64_t cameras, int64_t rows, int64_t channels, int64_t heads, int64_t levels,
                    int64_t points, int64_t anchors, int64_t x_cells, int64_t y_cells, int64_t is_float64,
                    int64_t wanted) {
  ffi::check_route(wanted, 3);
  const ScaInputs in =
      extent(batch, cameras, rows, channels, heads, levels, points, anchors, x_cells, y_cells, is_float64 != 0);
  if (!has_work(in)) return wanted;  // nothing is launched
  return static_cast<int64_t>(flash_bevpool_sca_reached_route(in, static_cast<ScaBackwardRoute>(wanted)));
}

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_sca_forward, muspace::bevpool::forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_sca_backward, muspace::bevpool::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_sca_workspace, muspace::bevpool::workspace_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flash_bevpool_sca_route, muspace::bevpool::route_taken)
