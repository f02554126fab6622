// SPDX-License-Identifier: Apache-2.0
// What the fused forward and the block_sorted backward of deformable_aggregation share: from the points of one anchor
// to the list of distinct pixels that they read, with one coefficient per pixel and group of channels.
//
// All points of an anchor meet the same row of the output, so a pixel that several of them touch needs to be read, and
// to receive a gradient, only once: forward by the sum of its weights, and backward its inner product with the output
// gradient serves every sample around it. A sort of the samples' corners by pixel finds those sums in a fixed order. On
// maps of stride 4 to 32 it leaves a quarter to a half of the rows.
//
// Terms: a pair is (point, camera), a sample is (pair, scale), an entry is one of the four corners of a sample.
#pragma once

#include "deformable_aggregation.h"
#include "deformable_aggregation_math.h"
#include "multi_scale_deformable_attn_tables.inl"
#include "muspace/sort.h"

namespace muspace::msda {

constexpr int kAggregationVector = 4;     // channels of a lane
constexpr int kAggregationGroups = 32;    // most columns of coefficients
constexpr int kAggregationScales = 16;    // most scales of a camera
constexpr int kAggregationLevels = 64;    // most levels: cameras * scales
constexpr int kAggregationChannels = 512;
constexpr int kAggregationRowBits = 22;   // bits of a pixel's row in a sort key

/// Blocks of kThreads threads, kBlocks of them per multiprocessor; up to kSamples samples at a time; kFlight rows that
/// a lane has under way.
template <int kThreads_, int kSamples_, int kFlight_, int kBlocks_>
struct AggregationPlan {
  static constexpr int kThreads = kThreads_, kSamples = kSamples_, kFlight = kFlight_, kBlocks = kBlocks_;
  static constexpr int kEntries = 4 * kSamples, kWarps = kThreads / kLanes, kPairs = 2 * kThreads;
  static constexpr int kNumbers = 8 * kSamples;  // weights of a chunk; chunks are shorter for more groups than 8
  static constexpr int kOwnWeights = (kNumbers + kThreads - 1) / kThreads;
  static constexpr int log2(int value) { return value < 2 ? 0 : 1 + log2(value / 2); }
  static constexpr int kEntryBits = log2(kEntries);
  static_assert(1 << kEntryBits == kEntries && 1 << log2(kThreads) == kThreads, "powers of two");
  static_assert(kEntryBits + kAggregationRowBits <= 32, "keys have 32 bits");
  static_assert(kSamples <= kThreads, "a thread sorts the corners of one sample at most");
};

constexpr uint32_t kNoKey = ~0u;       // sorts behind every pixel
constexpr uint16_t kNoPixel = 0xffff;  // of an entry outside the map

template <class Access>
struct AggregationPoints {
  const void* locations;
  const void* weights;
  Access location_access, weight_access;
};

/// Powers of two, as the kernels use them. A row of channels lies on 2^lanes lanes of kAggregationVector channels; a
/// column is what one group has of a row, or the part of it on one warp.
struct AggregationLayout {
  int lanes, groups, columns;

  static AggregationLayout of(int64_t channels, int64_t groups) {
    AggregationLayout layout{log2(channels / kAggregationVector), log2(groups), 0};
    const int group_lanes = layout.lanes - layout.groups;
    layout.columns = layout.groups + (group_lanes > 5 ? group_lanes - 5 : 0);
    return layout;
  }
  MSP_HD int column_lanes() const { return 1 << (lanes - columns); }

 private:
  static int log2(int64_t value) {
    int bits = 0;
    while (int64_t{2} << bits <= value) ++bits;
    return bits;
  }
};

template <class T, class Access>
struct AggregationArguments {
  const T* feature;
  AggregationPoints<Access> points;
  LevelSource levels;
  int channels, anchors, pairs, cameras, scales;  // pairs: of an anchor
  int slices, slice_pairs;                        // the blocks of an anchor, and the pairs of each
  int chunk_pairs;
  AggregationLayout layout;
  SmallDivisor by_cameras, by_scales, by_pair_weights;

