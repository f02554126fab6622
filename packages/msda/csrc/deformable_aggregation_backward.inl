// SPDX-License-Identifier: Apache-2.0
// Backward, route "block_sorted". A block lists the distinct pixels of an anchor's points as the forward does. Each
// pixel's row is read once: its inner products with the output gradient, one per group, serve all samples around it,
// and the output gradient times its coefficient is added to the gradient of the feature by one vector atomic per lane.
// Gradients of locations and weights have a fixed order of summation; only those additions have not.
#pragma once

#include "deformable_aggregation_pixels.inl"

namespace muspace::msda {

template <class Plan>
struct PixelGradientShared : PixelShared<Plan> {
  uint16_t pixels[Plan::kEntries];  // distinct pixel of each entry
};

template <class Access>
struct AggregationPointGradients {
  void* locations;
  void* weights;
  Access location_access, weight_access;
};

template <class T, class Access>
struct AggregationGradientArguments {
  const T* output;
  float* feature;
  AggregationPointGradients<Access> points;
};

/// Replaces each pixel's coefficients by its inner products with the output gradient. kAddFeature: adds the gradient of
/// the feature. Every thread takes part in all shuffles.
template <class Plan, bool kAddFeature, class T>
MSP_DEVICE void visit_pixels(PixelShared<Plan>& shared, const AggregationLayout& layout, const T* feature,
                             float* grad_feature, int channels, int pixels,
                             const float (&gradient)[kAggregationVector]) {
  constexpr int kFlight = Plan::kFlight;
  const int t = static_cast<int>(threadIdx.x), groups = Plan::kThreads >> layout.lanes;
  const int lane = t & ((1 << layout.lanes) - 1), column = lane >> (layout.lanes - layout.columns);
  const int column_lanes = layout.column_lanes();
  MSP_NO_UNROLL
  for (int begin = 0; begin < pixels; begin += kFlight * groups) {
    float rows[kFlight][kAggregationVector], coefficients[kFlight], dots[kFlight];
    int64_t offsets[kFlight];
    const int first = begin + (t >> layout.lanes);
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      const bool exists = first + u * groups < pixels;
      const int pixel = exists ? first + u * groups : 0;  // whose row may be read, but whose columns others write
      offsets[u] = static_cast<int64_t>(shared.rows[pixel]) * channels + lane * kAggregationVector;
      load_vector(feature + offsets[u], rows[u]);
      coefficients[u] = exists ? *shared.column((pixel << layout.columns) + column) : 0.f;
    }
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      dots[u] = 0.f;
      MSP_UNROLL
      for (int c = 0; c < kAggregationVector; ++c) dots[u] = muspace::fma(rows[u][c], gradient[c], dots[u]);
    }
    MSP_NO_UNROLL
    for (int mask = 1; mask < column_lanes; mask *= 2) {
      MSP_UNROLL
      for (int u = 0; u < kFlight; ++u) dots[u] += shuffle_xor(dots[u], mask);
    }
    MSP_SYNC_WARP();  // every lane of the column has read the coefficient
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      const int pixel = first + u * groups;
      if (pixel >= pixels) continue;
      if ((lane & (column_lanes - 1)) == 0) *shared.column((pixel << layout.columns) + column) = dots[u];
      if constexpr (kAddFeature) {
        float addend[kAggregationVector];
        MSP_UNROLL
        for (int c = 0; c < kAggregationVector; ++c) addend[c] = coefficients[u] * gradient[c];
        atomic_add_row(grad_feature + offsets[u], addend);
      }
    }
  }
}

/// The group's inner product of the output gradient with the pixel of an entry; 0 outside the map.
template <class Plan>
MSP_DEVICE float entry_dot(const PixelGradientShared<Plan>& shared, const AggregationLayout& layout, int entry,
                           int group) {
  const int pixel = shared.pixels[entry];
  const int parts = layout.columns - layout.groups, begin = (pixel << layout.columns) + (group << parts);
  float dot = 0.f;
  if (pixel == kNoPixel) return dot;
  MSP_NO_UNROLL
  for (int part = 0; part < 1 << parts; ++part) dot += *shared.column(begin + part);
  return dot;
}

