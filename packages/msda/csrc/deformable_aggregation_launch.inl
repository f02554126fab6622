// SPDX-License-Identifier: Apache-2.0
// What the launchers of both passes share: which problems the fused kernels take, and their arguments.
#pragma once

#include "deformable_aggregation_pixels.inl"

namespace muspace::msda {
namespace {

constexpr bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

/// Whether the fused and block_sorted kernels take the problem: rows that powers of two of lanes share out, tables that
/// fit shared memory, offsets of an anchor's points below 2^31.
bool pixels_reach(const AggregationInputs& in) {
  const int64_t lanes = in.channels / kAggregationVector;
  const bool layout = in.feature_type != Storage::f64 && in.channels % kAggregationVector == 0 &&
                      in.channels <= kAggregationChannels && is_power_of_two(lanes) && is_power_of_two(in.groups) &&
                      in.groups <= lanes && in.groups <= kAggregationGroups;
  const bool tables = in.scales <= kAggregationScales && in.cameras <= kAggregationLevels &&
                      in.cameras * in.scales <= kAggregationLevels && in.rows < int64_t{1} << kAggregationRowBits;
  if (!layout || !tables) return false;
  const int64_t pair_numbers = in.cameras * in.cameras * in.scales * in.groups;  // bounds every index and division
  return in.points <= kInt32Max / 8 / pair_numbers && in.anchors <= kInt32Max / 64 && in.batch <= kMaxGridYZ;
}

/// Blocks of an anchor: several when there are few anchors, if that leaves each a worthwhile number of pairs. Slices
/// hold whole points, the same number each if possible: points that lie together are often neighbours in a regular
/// order, and apart they share no pixels. Numbers found by measurement on an H200.
int64_t aggregation_slices(const AggregationInputs& in) {
  constexpr int64_t kBlocks = 2000, kPairs = 80;
  const int64_t rows = in.batch * in.anchors, wanted = (kBlocks + rows - 1) / rows;
  const int64_t most = in.points * in.cameras / kPairs, within = most < in.points ? most : in.points;
  const int64_t slices = wanted < within ? wanted : within < 1 ? 1 : within;
  int64_t even = slices;
  while (in.points % even != 0) --even;
  return 2 * even > slices ? even : slices;
}

template <class Plan, class T, class Access>
AggregationArguments<T, Access> aggregation_arguments(const AggregationInputs& in) {
  const int64_t slices = aggregation_slices(in);
  AggregationArguments<T, Access> a{};
  a.feature = static_cast<const T*>(in.feature);
  a.points = {in.sampling_location, in.weights, Access::of(in.location_type), Access::of(in.weight_type)};
  a.levels = {in.spatial_shape, in.scale_start_index, in.rows};
  a.channels = static_cast<int>(in.channels);
  a.anchors = static_cast<int>(in.anchors);
  a.pairs = static_cast<int>(in.points * in.cameras);
  a.cameras = static_cast<int>(in.cameras);
  a.scales = static_cast<int>(in.scales);
  a.slices = static_cast<int>(slices);
  a.slice_pairs = static_cast<int>((in.points + slices - 1) / slices) * a.cameras;
  a.layout = AggregationLayout::of(in.channels, in.groups);
  const int samples = Plan::kNumbers >> a.layout.columns;
  a.chunk_pairs = (samples < Plan::kSamples ? samples : Plan::kSamples) / a.scales;
  a.by_cameras = SmallDivisor::of(a.cameras);
  a.by_scales = SmallDivisor::of(a.scales);
  a.by_pair_weights = SmallDivisor::of(a.pair_weights());
  return a;
}

inline bool float32_points(const AggregationInputs& in) {
  return in.location_type == Storage::f32 && in.weight_type == Storage::f32;
}

/// use(T{}) with the storage type of the feature.
template <class Use>
const char* with_feature_type(const AggregationInputs& in, const Use& use) {
  switch (in.feature_type) {
    case Storage::f32:
      return use(float{});
    case Storage::f16:
      return use(half_t{});
    case Storage::bf16:
      return use(bfloat16_t{});
    default:
      return "float64 runs on the cpu only";
  }
}

}  // namespace
}  // namespace muspace::msda