  MSP_HD int pair_weights() const { return scales << layout.groups; }
};

struct alignas(8) SortedCorner {
  float weight;  // of the corner
  uint32_t sample;
};
struct alignas(16) FourNumbers {
  float value[4];
};

template <class Plan>
struct PixelShared {
  FourNumbers weights[Plan::kNumbers / 4];  // [sample, group]
  FourNumbers columns[Plan::kNumbers];      // [pixel, column]: coefficients, then inner products
  union alignas(16) {
    uint32_t keys[2][Plan::kEntries];      // while sorting, in turn
    SortedCorner corners[Plan::kEntries];  // then the entries, by pixel
  };
  float fractions[Plan::kSamples][2];
  uint32_t rows[Plan::kEntries];       // row of `feature` of each distinct pixel
  uint16_t first[Plan::kEntries + 1];  // and its first entry
  int pairs[Plan::kPairs];             // inside their camera's image, in order
  uint32_t warp_words[Plan::kWarps];
  TableLevel levels[kAggregationLevels];

  MSP_DEVICE const float* weight(uint32_t index) const { return reinterpret_cast<const float*>(weights) + index; }
  MSP_DEVICE float* column(int index) { return reinterpret_cast<float*>(columns) + index; }
  MSP_DEVICE const float* column(int index) const { return reinterpret_cast<const float*>(columns) + index; }
};

/// What one block works on: pairs [first, last) of an anchor.
struct AggregationSlice {
  int image, slice, first, last;
  int64_t row;         // image * anchors + anchor
  int64_t first_pair;  // number of the anchor's first pair

