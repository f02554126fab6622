// SPDX-License-Identifier: Apache-2.0
// Sums per cell: which kernel, which shape. Launch shapes were found by measurement on an H200; see the benchmark
// notes.
#pragma once

#include "cell_pool_forward.inl"
#include "cell_pool_sparse.inl"

namespace muspace::bevpool {
namespace {

constexpr int64_t kManyPoints = 1000000;

template <class Shape, class T>
const char* run_items(const PoolArguments& a, stream_t stream) {
  const unsigned channel_blocks = blocks_of(a.channels, Shape::kWidth);
  if (channel_blocks > 65535) return "too many channels";
  const auto kernel = pool_items<Shape, T>;
  MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(a.item_capacity), channel_blocks), dim3(Shape::kThreads), 0, stream, a);
  return launch_error();
}

/// Any number of channels and any alignment: one element a load.
template <class T>
const char* run_single_elements(const PoolArguments& a, stream_t stream) {
  if (a.channels <= 32) return run_items<PoolShape<1, 32, 1, 4, 128, 8>, T>(a, stream);
  return run_items<PoolShape<1, 32, 4, 2, 128, 8>, T>(a, stream);
}

/// 80 channels: the lanes of a row are 10, so three rows a warp.
template <class T>
const char* run_tens(const PoolArguments& a, int64_t points, stream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  if constexpr (sizeof(T) == 4) {
    if (a.entries) return run_items<PoolShape<kVector, 10, 2, 2, 256, 5>, T>(a, stream);
    return run_items<PoolShape<kVector, 10, 2, 4, 256, 4>, T>(a, stream);
  } else {
    if (points < kManyPoints) return run_items<PoolShape<kVector, 10, 1, 4, 256, 5>, T>(a, stream);
    return run_items<PoolShape<kVector, 10, 1, 6, 128, 8>, T>(a, stream);
  }
}

template <class T>
const char* run_vectors(const PoolArguments& a, int64_t points, stream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  constexpr bool kWide = sizeof(T) == 4;
  const int vectors = a.channels / kVector;
  if (vectors == (kWide ? 20 : 10)) return run_tens<T>(a, points, stream);
  if (vectors <= 4) return run_items<PoolShape<kVector, 4, 1, 4, 128, 8>, T>(a, stream);
  if (vectors <= 8) return run_items<PoolShape<kVector, 8, 1, 4, 128, 8>, T>(a, stream);
  if (vectors <= 16) return run_items<PoolShape<kVector, 8, 2, kWide ? 4 : 2, 128, 8>, T>(a, stream);
  return run_items<PoolShape<kVector, kWide ? 16 : 8, 2, 2, 128, 8>, T>(a, stream);
}

template <class T>
const char* run_pool(const PoolArguments& a, int64_t points, PoolLaunch launch, bool vectors, bool sparse,
                     stream_t stream) {
  if (launch == PoolLaunch::linear) {
    const int64_t blocks = (static_cast<int64_t>(a.cells) * a.channels + kPlainThreads - 1) / kPlainThreads;
    const auto kernel = pool_linear<T>;
    MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff)), dim3(kPlainThreads), 0,
               stream, a);
    return launch_error();
  }
  if (launch == PoolLaunch::two_dimensional) {
    const auto kernel = pool_two_dimensional<T>;
    MSP_LAUNCH(kernel, dim3(blocks_of(a.cells, kPlainThreads / kLanes)), dim3(kPlainThreads), 0, stream, a);
    return launch_error();
  }
  if (!vectors) return run_single_elements<T>(a, stream);
  return sparse ? run_sparse<T>(a, stream) : run_vectors<T>(a, points, stream);
}

PoolArguments pool_arguments(const Rows& rows, const Weights& weights, const PlanLayout& layout, int64_t points,
                             const Cells& output) {
  CellSort sort{};
  sort.count = points, sort.cells = output.cells;
  PoolArguments a{};
  a.counters = layout.counters, a.starts = layout.starts, a.order = layout.order;
  a.items = layout.items, a.item_capacity = layout.item_capacity, a.entries = layout.entries;
  a.rows = rows.data, a.row_count = static_cast<uint32_t>(rows.rows);
  a.weights = weights.data, a.weight_type = weights.type, a.weight_count = static_cast<uint32_t>(weights.count);
  a.output = output.data, a.output_type = output.type, a.pixels = output.pixels;
  a.channels = static_cast<int>(output.channels), a.cells = static_cast<int>(output.cells);
  a.wide = output.channels % 4 == 0 && aligned_to(output.data, 4 * size_of(output.type));
  a.long_cells = layout.long_cells, a.long_limit = sort.long_limit();
  return a;
}

}  // namespace

int64_t pool_workspace_bytes(const Rows& rows, const Weights&, const Cells&, int64_t) {
  return rows.pixels > 0 ? padded_bytes(rows.rows * rows.channels * size_of(rows.type)) : 0;
}

Status launch_pool(const Rows& rows, const Weights& weights, const int32_t* plan, int64_t points, const Cells& output,
                   PoolLaunch launch, void* workspace, const Place& place) {
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  const PlanLayout layout(points, output.cells, weights.data != nullptr, const_cast<int32_t*>(plan));
  PoolArguments a = pool_arguments(rows, weights, layout, points, output);
  if (output.channels > kMostChannels) return too_many_channels(output.channels);
  const bool turned = rows.pixels > 0;
  if (turned) a.rows = workspace;
  const int64_t row_bytes = rows.channels * size_of(rows.type);
  const bool vectors = row_bytes % 16 == 0 && aligned_to(a.rows, 16);
  if (launch == PoolLaunch::packed) {
    const bool output_fits = output.pixels > 0 || (output.channels * size_of(output.type) % 16 == 0 &&
                                                   aligned_to(output.data, 16));
    if (!vectors || !output_fits) {
      return failure(kValueError,
                     "MUSPACE_VOXEL_POOL_DEPTH_LAUNCH=packed: expected rows and cells of a multiple of 16 bytes at "
                     "16-byte aligned addresses, got %lld channels",
                     static_cast<long long>(rows.channels));
    }
  }
  CellSort sort{};
  sort.count = points, sort.cells = output.cells;
  const bool sparse = sort.sparse() && output.pixels == 0 && a.wide;
  const char* error = nullptr;
  if (turned) {
    error = change_layout(rows.data, workspace, rows.type, rows.rows / rows.pixels, rows.channels, rows.pixels, stream);
  }
  if (!error && rows.type == Storage::f32) error = run_pool<float>(a, points, launch, vectors, sparse, stream);
  if (!error && rows.type == Storage::f16) error = run_pool<half_t>(a, points, launch, vectors, sparse, stream);
  if (!error && rows.type == Storage::bf16) error = run_pool<bfloat16_t>(a, points, launch, vectors, sparse, stream);
  return error ? failure(kRuntimeError, "cell_pool: %s", error) : success();
}

}  // namespace muspace::bevpool
