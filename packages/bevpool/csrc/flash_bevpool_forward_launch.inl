// SPDX-License-Identifier: Apache-2.0
// Forward launcher: which rows, which access to the depth parameters.
#pragma once

#include "flash_bevpool_forward.inl"

namespace muspace::bevpool {
namespace {

template <class Plan, class T, int kBlocks>
const char* run_flash_forward(const FlashInputs& in, void* output, stream_t stream) {
  FlashArguments<T> a = flash_arguments<T>(in, kForwardTileWidth, kForwardTileHeight);
  a.output = static_cast<T*>(output);
  const unsigned tiles = static_cast<unsigned>(int64_t{a.x_tiles} * a.y_tiles * in.batch);
  const unsigned chunks = static_cast<unsigned>((in.channels + Plan::kChannels - 1) / Plan::kChannels);
  const auto kernel = flash_forward<Plan, T, kBlocks>;
  MSP_LAUNCH(kernel, dim3(tiles, chunks), dim3(kForwardThreads), 0, stream, a);
  return launch_error();
}

template <class T>
const char* choose_flash_forward(const FlashInputs& in, void* output, stream_t stream) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const bool vectors = in.channels % kVector == 0 && is_aligned(in.image_feats, 16) && is_aligned(output, 16);
  if (!vectors) return run_flash_forward<RowPlan<kCellLanes, 1, 8>, T, 4>(in, output, stream);
  constexpr int kCount = sizeof(T) == 4 ? 2 : 1;
  if (in.channels % 64 == 0) {
    return run_flash_forward<RowPlan<kCellLanes, kVector, kCount, true>, T, 4>(in, output, stream);
  }
  if (in.channels < 64) return run_flash_forward<RowPlan<kCellLanes, kVector, kCount>, T, 4>(in, output, stream);
  return run_flash_forward<RowPlan<kCellLanes, kVector, 2 * kCount>, T, 4>(in, output, stream);
}

const char* route_flash_forward(const FlashInputs& in, void* output, stream_t stream) {
  switch (in.feature_type) {
    case Storage::f32:
      return choose_flash_forward<float>(in, output, stream);
    case Storage::f16:
      return choose_flash_forward<half_t>(in, output, stream);
    case Storage::bf16:
      return choose_flash_forward<bfloat16_t>(in, output, stream);
    default:
      return "float64 is for cpu only";
  }
}

}  // namespace

Status launch_flash_bevpool(const FlashInputs& inputs, void* output, const Place& place) {
  if (!flash_reaches(inputs)) {
    return failure(kValueError, "flash_bevpool takes fewer than 2^28 pixels and 2^28 cells per image");
  }
  const DeviceGuard guard(place.device);
  const char* error = route_flash_forward(inputs, output, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "flash_bevpool forward: %s", error) : success();
}

}  // namespace muspace::bevpool