  template <class Arguments>
  MSP_DEVICE static AggregationSlice of(const Arguments& a) {
    const int block = static_cast<int>(blockIdx.x), anchor = block / a.slices;
    AggregationSlice s;
    s.image = static_cast<int>(blockIdx.y);
    s.slice = block - anchor * a.slices;
    s.first = s.slice * a.slice_pairs;
    s.last = s.first + a.slice_pairs < a.pairs ? s.first + a.slice_pairs : a.pairs;
    s.row = static_cast<int64_t>(s.image) * a.anchors + anchor;
    s.first_pair = s.row * a.pairs;
    return s;
  }
};

/// The anchor's part of locations and weights, indexed by pair.
template <class T, class Access>
MSP_DEVICE AggregationPoints<Access> anchor_points(const AggregationArguments<T, Access>& a,
                                                   const AggregationSlice& s) {
  const AggregationPoints<Access>& p = a.points;
  return {p.location_access.shift(p.locations, 2 * s.first_pair),
          p.weight_access.shift(p.weights, s.first_pair * a.pair_weights()), p.location_access, p.weight_access};
}

template <class Plan, class T, class Access>
MSP_DEVICE void fill_aggregation_levels(PixelShared<Plan>& shared, const AggregationArguments<T, Access>& a) {
  for (int l = static_cast<int>(threadIdx.x); l < a.cameras * a.scales; l += Plan::kThreads) {
    shared.levels[l] = table_level(a.levels, l);
  }
}

/// Location of this thread's one of the pairs from `first` on; outside every image past the last.
template <class Access>
MSP_DEVICE void fetch_pair(const AggregationPoints<Access>& points, int first, int last, float (&xy)[2]) {
  const int pair = first + static_cast<int>(threadIdx.x);
  xy[0] = xy[1] = -1.f;
  if (pair < last) points.location_access.load_pair(points.locations, pair, xy);
}

/// Appends those of the kThreads pairs from `first` on that lie inside their image to the `count` listed ones; returns
/// the new count. Afterwards warp_words has a bit per pair. A barrier has to follow before the list is read.
template <class Plan>
MSP_DEVICE int append_pairs(PixelShared<Plan>& shared, const float (&xy)[2], int first, int count) {
  const bool inside = in_image(xy[0], xy[1]);
  const uint32_t mask = ballot(inside);
  if (lane_id() == 0) shared.warp_words[warp_id()] = mask;
  MSP_SYNC_BLOCK();
  int place = count, total = count;
  MSP_UNROLL
  for (int warp = 0; warp < Plan::kWarps; ++warp) {
    const int found = popcount(shared.warp_words[warp]);
    if (warp < warp_id()) place += found;
    total += found;
  }
  if (inside) {
    shared.pairs[place + popcount(mask & ((1u << lane_id()) - 1u))] = first + static_cast<int>(threadIdx.x);
  }
  return total;
}

/// This thread's share of the weights of a chunk.
template <class Plan, class T, class Access>
MSP_DEVICE void load_weights(const PixelShared<Plan>& shared, const AggregationArguments<T, Access>& a,
                             const AggregationPoints<Access>& points, int first, int pairs,
                             float (&weights)[Plan::kOwnWeights]) {
  const int pair_weights = a.pair_weights();
  MSP_UNROLL
  for (int k = 0; k < Plan::kOwnWeights; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * Plan::kThreads, place = a.by_pair_weights.quotient(i);
    weights[k] = 0.f;
    if (place < pairs) {
      const int within = i - place * pair_weights;
      weights[k] = points.weight_access.load(points.weights, shared.pairs[first + place] * pair_weights + within);
    }
  }
}

/// Keys of this thread's kOwn corners, neighbours in the order of entries: row of the pixel << kEntryBits | entry.
template <class Plan, int kOwn, class T, class Access>
MSP_DEVICE void locate_corners(PixelShared<Plan>& shared, const AggregationArguments<T, Access>& a,
                               const AggregationPoints<Access>& points, int first, int pairs, uint32_t (&keys)[kOwn]) {
  const int entry = static_cast<int>(threadIdx.x) * kOwn, number = entry / 4, place = a.by_scales.quotient(number);
  MSP_UNROLL
  for (int k = 0; k < kOwn; ++k) keys[k] = kNoKey;
  if (place >= pairs) return;
  const int pair = shared.pairs[first + place], camera = pair - a.by_cameras.quotient(pair) * a.cameras;
  const TableLevel level = shared.levels[camera * a.scales + number - place * a.scales];
  float xy[2];
  points.location_access.load_pair(points.locations, pair, xy);
  const Sample<float> sample = locate(xy[0], xy[1], level.height, level.width);
  if (entry % 4 == 0) shared.fractions[number][0] = sample.fx, shared.fractions[number][1] = sample.fy;
  MSP_UNROLL
  for (int k = 0; k < kOwn; ++k) {
    const int x = sample.x0 + (entry + k) % 2, y = sample.y0 + (entry + k) / 2 % 2;
    const bool exists = sample.inside && x >= 0 && x < level.width && y >= 0 && y < level.height;
    const uint32_t row = static_cast<uint32_t>(level.start + y * level.width + x);
    if (exists) keys[k] = row << Plan::kEntryBits | static_cast<uint32_t>(entry + k);
  }
}

MSP_DEVICE void order(uint32_t& low, uint32_t& high) {
  const uint32_t a = low, b = high;
  low = a < b ? a : b;
  high = a < b ? b : a;
}

/// Sorts a thread's keys, of which the first half ascends and the second descends.
template <int kOwn>
MSP_DEVICE void merge_own(uint32_t (&keys)[kOwn]) {
  MSP_UNROLL
  for (int step = kOwn / 2; step > 0; step /= 2) {
    MSP_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      if ((k & step) == 0) order(keys[k], keys[k + step]);
    }
  }
}

