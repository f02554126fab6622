// SPDX-License-Identifier: Apache-2.0
// FFI exports of plans.
#include "bind_checks.h"
#include "cell_pool.h"

namespace muspace::bevpool {
namespace {

void check_extent(int64_t points, int64_t cells) {
  check_count(points, "points");
  check_count(cells, "cells");
}

int64_t words(int64_t points, int64_t cells, int64_t weighted) {
  check_extent(points, cells);
  return plan_words(points, cells, weighted != 0);
}

int64_t workspace_bytes(int64_t points, int64_t cells, int64_t weighted) {
  check_extent(points, cells);
  return plan_workspace_bytes(points, cells, weighted != 0);
}

const int32_t* optional_ranks(const TensorView& ranks, const char* name, int64_t points, DLDevice device) {
  if (is_absent(ranks)) return nullptr;
  check_like(ranks, name, kInt32, {points}, device);
  return int32_data(ranks);
}

void plan_of_keys(TensorView plan, TensorView keys, TensorView rows, TensorView weights, int64_t depth_bins,
                  int64_t pixels, int64_t cells, TensorView workspace, int64_t ctx) {
  const DLDevice device = ffi::check_device(plan, "plan");
  ffi::check_rank(keys, "keys", 1);
  const int64_t points = keys.size(0);
  check_extent(points, cells);
  check_like(keys, "keys", kInt32, {points}, device);
  ffi::check_dtype(plan, "plan", kDLInt, 32);
  PointMap map{optional_ranks(rows, "rows", points, device), optional_ranks(weights, "weights", points, device),
               depth_bins, pixels};
  check_count(depth_bins, "depth_bins");
  check_count(pixels, "pixels");
  check_count(depth_bins * pixels, "depth_bins * pixels");
  if (map.rows == nullptr && depth_bins > 0 && pixels == 0 && points > 0) {
    TVM_FFI_THROW(ValueError) << "pixels: expected those of an image, got 0";
  }
  check_buffer(plan, "plan", plan_words(points, cells, map.weighted()) * 4, device);
  check_buffer(workspace, "workspace", plan_workspace_bytes(points, cells, map.weighted()), device);
  raise_unless_ok(launch_plan(int32_data(keys), points, cells, map, int32_data(plan), ffi::data_of(workspace),
                              Place{device.device_id, ctx}));
}

}  // namespace
}  // namespace muspace::bevpool

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_plan_words, muspace::bevpool::words)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_plan_workspace, muspace::bevpool::workspace_bytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cell_plan, muspace::bevpool::plan_of_keys)
