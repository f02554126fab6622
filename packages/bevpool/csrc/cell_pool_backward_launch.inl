// SPDX-License-Identifier: Apache-2.0
// Gradients of the sums per cell: which kernel, which shape.
#pragma once

#include "cell_pool_backward.inl"

namespace muspace::bevpool {
namespace {

constexpr int kGatherBlockVectors = 256;  // of a block, at most

bool same_vectors(const Cells& cells, Storage row_type, const void* rows) {
  return cells.type == row_type && cells.channels * size_of(row_type) % 16 == 0 && aligned_to(rows, 16);
}

template <int kVectors, int kFlight, int kThreads>
const char* run_gather_vectors(const GatherArguments& a, int vectors, stream_t stream) {
  const int points = vectors < kGatherBlockVectors ? kGatherBlockVectors / vectors : 1;
  const auto kernel = gather_vectors<kVectors, kFlight, kThreads>;
  MSP_LAUNCH(kernel, dim3(blocks_of(a.points, points)), dim3(kThreads), 0, stream, a, vectors, points);
  return launch_error();
}

const char* run_gather(const GatherArguments& a, bool vectors, stream_t stream) {
  const dim3 block(kGatherThreads);
  if (!vectors) {
    const int64_t blocks = (a.points * a.channels + kGatherThreads - 1) / kGatherThreads;
    const auto kernel = gather_elements<void>;
    MSP_LAUNCH(kernel, dim3(static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff)), block, 0, stream, a);
    return launch_error();
  }
  const int count = static_cast<int>(a.channels * size_of(a.row_type) / 16);
  if (count == 10) return run_gather_vectors<10, 2, 128>(a, count, stream);
  if (count == 20) return run_gather_vectors<20, 2, 128>(a, count, stream);
  return run_gather_vectors<0, 2, 128>(a, count, stream);
}

template <class Shape, class T>
const char* run_owners(const OwnerArguments& a, stream_t stream) {
  const auto kernel = own_rows<Shape, T>;
  MSP_LAUNCH(kernel, dim3(blocks_of(a.rows_count, Shape::kWarps)), dim3(Shape::kThreads), 0, stream, a);
  return launch_error();
}

template <class T>
const char* run_owner_vectors(const OwnerArguments& a, stream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  constexpr bool kWide = sizeof(T) == 4;
  const int vectors = a.channels / kVector;
  if (vectors <= 8) return run_owners<OwnerShape<kVector, 8, 1, 4, 128, 8>, T>(a, stream);
  if constexpr (!kWide) {
    if (vectors <= 10) return run_owners<OwnerShape<kVector, 10, 1, 3, 128, 8>, T>(a, stream);
    if (vectors <= 16) return run_owners<OwnerShape<kVector, 16, 1, 3, 128, 8>, T>(a, stream);
    return run_owners<OwnerShape<kVector, 32, 1, 4, 128, 8>, T>(a, stream);
  } else {
    if (vectors <= 16) return run_owners<OwnerShape<kVector, 8, 2, 2, 128, 8>, T>(a, stream);
    if (vectors <= 20) return run_owners<OwnerShape<kVector, 10, 2, 2, 128, 8>, T>(a, stream);
    if (vectors <= 32) return run_owners<OwnerShape<kVector, 16, 2, 2, 128, 8>, T>(a, stream);
    return run_owners<OwnerShape<kVector, 32, 2, 2, 128, 8>, T>(a, stream);
  }
}

const char* route_owners(const OwnerArguments& a, bool vectors, stream_t stream) {
  if (!vectors) return run_owners<OwnerShape<1, 32, 4, 2, 128, 8>, AnyType>(a, stream);
  if (a.row_type == Storage::f32) return run_owner_vectors<float>(a, stream);
  if (a.row_type == Storage::f16) return run_owner_vectors<half_t>(a, stream);
  return run_owner_vectors<bfloat16_t>(a, stream);
}

/// Channels-last copies of what is channels first.
struct BackwardWorkspace {
  void *cells, *rows, *grad_rows;  // null where the caller's memory is channels last already
  int64_t bytes;