/// Bitonic sort of the block's kThreads * kOwn keys, which stay in registers: a thread has neighbours. Flipping all
/// bits turns the order round, which makes every merge an ascending one. Leaves the sorted keys in shared memory, too,
/// and returns which of the buffers has them once a barrier has followed.
template <class Plan, int kOwn>
MSP_DEVICE int sort_keys(PixelShared<Plan>& shared, uint32_t (&keys)[kOwn]) {
  const int t = static_cast<int>(threadIdx.x);
  int buffer = 0;
  if constexpr (kOwn == 4) order(keys[0], keys[1]), order(keys[3], keys[2]);
  MSP_NO_UNROLL
  for (int run = 1; run <= Plan::kThreads; run *= 2) {
    const uint32_t flip = t & run ? ~0u : 0u;
    MSP_UNROLL
    for (int k = 0; k < kOwn; ++k) keys[k] ^= flip;
    MSP_NO_UNROLL
    for (int step = run / 2; step > 0; step /= 2) {
      uint32_t other[kOwn];
      if (step < kLanes) {
        MSP_UNROLL
        for (int k = 0; k < kOwn; ++k) other[k] = shuffle_xor(keys[k], step);
      } else {
        MSP_UNROLL
        for (int k = 0; k < kOwn; ++k) shared.keys[buffer][k * Plan::kThreads + t] = keys[k];
        MSP_SYNC_BLOCK();
        MSP_UNROLL
        for (int k = 0; k < kOwn; ++k) other[k] = shared.keys[buffer][k * Plan::kThreads + (t ^ step)];
        buffer ^= 1;
      }
      const bool low = (t & step) == 0;
      MSP_UNROLL
      for (int k = 0; k < kOwn; ++k) keys[k] = (other[k] < keys[k]) == low ? other[k] : keys[k];
    }
    merge_own(keys);
    MSP_UNROLL
    for (int k = 0; k < kOwn; ++k) keys[k] ^= flip;
  }
  MSP_UNROLL
  for (int k = 0; k < kOwn; ++k) shared.keys[buffer][t * kOwn + k] = keys[k];
  return buffer;
}

/// From the sorted keys to the distinct pixels; returns how many there are. `pixels`, unless null, receives the number
/// of each entry's pixel.
template <class Plan, int kOwn>
MSP_DEVICE int number_pixels(PixelShared<Plan>& shared, uint16_t* pixels, int buffer, const uint32_t (&keys)[kOwn]) {
  const int t = static_cast<int>(threadIdx.x), begin = t * kOwn;
  uint32_t before = begin > 0 ? shared.keys[buffer][begin - 1] : kNoKey;
  const uint32_t after = t + 1 < Plan::kThreads ? shared.keys[buffer][begin + kOwn] : kNoKey;
  bool begins[kOwn];
  uint32_t own = 0, total = 0;
  MSP_UNROLL
  for (int k = 0; k < kOwn; ++k) {
    const bool same = (begin > 0 || k > 0) && before >> Plan::kEntryBits == keys[k] >> Plan::kEntryBits;
    begins[k] = keys[k] != kNoKey && !same;
    own += begins[k] ? 1u : 0u;
    before = keys[k];
  }
  uint32_t number = block_exclusive_sum<Plan::kThreads>(own, shared.warp_words, total);
  MSP_UNROLL
  for (int k = 0; k < kOwn; ++k) {
    if (keys[k] == kNoKey) continue;
    const uint32_t entry = keys[k] & (Plan::kEntries - 1), sample = entry / 4;
    if (begins[k]) {
      shared.rows[number] = keys[k] >> Plan::kEntryBits;
      shared.first[number++] = static_cast<uint16_t>(begin + k);
    }
    const float fx = shared.fractions[sample][0], fy = shared.fractions[sample][1];
    shared.corners[begin + k] = {(entry & 2 ? fy : 1.f - fy) * (entry & 1 ? fx : 1.f - fx), sample};
    if (pixels) pixels[entry] = static_cast<uint16_t>(number - 1u);
    const uint32_t next = k + 1 < kOwn ? keys[(k + 1) % kOwn] : after;
    if (next == kNoKey) shared.first[number] = static_cast<uint16_t>(begin + k + 1);
  }
  return static_cast<int>(total);
}

