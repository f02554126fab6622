// SPDX-License-Identifier: Apache-2.0
// Backward launcher: which route, which rows.
#pragma once

#include "flash_bevpool_backward.inl"
#include "flash_bevpool_general.inl"
#include "flash_bevpool_ordered_samples.inl"

namespace muspace::bevpool {
namespace {

/// Whether the feature map's cells fit a record's tag.
bool flash_sorted_reaches(const FlashInputs& in) {
  int64_t columns = 1;
  while (columns <= in.width) columns *= 2;
  return in.feature_type != Storage::f64 && flash_reaches(in) && in.cameras * in.height <= kMaxWalkCells / columns;
}

int64_t flash_tests(const FlashInputs& in) { return in.cameras * in.grid.z_cells; }

bool flash_ordered_reaches(const FlashInputs& in) {
  return in.feature_type != Storage::f64 && flash_reaches(in) && in.cameras <= kInt32Max / 8 / in.grid.z_cells;
}

/// Cells of a chunk.
int64_t flash_chunk_cells(const FlashInputs& in) {
  const int64_t cells = in.grid.x_cells * in.grid.y_cells, wanted = kOrderedChunk / flash_tests(in);
  return wanted < 1 ? 1 : wanted < cells ? wanted : cells;
}

struct FlashWorkspace {
  uint32_t* counts;
  OrderedBuffers buffers;
  int64_t bytes;
  FlashWorkspace(const FlashInputs& in, void* base) {
    Parts parts(base);
    const int64_t cells = flash_chunk_cells(in);
    counts = parts.take<uint32_t>(cells);
    buffers = take_ordered(parts, 1, cells * flash_tests(in), in.cameras * in.height * in.width, true);
    bytes = parts.bytes();
  }
};

#if defined(MSP_BACKEND_EMU)
using FlashSort = SortPlan<512, 256, 64>;
using FlashSmallSort = SortPlan<256, 128, 32>;
#else
using FlashSort = SortPlan<1024, 256, 4096>;
using FlashSmallSort = SortPlan<512, 128, 2048>;
#endif
/// Shapes found by measurement on an H200. 64 channels: eight a lane, and smaller tiles for the registers that takes.
using Flash64Plan = FlashSortPlan<RowPlan<8, 4, 2, true>, FlashSmallSort, 8, 8, 4>;
template <class Rows>
using FlashPlan = FlashSortPlan<Rows, FlashSort, 16, 8, 3>;

template <class T>
FlashArguments<T> backward_arguments(const FlashInputs& in, const FlashGradients& gradients, int tile_width = 1,
                                     int tile_height = 1) {
  FlashArguments<T> a = flash_arguments<T>(in, tile_width, tile_height);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.grad_feats = static_cast<float*>(gradients.image_feats);
  a.grad_depth = static_cast<float*>(gradients.depth_params);
  return a;
}

template <class Plan, class T>
const char* run_flash_sorted(const FlashInputs& in, const FlashGradients& gradients, stream_t stream) {
  using Rows = typename Plan::Rows;
  const FlashArguments<T> a = backward_arguments<T>(in, gradients, Plan::kTileWidth, Plan::kTileHeight);
  const unsigned tiles = static_cast<unsigned>(int64_t{a.x_tiles} * a.y_tiles * in.batch);
  const unsigned chunks = static_cast<unsigned>((in.channels + Rows::kChannels - 1) / Rows::kChannels);
  const auto kernel = flash_backward_sorted<Plan, T>;
  MSP_LAUNCH(kernel, dim3(tiles, chunks), dim3(Plan::kThreads), 0, stream, a);
  return launch_error();
}

template <class T>
bool vector_rows(const FlashInputs& in, const FlashGradients& gradients) {
  return in.channels % 4 == 0 && is_aligned(in.image_feats, 4 * sizeof(T)) &&
         is_aligned(gradients.output, 4 * sizeof(T)) && is_aligned(gradients.image_feats, 16);
}

template <class T>
const char* choose_flash_sorted(const FlashInputs& in, const FlashGradients& gradients, stream_t stream) {
  if (!vector_rows<T>(in, gradients)) return run_flash_sorted<FlashPlan<RowPlan<32, 1, 4>>, T>(in, gradients, stream);
  if (in.channels == 64) return run_flash_sorted<Flash64Plan, T>(in, gradients, stream);
  return run_flash_sorted<FlashPlan<RowPlan<32, 4, 1>>, T>(in, gradients, stream);
}

template <class T>
const char* run_flash_general(const FlashInputs& in, const FlashGradients& gradients, stream_t stream) {
  const FlashArguments<T> a = backward_arguments<T>(in, gradients);
  const int64_t cells = in.batch * in.grid.y_cells * in.grid.x_cells;
  const auto kernel = flash_backward_general<T>;
  MSP_LAUNCH(kernel, dim3(striding_blocks(cells, kGeneralWarps)), dim3(kGeneralThreads), 0, stream, a, cells);
  return launch_error();
}

template <class Rows, class T>
const char* run_flash_ordered(const FlashInputs& in, const FlashGradients& gradients, void* workspace,
                              stream_t stream) {
  const FlashWorkspace w(in, workspace);
  FlashProblem<T> problem{backward_arguments<T>(in, gradients), 0, 0, 0, w.counts};
  const int64_t all = in.grid.x_cells * in.grid.y_cells, chunk = flash_chunk_cells(in);
  const auto write_keys = flash_keys<T>;
  for (problem.image = 0; problem.image < in.batch; ++problem.image) {
    for (int64_t first = 0; first < all; first += chunk) {
      problem.first_cell = static_cast<int>(first);
      problem.cells = static_cast<int>(first + chunk < all ? chunk : all - first);
      const char* error = zero_fill(w.buffers.sort.keys[0], static_cast<size_t>(problem.count()) * 4, stream);
      if (error) return error;
      MSP_LAUNCH(write_keys, dim3(static_cast<unsigned>((problem.cells + kKeyCells - 1) / kKeyCells)),
                 dim3(kKeyThreads), 0, stream, problem, w.buffers.sort.keys[0], w.counts);
      error = run_ordered<Rows>(problem, w.buffers, 1, stream);
      if (error) return error;
    }
  }
  return launch_error();
}

template <class T>
const char* flash_backward_with(const FlashInputs& in, const FlashGradients& gradients, void* workspace,
                                FlashBackwardRoute route, stream_t stream) {
  if (route == FlashBackwardRoute::block_sorted) return choose_flash_sorted<T>(in, gradients, stream);
  if (route == FlashBackwardRoute::general) return run_flash_general<T>(in, gradients, stream);
  if (!vector_rows<T>(in, gradients)) return run_flash_ordered<RowPlan<32, 1, 4>, T>(in, gradients, workspace, stream);
  return run_flash_ordered<RowPlan<16, 4, 1>, T>(in, gradients, workspace, stream);
}

const char* route_flash_backward(const FlashInputs& in, const FlashGradients& gradients, void* workspace,
                                 FlashBackwardRoute route, stream_t stream) {
  const size_t pixels = static_cast<size_t>(in.batch * in.cameras * in.height * in.width);
  const char* error = zero_fill(gradients.image_feats, pixels * static_cast<size_t>(in.channels) * 4, stream);
  if (!error) error = zero_fill(gradients.depth_params, pixels * 8, stream);
  if (error) return error;
  switch (in.feature_type) {
    case Storage::f32:
      return flash_backward_with<float>(in, gradients, workspace, route, stream);
    case Storage::f16:
      return flash_backward_with<half_t>(in, gradients, workspace, route, stream);
    case Storage::bf16:
      return flash_backward_with<bfloat16_t>(in, gradients, workspace, route, stream);
    default:
      return "float64 is for cpu only";
  }
}

}  // namespace

FlashBackwardRoute flash_bevpool_reached_route(const FlashInputs& inputs, FlashBackwardRoute wanted) {
  const bool unsorted = wanted == FlashBackwardRoute::block_sorted && !flash_sorted_reaches(inputs);
  return unsorted ? FlashBackwardRoute::general : wanted;
}

int64_t flash_bevpool_workspace_bytes(const FlashInputs& inputs, FlashBackwardRoute route) {
  const bool ordered = route == FlashBackwardRoute::ordered && flash_ordered_reaches(inputs);
  return ordered ? FlashWorkspace(inputs, nullptr).bytes : 0;
}

Status launch_flash_bevpool_backward(const FlashInputs& inputs, const FlashGradients& gradients, void* workspace,
                                     int64_t, FlashBackwardRoute route, const Place& place) {
  if (!flash_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool takes fewer than 2^28 pixels and 2^28 cells per image");
  }
  if (route == FlashBackwardRoute::ordered && !flash_ordered_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool backward: the ordered route takes fewer than 2^28 samples per cell");
  }
  const FlashBackwardRoute reached = flash_bevpool_reached_route(inputs, route);
  const DeviceGuard guard(place.device);
  const char* error = route_flash_backward(inputs, gradients, workspace, reached, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "flash_bevpool backward: %s", error) : success();
}

}  // namespace muspace::bevpool