  BackwardWorkspace(const Rows& r, const Cells& c, void* base)
      : cells(nullptr), rows(nullptr), grad_rows(nullptr), bytes(0) {
    char* begin = static_cast<char*>(base);
    const auto take = [&](int64_t size) {
      void* place = begin ? begin + bytes : nullptr;
      bytes += padded_bytes(size);
      return place;
    };
    if (c.pixels > 0) cells = take(c.cells * c.channels * size_of(c.type));
    if (r.pixels > 0) rows = take(r.rows * r.channels * size_of(r.type));
    if (r.pixels > 0) grad_rows = take(r.rows * r.channels * size_of(r.type));
  }
};

/// Sets the gradients of the weights to zero where not every one of them is written.
const char* prepare(const Rows& rows, const PoolGradients& gradients, const BackwardWorkspace& w, int64_t zero_words,
                    stream_t stream) {
  const Cells& cells = gradients.output;
  const char* error = nullptr;
  auto* zeros = static_cast<uint32_t*>(gradients.weights);
  const bool aside = w.cells != nullptr && aligned_to(zeros, 16);
  if (!aside && zero_words > 0) error = zero_fill(zeros, static_cast<size_t>(zero_words) * 4, stream);
  if (!error && w.cells) {
    error = change_layout(cells.data, w.cells, cells.type, cells.cells / cells.pixels, cells.channels, cells.pixels,
                          stream, zeros, aside ? zero_words : 0);
  }
  if (!error && w.rows) {
    error = change_layout(rows.data, w.rows, rows.type, rows.rows / rows.pixels, rows.channels, rows.pixels, stream);
  }
  return error;
}

}  // namespace

int64_t gather_workspace_bytes(const Cells& grad_output, int64_t) {
  if (grad_output.pixels == 0) return 0;
  return padded_bytes(grad_output.cells * grad_output.channels * size_of(grad_output.type));
}

Status launch_gather(const Cells& grad_output, const int32_t* keys, int64_t points, void* grad_rows, Storage type,
                     void* workspace, const Place& place) {
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  if (grad_output.channels > kMostChannels) return too_many_channels(grad_output.channels);
  GatherArguments a{};
  a.cells = grad_output.data, a.keys = keys, a.rows = grad_rows, a.points = points;
  a.cell_count = static_cast<uint32_t>(grad_output.cells), a.channels = static_cast<int>(grad_output.channels);
  a.cell_type = grad_output.type, a.row_type = type;
  const char* error = nullptr;
  if (grad_output.pixels > 0) {
    error = change_layout(grad_output.data, workspace, grad_output.type, grad_output.cells / grad_output.pixels,
                          grad_output.channels, grad_output.pixels, stream);
    a.cells = workspace;
  }
  const bool vectors = same_vectors(grad_output, type, grad_rows) && aligned_to(a.cells, 16);
  if (!error) error = run_gather(a, vectors, stream);
  return error ? failure(kRuntimeError, "cell_pool_gather: %s", error) : success();
}

int64_t pool_backward_workspace_bytes(const Rows& rows, const Weights&, const Cells& grad_output, int64_t) {
  return BackwardWorkspace(rows, grad_output, nullptr).bytes;
}

Status launch_pool_backward(const Rows& rows, const Weights& weights, const int32_t* keys, const int32_t* row_plan,
                            int64_t points, int64_t depth_bins, int64_t pixels, WeightRoute route, bool depth_warp,
                            const PoolGradients& gradients, void* workspace, const Place& place) {
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  if (rows.channels > kMostChannels) return too_many_channels(rows.channels);
  const BackwardWorkspace w(rows, gradients.output, workspace);
  const bool frustum = row_plan == nullptr;
  const PlanLayout layout(points, rows.rows, true, const_cast<int32_t*>(row_plan));
  OwnerArguments a{};
  a.cells = w.cells ? w.cells : gradients.output.data;
  a.rows = w.rows ? w.rows : rows.data, a.grad_rows = w.grad_rows ? w.grad_rows : gradients.rows;
  a.weights = weights.data, a.grad_weights = static_cast<float*>(gradients.weights);
  a.keys = frustum ? keys : nullptr;
  a.starts = layout.starts, a.order = layout.order, a.entries = layout.entries;
  a.depth_bins = depth_bins, a.pixels = pixels;
  a.cell_count = static_cast<uint32_t>(gradients.output.cells), a.weight_count = static_cast<uint32_t>(weights.count);
  a.rows_count = static_cast<int>(rows.rows), a.channels = static_cast<int>(rows.channels);
  a.cell_type = gradients.output.type, a.row_type = rows.type, a.weight_type = weights.type;
  a.route = frustum ? WeightRoute::unique : route, a.depth_warp = depth_warp;
  const int64_t zero_words = frustum ? 0 : route == WeightRoute::per_point ? points : weights.count;
  const bool vectors = same_vectors(gradients.output, rows.type, a.rows) && aligned_to(a.cells, 16) &&
                       aligned_to(a.grad_rows, 16);
  const char* error = prepare(rows, gradients, w, zero_words, stream);
  if (!error) error = route_owners(a, vectors, stream);
  if (!error && !depth_warp) {
    const auto products = point_products<void>;
    MSP_LAUNCH(products, dim3(blocks_of(points, kPointThreads)), dim3(kPointThreads), 0, stream, a, points);
    error = launch_error();
  }
  if (!error && w.grad_rows) {
    error = change_layout(w.grad_rows, gradients.rows, rows.type, rows.rows / rows.pixels, rows.pixels, rows.channels,
                          stream);
  }
  return error ? failure(kRuntimeError, "cell_pool_backward: %s", error) : success();
}

}  // namespace muspace::bevpool
