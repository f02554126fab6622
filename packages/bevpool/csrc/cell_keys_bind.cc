// SPDX-License-Identifier: Apache-2.0
// FFI exports of the keys of points.
#include "bind_checks.h"
#include "cell_pool.h"

namespace muspace::bevpool {
namespace {

const uint8_t* checked_mask(const TensorView& mask, int64_t points, DLDevice device) {
  if (is_absent(mask)) return nullptr;
  const DLDataType dtype = mask.dtype();
  if (!ffi::is_dtype(dtype, kDLBool, 8) && !ffi::is_dtype(dtype, kDLUInt, 8)) {
    TVM_FFI_THROW(TypeError) << "mask: expected bool or uint8, got " << ffi::dtype_name(dtype);
  }
  check_flat(mask, "mask", points, device);
  return static_cast<const uint8_t*>(ffi::data_of(mask));
}

void keys_of_cells(TensorView keys, TensorView coords, TensorView mask, int64_t bound0, int64_t bound1, int64_t bound2,
                   int64_t bound3, int64_t stride0, int64_t stride1, int64_t stride2, int64_t stride3, int64_t run,
                   int64_t count, int64_t run_stride, int64_t cells, int64_t ctx) {
  const DLDevice device = ffi::check_device(keys, "keys");
  const int64_t columns = coords.ndim() > 0 ? coords.size(coords.ndim() - 1) : 0;
  if (columns < 1 || columns > kMaxColumns) {
    TVM_FFI_THROW(ValueError) << "coords: expected 1 to " << kMaxColumns << " columns, got " << columns;
  }
  const int64_t points = count_of(coords, 0, coords.ndim() - 1, "points");
  const bool wide = ffi::is_dtype(coords.dtype(), kDLInt, 64);
  if (!wide && !ffi::is_dtype(coords.dtype(), kDLInt, 32)) {
    TVM_FFI_THROW(TypeError) << "coords: expected int32 or int64, got " << ffi::dtype_name(coords.dtype());
  }
  check_count(cells, "cells");
  check_like(keys, "keys", kInt32, {points}, device);
  ffi::check_same_device(coords, "coords", device);
  ffi::check_dense(coords, "coords");
  const Coordinates data{ffi::data_of(coords), wide, checked_mask(mask, points, device), points};
  const KeyRule rule{static_cast<int>(columns),
                     {bound0, bound1, bound2, bound3},
                     {stride0, stride1, stride2, stride3},
                     run,
                     count,
                     run_stride,
                     cells};
  if (points == 0) return;
  raise_unless_ok(launch_cell_keys(data, rule, int32_data(keys), Place{device.device_id, ctx}));
}

void keys_of_intervals(TensorView keys, TensorView row_keys, TensorView faults, TensorView ranks_depth,
                       TensorView ranks_feat, TensorView ranks_bev, TensorView starts, TensorView lengths,
                       int64_t weights, int64_t rows, int64_t cells, int64_t ctx) {
  const DLDevice device = ffi::check_device(keys, "keys");
  ffi::check_rank(ranks_depth, "ranks_depth", 1);
  ffi::check_rank(starts, "starts", 1);
  const int64_t points = ranks_depth.size(0), intervals = starts.size(0);
  check_count(points, "points");
  check_count(cells, "cells");
  check_like(keys, "keys", kInt32, {points}, device);
  check_like(row_keys, "row_keys", kInt32, {points}, device);
  check_like(faults, "faults", kInt32, {1}, device);
  check_like(ranks_depth, "ranks_depth", kInt32, {points}, device);
  check_like(ranks_feat, "ranks_feat", kInt32, {points}, device);
  check_like(ranks_bev, "ranks_bev", kInt32, {points}, device);
  check_like(starts, "starts", kInt32, {intervals}, device);
  check_like(lengths, "lengths", kInt32, {intervals}, device);
  const Intervals given{int32_data(ranks_depth),
                        int32_data(ranks_feat),
                        int32_data(ranks_bev),
                        int32_data(starts),
                        int32_data(lengths),
                        points,
                        intervals,
                        weights,
                        rows,
                        cells};
  raise_unless_ok(launch_interval_keys(given, int32_data(keys), int32_data(row_keys), int32_data(faults),
                                       Place{device.device_id, ctx}));
}

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_keys, muspace::bevpool::keys_of_cells)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(interval_keys, muspace::bevpool::keys_of_intervals)
