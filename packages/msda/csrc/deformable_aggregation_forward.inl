// SPDX-License-Identifier: Apache-2.0
// Forward, route "fused": a block owns an anchor, or a slice of its points, and adds each distinct pixel once. The sums
// have a fixed order, so the output is bit-reproducible.
#pragma once

#include "deformable_aggregation_pixels.inl"

namespace muspace::msda {

/// Adds the listed pixels; the rows go to the block's groups of lanes in turn.
template <class Plan, class T>
MSP_DEVICE void add_pixels(const PixelShared<Plan>& shared, const AggregationLayout& layout, const T* feature,
                           int channels, int pixels, float (&sum)[kAggregationVector]) {
  constexpr int kFlight = Plan::kFlight;
  const int t = static_cast<int>(threadIdx.x), groups = Plan::kThreads >> layout.lanes;
  const int lane = t & ((1 << layout.lanes) - 1), column = lane >> (layout.lanes - layout.columns);
  const T* lane_feature = feature + lane * kAggregationVector;
  MSP_NO_UNROLL
  for (int first = t >> layout.lanes; first < pixels; first += kFlight * groups) {
    float rows[kFlight][kAggregationVector], coefficients[kFlight];
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      const int pixel = first + u * groups < pixels ? first + u * groups : first;
      load_vector(lane_feature + static_cast<int64_t>(shared.rows[pixel]) * channels, rows[u]);
      coefficients[u] = *shared.column((pixel << layout.columns) + column);
    }
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      if (first + u * groups >= pixels) continue;
      MSP_UNROLL
      for (int c = 0; c < kAggregationVector; ++c) sum[c] = muspace::fma(coefficients[u], rows[u][c], sum[c]);
    }
  }
}

/// Sums over the groups of lanes, in order; the first group returns the result.
template <class Plan>
MSP_DEVICE void sum_groups(float* scratch, const AggregationLayout& layout, float (&sum)[kAggregationVector]) {
  const int t = static_cast<int>(threadIdx.x), lanes = 1 << layout.lanes;
  MSP_UNROLL
  for (int c = 0; c < kAggregationVector; ++c) scratch[t * kAggregationVector + c] = sum[c];
  MSP_SYNC_BLOCK();
  if (t >= lanes) return;
  MSP_NO_UNROLL
  for (int other = t + lanes; other < Plan::kThreads; other += lanes) {
    MSP_UNROLL
    for (int c = 0; c < kAggregationVector; ++c) sum[c] += scratch[other * kAggregationVector + c];
  }
}

/// Grid: slices of anchors, images. With one slice `output` is written, else `partial` [image, anchor, slice, channel].
template <class Plan, class T, class Access>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
aggregation_fused(const AggregationArguments<T, Access> a, T* output, float* partial) {
  MSP_SHARED PixelShared<Plan> shared;
  static_assert(4 * Plan::kNumbers >= Plan::kThreads * kAggregationVector, "columns double as scratch");
  const AggregationSlice slice = AggregationSlice::of(a);
  const AggregationPoints<Access> points = anchor_points(a, slice);
  const T* feature = a.feature + slice.image * a.levels.rows * a.channels;
  float sum[kAggregationVector] = {};
  walk_pairs(shared, a, points, slice, [](int, int) {},
             [&](int first, int pairs) {
               const int pixels = list_pixels(shared, nullptr, a, points, first, pairs);
               add_pixels(shared, a.layout, feature, a.channels, pixels, sum);
             });
  sum_groups<Plan>(shared.column(0), a.layout, sum);
  const int channel = static_cast<int>(threadIdx.x) * kAggregationVector;
  if (channel >= a.channels) return;
  if (a.slices == 1) {
    store_vector(output + slice.row * a.channels + channel, sum);
  } else {
    store_vector(partial + (slice.row * a.slices + slice.slice) * a.channels + channel, sum);
  }
}

constexpr int kSumThreads = 256;

/// output = sum of the slices, in order. One thread per element.
template <class T>
MSP_KERNEL(kSumThreads, 1)
aggregation_sum_slices(const float* partial, T* output, int64_t elements, int channels, int slices) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + static_cast<int>(threadIdx.x);
  if (i >= elements) return;
  const int64_t row = i / channels;
  const float* source = partial + row * slices * channels + (i - row * channels);
  float sum = 0.f;
  MSP_UNROLL_BY(4)
  for (int s = 0; s < slices; ++s) sum += source[static_cast<int64_t>(s) * channels];
  output[i] = from_float<T>(sum);
}

}  // namespace muspace::msda
