// SPDX-License-Identifier: Apache-2.0
// Backward launcher: which kernel, which shape of grid.
#pragma once

#include "multi_scale_deformable_attn_backward.inl"
#include "multi_scale_deformable_attn_general.inl"
#include "multi_scale_deformable_attn_ordered.inl"

namespace muspace::msda {
namespace {

struct BackwardLaunch {
  bool heads_first;  // the heads (and levels) of a tile of queries are neighbours in launch order
  int strip_log2;
};

template <class Plan, class T, class Access>
const char* run_sorted(const Inputs& inputs, const Gradients& gradients, const BackwardLaunch& launch,
                       stream_t stream) {
  const Extent32 e = Extent32::of(inputs.extent);
  BackwardArguments<T, Access> a{};
  a.value = static_cast<const T*>(inputs.value);
  a.grad_output = static_cast<const T*>(gradients.output);
  a.coordinates = coordinates_of<Access>(inputs);
  a.grad_value = static_cast<float*>(gradients.value);
  a.grad_coordinates = coordinate_gradients_of<Access>(inputs, gradients);
  a.levels = levels_of(inputs);
  a.extent = e;
  a.points = SmallDivisor::of(e.points);
  a.levels_divisor = SmallDivisor::of(e.levels);
  a.tile_queries = Plan::kSamples / e.points;
  a.strip_log2 = launch.strip_log2;
  const int tiles = (e.queries + a.tile_queries - 1) / a.tile_queries;
  a.grid = {e.heads * e.levels, tiles, e.batch, launch.heads_first && tiles <= kMaxGridYZ};
  const auto kernel = backward_block_sorted<Plan, T, Access>;
  MSP_LAUNCH(kernel, a.grid.dimensions(), dim3(Plan::kThreads), 0, stream, a);
  return launch_error();
}

/// Tile sizes and launch shapes were found by measurement on an H200; see the benchmark notes.
BackwardLaunch backward_launch(const Extent& e) {
  const bool pixels = e.queries == e.rows && e.levels <= kMaxTableLevels;
  return {pixels && e.levels == 1, pixels ? 4 : -1};
}

/// 32 channels and fp32 locations and weights, the common case. kAddValue as in SortPlan.
template <class T, bool kAddValue>
const char* sorted_32_channels(const Inputs& inputs, const Gradients& gradients, stream_t stream) {
  using SmallTiles = SortPlan<4, 8, 128, 128, 6, 1024, 1, false, kAddValue>;
  using Tiles = SortPlan<4, 8, 512, 128, 7, 4096, 4, false, kAddValue>;
  using LargeTiles = SortPlan<4, 8, 2048, 256, 4, 16384, 4, false, kAddValue>;
  const Extent& e = inputs.extent;
  const BackwardLaunch launch = backward_launch(e);
  const int64_t blocks = e.queries * e.points / Tiles::kSamples * e.levels * e.batch * e.heads;
  if (blocks < 400) return run_sorted<SmallTiles, T, Float32Access>(inputs, gradients, launch, stream);
  if (launch.strip_log2 < 0 && blocks > 8000) {
    return run_sorted<LargeTiles, T, Float32Access>(inputs, gradients, launch, stream);
  }
  return run_sorted<Tiles, T, Float32Access>(inputs, gradients, launch, stream);
}

template <class T, bool kAddValue>
const char* choose_sorted(const Inputs& inputs, const Gradients& gradients, stream_t stream) {
  using Any = AnyAccess<false>;
  using Channels16 = SortPlan<4, 4, 512, 128, 7, 4096, 1, false, kAddValue>;
  using Channels32 = SortPlan<4, 8, 512, 128, 7, 4096, 1, false, kAddValue>;
  using Channels64 = SortPlan<4, 16, 512, 128, 7, 4096, 1, false, kAddValue>;
  using Channels128 = SortPlan<4, 32, 512, 128, 7, 4096, 1, false, kAddValue>;
  using UpTo32 = SortPlan<1, 32, 512, 128, 7, 4096, 1, true, kAddValue>;
  using UpTo128 = SortPlan<4, 32, 512, 128, 7, 4096, 1, true, kAddValue>;
  const Extent& e = inputs.extent;
  const BackwardLaunch launch = backward_launch(e);
  if (e.channels == 32 && float32_coordinates(inputs) && e.points >= 4 && e.points <= 128) {
    return sorted_32_channels<T, kAddValue>(inputs, gradients, stream);
  }
  if (e.channels == 16) return run_sorted<Channels16, T, Any>(inputs, gradients, launch, stream);
  if (e.channels == 32) return run_sorted<Channels32, T, Any>(inputs, gradients, launch, stream);
  if (e.channels == 64) return run_sorted<Channels64, T, Any>(inputs, gradients, launch, stream);
  if (e.channels == 128) return run_sorted<Channels128, T, Any>(inputs, gradients, launch, stream);
  if (e.channels < 32) return run_sorted<UpTo32, T, Any>(inputs, gradients, launch, stream);
  return run_sorted<UpTo128, T, Any>(inputs, gradients, launch, stream);
}

/// Whether the block_sorted kernel takes the problem: a tile holds at least one query, offsets fit 32 bits.
bool sorted_reaches(const Extent& e, Storage value_type) {
  return value_type != Storage::f64 && e.channels <= 128 && e.points <= 512 && offsets_fit(e);
}

template <class T>
const char* run_backward(const Inputs& inputs, const Gradients& gradients, void* workspace, BackwardRoute route,
                         stream_t stream) {
  const Extent& e = inputs.extent;
  Gradients wanted = gradients;
  if (route == BackwardRoute::ordered) {
    const char* error = run_ordered_value<T>(inputs, gradients, workspace, stream);
    if (error) return error;
    wanted.value = nullptr;
    if constexpr (!std::is_same_v<T, double>) {
      if (sorted_reaches(e, inputs.value_type)) return choose_sorted<T, false>(inputs, wanted, stream);
    }
    return run_backward_general<T>(inputs, wanted, stream);
  }
  const size_t bytes = static_cast<size_t>(e.batch * e.rows * e.heads * e.channels) * sizeof(arithmetic_t<T>);
  const char* error = zero_fill(gradients.value, bytes, stream);
  if (error) return error;
  if constexpr (!std::is_same_v<T, double>) {
    const bool sorted = route == BackwardRoute::block_sorted && sorted_reaches(e, inputs.value_type);
    if (sorted) return choose_sorted<T, true>(inputs, wanted, stream);
  }
  return run_backward_general<T>(inputs, wanted, stream);
}

const char* route_backward(const Inputs& inputs, const Gradients& gradients, void* workspace, BackwardRoute route,
                           stream_t stream) {
  switch (inputs.value_type) {
    case Storage::f32:
      return run_backward<float>(inputs, gradients, workspace, route, stream);
    case Storage::f16:
      return run_backward<half_t>(inputs, gradients, workspace, route, stream);
    case Storage::bf16:
      return run_backward<bfloat16_t>(inputs, gradients, workspace, route, stream);
    default:
#if defined(MSP_BACKEND_MUSA)
      return "fp64 is not compiled for musa";
#else
      return run_backward<double>(inputs, gradients, workspace, route, stream);
#endif
  }
}

}  // namespace

BackwardRoute reached_route(const Extent& extent, Storage value_type, BackwardRoute wanted) {
  const bool unsorted = wanted == BackwardRoute::block_sorted && !sorted_reaches(extent, value_type);
  return unsorted ? BackwardRoute::general : wanted;
}

int64_t workspace_bytes(const Extent& extent, BackwardRoute route) {
  using Source = ValueSamples<float>;  // every source of this operator takes the same
  const bool ordered = route == BackwardRoute::ordered && ordered_reaches<Source>(extent);
  return ordered ? OrderedWorkspace<Source>(extent, nullptr).bytes : 0;
}

Status launch_backward(const Inputs& inputs, const Gradients& gradients, void* workspace, int64_t, BackwardRoute route,
                       const Place& place) {
  if (route == BackwardRoute::ordered && !ordered_reaches<ValueSamples<float>>(inputs.extent)) {
    return failure(kValueError,
                   "multi_scale_deformable_attn backward: the ordered route takes fewer than 2^28 samples and 2^30 "
                   "elements of the output per image");
  }
  const DeviceGuard guard(place.device);
  const char* error = route_backward(inputs, gradients, workspace, route, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "multi_scale_deformable_attn backward: %s", error) : success();
}

}  // namespace muspace::msda