/// columns[pixel, column] = sum over the pixel's entries of corner weight times the group's weight; a thread has kWidth
/// neighbouring columns.
template <int kWidth, class Plan>
MSP_DEVICE void sum_coefficients(PixelShared<Plan>& shared, const AggregationLayout& layout, int pixels) {
  const int parts = layout.columns - layout.groups;  // log2 of the columns of a group; 0 unless kWidth is 1
  MSP_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < pixels << layout.columns; i += Plan::kThreads * kWidth) {
    const int pixel = i >> layout.columns, group = (i & ((1 << layout.columns) - 1)) >> parts;
    const int last = shared.first[pixel + 1];
    float sum[kWidth] = {};
    MSP_UNROLL_BY(2)
    for (int j = shared.first[pixel]; j < last; ++j) {
      const SortedCorner corner = shared.corners[j];
      const uint32_t index = (corner.sample << layout.groups) + static_cast<uint32_t>(group);
      if constexpr (kWidth == 4) {
        const FourNumbers weights = shared.weights[index / 4];
        MSP_UNROLL
        for (int c = 0; c < 4; ++c) sum[c] = muspace::fma(corner.weight, weights.value[c], sum[c]);
      } else {
        sum[0] = muspace::fma(corner.weight, *shared.weight(index), sum[0]);
      }
    }
    if constexpr (kWidth == 4) {
      shared.columns[i / 4] = {sum[0], sum[1], sum[2], sum[3]};
    } else {
      *shared.column(i) = sum[0];
    }
  }
}

/// The distinct pixels of `pairs` pairs from place `first` of the list, with their coefficients; returns how many.
/// Every thread sorts kOwn corners, more if these do not suffice.
template <int kOwn = 1, class Plan, class T, class Access>
MSP_DEVICE int list_pixels(PixelShared<Plan>& shared, uint16_t* pixels_of_entries,
                           const AggregationArguments<T, Access>& a, const AggregationPoints<Access>& points, int first,
                           int pairs) {
  if constexpr (kOwn * Plan::kThreads < Plan::kEntries) {
    if (4 * pairs * a.scales > kOwn * Plan::kThreads) {
      return list_pixels<2 * kOwn>(shared, pixels_of_entries, a, points, first, pairs);
    }
  }
  float weights[Plan::kOwnWeights];  // on their way during the sort
  uint32_t keys[kOwn];
  load_weights(shared, a, points, first, pairs, weights);
  locate_corners(shared, a, points, first, pairs, keys);
  const int buffer = sort_keys(shared, keys);
  MSP_UNROLL
  for (int k = 0; k < Plan::kOwnWeights; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * Plan::kThreads;
    if (i < Plan::kNumbers) shared.weights[i / 4].value[i % 4] = weights[k];
  }
  MSP_SYNC_BLOCK();
  const int pixels = number_pixels(shared, pixels_of_entries, buffer, keys);
  MSP_SYNC_BLOCK();
  if (a.layout.groups >= 2 && a.layout.groups == a.layout.columns) {
    sum_coefficients<4>(shared, a.layout, pixels);
  } else {
    sum_coefficients<1>(shared, a.layout, pixels);
  }
  MSP_SYNC_BLOCK();
  return pixels;
}

/// Calls round(first, last) for every kThreads pairs once they have been tested, and chunk(first, pairs) for every
/// chunk of pairs inside their image. The whole block calls it, and both start and end at a barrier.
template <class Plan, class T, class Access, class Round, class Chunk>
MSP_DEVICE void walk_pairs(PixelShared<Plan>& shared, const AggregationArguments<T, Access>& a,
                           const AggregationPoints<Access>& points, const AggregationSlice& slice, const Round& round,
                           const Chunk& chunk) {
  float xy[2];
  fetch_pair(points, slice.first, slice.last, xy);  // under way while the table is read
  fill_aggregation_levels(shared, a);
  for (int next = slice.first; next < slice.last;) {
    int count = 0;
    for (; next < slice.last && count <= Plan::kPairs - Plan::kThreads; next += Plan::kThreads) {
      count = append_pairs(shared, xy, next, count);
      fetch_pair(points, next + Plan::kThreads, slice.last, xy);
      round(next, next + Plan::kThreads < slice.last ? next + Plan::kThreads : slice.last);
      MSP_SYNC_BLOCK();
    }
    const int chunks = (count + a.chunk_pairs - 1) / a.chunk_pairs, length = chunks ? (count + chunks - 1) / chunks : 0;
    for (int first = 0; first < count; first += length) {
      chunk(first, first + length < count ? length : count - first);
      MSP_SYNC_BLOCK();
    }
  }
}

}  // namespace muspace::msda