/// Gradients of the weights and locations of a chunk: a thread per pair and group goes over the scales.
template <class Plan, class T, class Access>
MSP_DEVICE void write_point_gradients(const PixelGradientShared<Plan>& shared,
                                      const AggregationArguments<T, Access>& a,
                                      const AggregationPointGradients<Access>& gradients, int first, int pairs) {
  const int items = pairs << a.layout.groups, groups = 1 << a.layout.groups;
  MSP_NO_UNROLL
  for (int begin = 0; begin < items; begin += Plan::kThreads) {
    const int item = begin + static_cast<int>(threadIdx.x);
    const int place = item >> a.layout.groups, group = item & (groups - 1);
    const int pair = item < items ? shared.pairs[first + place] : 0;
    const int camera = pair - a.by_cameras.quotient(pair) * a.cameras;
    float x = 0.f, y = 0.f;
    MSP_NO_UNROLL
    for (int scale = 0; scale < a.scales && item < items; ++scale) {
      const int sample = place * a.scales + scale;
      const TableLevel level = shared.levels[camera * a.scales + scale];
      SampleGradient<float> gradient{};
      if (level.height > 0) {
        const Corners<float> dots{
            entry_dot(shared, a.layout, 4 * sample, group), entry_dot(shared, a.layout, 4 * sample + 1, group),
            entry_dot(shared, a.layout, 4 * sample + 2, group), entry_dot(shared, a.layout, 4 * sample + 3, group)};
        const float weight = *shared.weight(static_cast<uint32_t>((sample << a.layout.groups) + group));
        gradient = sample_gradient(dots, shared.fractions[sample][0], shared.fractions[sample][1], weight, level.height,
                                   level.width);
      }
      gradients.weight_access.store(gradients.weights, ((pair * a.scales + scale) << a.layout.groups) + group,
                                    gradient.weight);
      x += gradient.x, y += gradient.y;
    }
    MSP_NO_UNROLL
    for (int mask = 1; mask < groups; mask *= 2) x += shuffle_xor(x, mask), y += shuffle_xor(y, mask);
    if (item < items && group == 0) gradients.location_access.store_pair(gradients.locations, pair, x, y);
  }
}

/// Zeros for the pairs outside their image among [first, last), which warp_words tells apart.
template <class Plan, class T, class Access>
MSP_DEVICE void clear_outside_pairs(const PixelShared<Plan>& shared, const AggregationArguments<T, Access>& a,
                                    const AggregationPointGradients<Access>& gradients, int first, int last) {
  const int t = static_cast<int>(threadIdx.x), pair_weights = a.pair_weights();
  const auto outside = [&](int place) { return (shared.warp_words[place / kLanes] >> (place % kLanes) & 1u) == 0; };
  if (first + t < last && outside(t)) {
    gradients.location_access.store_pair(gradients.locations, first + t, 0.f, 0.f);
  }
  MSP_UNROLL_BY(4)
  for (int i = t; i < (last - first) * pair_weights; i += Plan::kThreads) {
    if (!outside(a.by_pair_weights.quotient(i))) continue;
    gradients.weight_access.store(gradients.weights, first * pair_weights + i, 0.f);
  }
}

/// Grid: slices of anchors, images.
template <class Plan, bool kAddFeature, class T, class Access>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
aggregation_block_sorted(const AggregationArguments<T, Access> a, const AggregationGradientArguments<T, Access> g) {
  MSP_SHARED PixelGradientShared<Plan> shared;
  const AggregationSlice slice = AggregationSlice::of(a);
  const AggregationPoints<Access> points = anchor_points(a, slice);
  const AggregationPointGradients<Access> gradients{
      g.points.location_access.shift(g.points.locations, 2 * slice.first_pair),
      g.points.weight_access.shift(g.points.weights, slice.first_pair * a.pair_weights()), g.points.location_access,
      g.points.weight_access};
  const int64_t image_elements = slice.image * a.levels.rows * a.channels;
  const int lane = static_cast<int>(threadIdx.x) & ((1 << a.layout.lanes) - 1);
  float gradient[kAggregationVector];
  load_vector(g.output + slice.row * a.channels + lane * kAggregationVector, gradient);
  walk_pairs(shared, a, points, slice,
             [&](int first, int last) { clear_outside_pairs(shared, a, gradients, first, last); },
             [&](int first, int pairs) {
               for (int i = static_cast<int>(threadIdx.x); i < Plan::kEntries; i += Plan::kThreads) {
                 shared.pixels[i] = kNoPixel;
               }
               const int pixels = list_pixels(shared, shared.pixels, a, points, first, pairs);
               visit_pixels<Plan, kAddFeature>(shared, a.layout, a.feature + image_elements,
                                               g.feature + image_elements, a.channels, pixels, gradient);
               MSP_SYNC_BLOCK();
               write_point_gradients(shared, a, gradients, first, pairs);
             });
}

}  // namespace muspace::msda
