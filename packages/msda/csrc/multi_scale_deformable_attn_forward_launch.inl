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

/// Of the H200 that the launch shapes were tuned on. With another number `whole_waves` only evens out less.
constexpr int kTunedMultiprocessors = 132;

struct ForwardLaunch {
  int threads;
  int batches;       // of queries per block, about
  bool whole_waves;  // as many blocks as fill the device a whole number of times
  bool heads_first;  // the heads of a tile of queries are neighbours in launch order
  int strip_log2;    // see strip_query; negative: queries in natural order
};

/// Blocks per image and row of heads.
template <class Plan>
int forward_tiles(const Extent32& e, const ForwardLaunch& launch, int batches) {
  int64_t tiles = (batches - 1) / launch.batches + 1;
  if (launch.whole_waves) {
    const int64_t resident = int64_t{kTunedMultiprocessors} * Plan::kBlocks * (Plan::kThreads / launch.threads);
    const int64_t rows = int64_t{e.batch} * (e.heads / Plan::kHeads), waves = (tiles * rows + resident / 2) / resident;
    tiles = (waves > 1 ? waves : 1) * resident / rows;
  }
  const int64_t least = (batches - 1) / kMaxBatches + 1;
  return static_cast<int>(tiles < least ? least : tiles < batches ? tiles : batches);
}

template <class Plan, class T, class Access>
const char* run_fused(const Inputs& inputs, void* output, const ForwardLaunch& launch, stream_t stream) {
  const Extent32 e = Extent32::of(inputs.extent);
  const int batches = (e.queries - 1) / (launch.threads / kLanes * Plan::kWarpQueries) + 1;
  const int tiles = forward_tiles<Plan>(e, launch, batches);
  const BlockGrid grid{e.heads / Plan::kHeads, tiles, e.batch, launch.heads_first && tiles <= kMaxGridYZ};
  const ForwardArguments<T, Access> a{static_cast<const T*>(inputs.value),
                                      coordinates_of<Access>(inputs),
                                      static_cast<T*>(output),
                                      levels_of(inputs),
                                      e,
                                      grid,
                                      {batches / tiles, batches % tiles},
                                      launch.strip_log2};
  const auto kernel = forward_fused<Plan, T, Access>;
  MSP_LAUNCH(kernel, grid.dimensions(), dim3(static_cast<unsigned>(launch.threads)), 0, stream, a);
  return launch_error();
}

bool many_queries(const Extent& e) { return e.batch * e.queries * e.heads >= 16384; }

/// Launch shapes found by measurement on an H200; see the benchmark notes.
template <class Plan>
ForwardLaunch forward_launch(const Extent& e) {
  if (!many_queries(e)) return {64, 1, false, false, -1};
  if (e.queries != e.rows) return {128, 1, false, false, -1};
  if (e.levels > 1) return {Plan::kThreads, Plan::kQueries > 1 ? 1 : 2, false, false, 3};
  constexpr bool kShortRows = !Plan::kStrided && Plan::kVector * Plan::kGroup <= 64;
  return {Plan::kThreads, kShortRows ? 8 : 4, kShortRows, true, 3};
}

template <class Plan, class T, class Access>
const char* fused(const Inputs& inputs, void* output, stream_t stream) {
  return run_fused<Plan, T, Access>(inputs, output, forward_launch<Plan>(inputs.extent), stream);
}

/// 32 channels and fp32 locations and weights, the common case. Short rows: two heads side by side fill a cache line.
template <class T>
const char* fused_32_channels(const Inputs& inputs, void* output, stream_t stream) {
  using Access = Float32Access;
  constexpr bool kWide = sizeof(T) == 4;
  constexpr int kVector = kWide ? 4 : 8, kGroup = 32 / kVector, kHeads = kWide ? 1 : 2;
  const Extent& e = inputs.extent;
  if (float32_coordinates(inputs) && e.points == 8) {
    using Plan = ForwardPlan<kVector, kGroup, kHeads, 1, 1, 8, false, 128, kWide ? 12 : 10>;
    return fused<Plan, T, Access>(inputs, output, stream);
  }
  if (float32_coordinates(inputs) && e.points == 4) {
    if (e.queries == e.rows && many_queries(e)) {
      if (e.levels == 1) {
        using OneLevel = ForwardPlan<kVector, kGroup, kHeads, kWide ? 2 : 1, 1, 4, false, 640, 2>;
        return run_fused<OneLevel, T, Access>(inputs, output, {640, 8, true, true, kWide ? 4 : 3}, stream);
      }
      using Levels = ForwardPlan<kVector, kGroup, kHeads, 1, 1, 4, false, kWide ? 768 : 320, kWide ? 2 : 4>;
      return run_fused<Levels, T, Access>(inputs, output, {Levels::kThreads, kWide ? 2 : 3, true, true, 3}, stream);
    }
    return fused<ForwardPlan<kVector, kGroup, kHeads, 1, 1, 4>, T, Access>(inputs, output, stream);
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
  if (e.channels == 16 && pairs) {
    if (e.points == 4 && float32_coordinates(inputs)) {
      return fused<ForwardPlan<4, 4, 2, 1, 1, 4>, T, Float32Access>(inputs, output, stream);
    }
    return fused<ForwardPlan<4, 4, 2, 1, 1, 0>, T, Any>(inputs, output, stream);
  }
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
