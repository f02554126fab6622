// SPDX-License-Identifier: Apache-2.0
// Forward launcher: which kernel, which shape of grid.
#pragma once

#include <type_traits>

#include "multi_scale_deformable_attn_forward.inl"
#include "multi_scale_deformable_attn_general.inl"

namespace muspace::msda {
namespace {

bool fused_reaches(const Extent& e, Storage value_type) {
  return value_type != Storage::f64 && e.channels <= 128 && e.levels <= kMaxTableLevels && offsets_fit(e);
}

struct ForwardLaunch {
  int threads, batches;
  bool heads_first;  // the heads of a tile of queries are neighbours in launch order
  int strip_log2;
};

template <class Plan, class T, class Access>
const char* run_fused(const Inputs& inputs, void* output, const ForwardLaunch& launch, stream_t stream) {
  const Extent32 e = Extent32::of(inputs.extent);
  const int64_t block_queries = launch.threads / kLanes * Plan::kWarpQueries * launch.batches;
  const int tiles = static_cast<int>((e.queries + block_queries - 1) / block_queries);
  const BlockGrid grid{e.heads / Plan::kHeads, tiles, e.batch, launch.heads_first && tiles <= kMaxGridYZ};
  const ForwardArguments<T, Access> a{static_cast<const T*>(inputs.value),
                                      coordinates_of<Access>(inputs),
                                      static_cast<T*>(output),
                                      levels_of(inputs),
                                      e,
                                      grid,
                                      launch.batches,
                                      launch.strip_log2};
  const auto kernel = forward_fused<Plan, T, Access>;
  MSP_LAUNCH(kernel, grid.dimensions(), dim3(static_cast<unsigned>(launch.threads)), 0, stream, a);
  return launch_error();
}

/// Launch shapes found by measurement on an H200; see the benchmark notes.
template <class Plan>
ForwardLaunch forward_launch(const Extent& e) {
  if (e.batch * e.queries * e.heads < 16384) return {64, 1, false, -1};
  if (e.queries != e.rows) return {128, 1, false, -1};
  const int wanted = e.levels == 1 ? 4 : Plan::kQueries > 1 ? 1 : 2;
  return {Plan::kThreads, wanted < Plan::kBatches ? wanted : Plan::kBatches, e.levels == 1, 3};
}

template <class Plan, class T, class Access>
const char* fused(const Inputs& inputs, void* output, stream_t stream) {
  return run_fused<Plan, T, Access>(inputs, output, forward_launch<Plan>(inputs.extent), stream);
}

/// 32 channels and fp32 locations and weights, the common case. Short rows: two heads side by side fill a cache line.
template <class T>
const char* fused_32_channels(const Inputs& inputs, void* output, stream_t stream) {
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kVector = kWide ? 4 : 8, kGroup = 32 / kVector, kHeads = kWide ? 1 : 2;
  using EightPoints = ForwardPlan<kVector, kGroup, kHeads, 1, 1, 8, false, 128, 10, 1>;
  using FourPoints = ForwardPlan<kVector, kGroup, kHeads, 1, 1, 4, false, 256, 5, 2>;
  using FourPointsOfPixels = ForwardPlan<kVector, kGroup, kHeads, kWide ? 2 : 1, 1, 4>;
  const Extent& e = inputs.extent;
  if (float32_coordinates(inputs)) {
    if (e.points == 8) return fused<EightPoints, T, Float32Access>(inputs, output, stream);
    const bool many = e.batch * e.queries * e.heads >= 16384;
    if (e.points == 4 && e.queries == e.rows && many) {
      return fused<FourPointsOfPixels, T, Float32Access>(inputs, output, stream);
    }
    if (e.points == 4) return fused<FourPoints, T, Float32Access>(inputs, output, stream);
  }
  return fused<ForwardPlan<kVector, kGroup, kHeads, 1, 1, 0>, T, AnyAccess<false>>(inputs, output, stream);
}

/// 16 bytes a lane, except that 16 channels of 16-bit values take 8; other numbers of channels go lane by lane.
template <class T>
const char* choose_fused(const Inputs& inputs, void* output, stream_t stream) {
  using Any = AnyAccess<false>;
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kVector = kWide ? 4 : 8;
  const Extent& e = inputs.extent;
  const bool pairs = e.heads % 2 == 0;
  if (e.channels == 32 && (kWide || pairs)) return fused_32_channels<T>(inputs, output, stream);
  if (e.channels == 16 && pairs) return fused<ForwardPlan<4, 4, 2, 1, 1, 0>, T, Any>(inputs, output, stream);
  if (e.channels == 64) {
    return fused<ForwardPlan<kVector, 64 / kVector, 1, kWide ? 2 : 1, 1, 0>, T, Any>(inputs, output, stream);
  }
  if (e.channels == 128) {
    return fused<ForwardPlan<kVector, 128 / kVector, 1, kWide ? 4 : 2, 1, 0>, T, Any>(inputs, output, stream);
  }
  if (e.channels <= 32) return fused<ForwardPlan<1, 32, 1, 8, 1, 0, true>, T, Any>(inputs, output, stream);
  return fused<ForwardPlan<4, 32, 1, 4, 1, 0, true>, T, Any>(inputs, output, stream);
}

const char* route_forward(const Inputs& inputs, void* output, bool fused_route, stream_t stream) {
  switch (inputs.value_type) {
    case Storage::f32:
      return fused_route ? choose_fused<float>(inputs, output, stream)
                         : run_forward_general<float>(inputs, output, stream);
    case Storage::f16:
      return fused_route ? choose_fused<half_t>(inputs, output, stream)
                         : run_forward_general<half_t>(inputs, output, stream);
    case Storage::bf16:
      return fused_route ? choose_fused<bfloat16_t>(inputs, output, stream)
                         : run_forward_general<bfloat16_t>(inputs, output, stream);
    default:
#if defined(MSP_BACKEND_MUSA)
      return "fp64 is not compiled for musa";
#else
      return run_forward_general<double>(inputs, output, stream);
#endif
  }
}

}  // namespace

ForwardRoute reached_route(const Extent& extent, Storage value_type, ForwardRoute wanted) {
  const bool fused = wanted == ForwardRoute::fused && fused_reaches(extent, value_type);
  return fused ? ForwardRoute::fused : ForwardRoute::general;
}

Status launch_forward(const Inputs& inputs, void* output, ForwardRoute route, const Place& place) {
  const bool fused_route = reached_route(inputs.extent, inputs.value_type, route) == ForwardRoute::fused;
  const DeviceGuard guard(place.device);
  const char* error = route_forward(inputs, output, fused_route, stream_at(place.ctx));
  return error ? failure(kRuntimeError, "multi_scale_deformable_attn forward: %s", error) : success();
}

}  // namespace muspace::msda
