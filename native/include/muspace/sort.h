// SPDX-License-Identifier: Apache-2.0
// Exclusive scan and stable radix sort of (key, id) pairs on the device, from shuffles and shared memory alone.
//
// The sort is least significant digit first: per-tile histogram, scan of the counts, stable scatter. It sorts any
// number of segments of equal length independently in the same launches, and is bit-reproducible. Tile sizes are
// template parameters, so that the emulation can run several tiles on a handful of items.
#pragma once

#include <cstddef>
#include <cstdint>

#include "muspace/atomic.h"
#include "muspace/target.h"
#include "muspace/warp.h"

namespace muspace {

constexpr int kRadixBits = 8;
constexpr int kRadixBins = 1 << kRadixBits;

/// A block of kThreads threads takes kThreads * kItems items; kThreads divides kRadixBins.
template <int kThreads_, int kItems_>
struct SortTiles {
  static constexpr int kThreads = kThreads_, kItems = kItems_, kTile = kThreads * kItems, kWarps = kThreads / kLanes;
  static constexpr int kBinsPerThread = kRadixBins / kThreads;
  static_assert(kRadixBins % kThreads == 0 && kThreads % kLanes == 0, "tiles need 32, 64, 128 or 256 threads");
};

#if defined(MSP_BACKEND_EMU)
using DefaultSortTiles = SortTiles<64, 2>;
#else
using DefaultSortTiles = SortTiles<256, 16>;
#endif

/// Exclusive sum over the block of one value per thread; `total` receives the sum of all. `warp_sums` holds a word per
/// warp and may be used again after a barrier.
template <int kThreads>
MSP_DEVICE uint32_t block_exclusive_sum(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t inclusive = warp_inclusive_sum(value);
  if (lane_id() == kLanes - 1) warp_sums[warp_id()] = inclusive;
  MSP_SYNC_BLOCK();
  uint32_t base = 0;
  total = 0;
  MSP_UNROLL
  for (int warp = 0; warp < kThreads / kLanes; ++warp) {
    if (warp < warp_id()) base += warp_sums[warp];
    total += warp_sums[warp];
  }
  return base + inclusive - value;
}

// ---------------------------------------------------------------------------------------------------- exclusive scan

template <class Tiles>
MSP_KERNEL(Tiles::kThreads, 1)
scan_tile_sums(const uint32_t* values, uint32_t* sums, int64_t count) {
  MSP_SHARED uint32_t warp_sums[Tiles::kWarps];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Tiles::kTile;
  uint32_t sum = 0, total = 0;
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int64_t i = first + k * Tiles::kThreads + static_cast<int>(threadIdx.x);
    if (i < count) sum += values[i];
  }
  block_exclusive_sum<Tiles::kThreads>(sum, warp_sums, total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

/// One block; in place.
template <class Tiles>
MSP_KERNEL(Tiles::kThreads, 1)
scan_of_sums(uint32_t* sums, int64_t count) {
  MSP_SHARED uint32_t warp_sums[Tiles::kWarps];
  uint32_t carry = 0;
  for (int64_t first = 0; first < count; first += Tiles::kThreads) {
    const int64_t i = first + static_cast<int>(threadIdx.x);
    const uint32_t value = i < count ? sums[i] : 0;
    uint32_t total = 0;
    const uint32_t before = block_exclusive_sum<Tiles::kThreads>(value, warp_sums, total);
    if (i < count) sums[i] = carry + before;
    carry += total;
    MSP_SYNC_BLOCK();
  }
}

template <class Tiles>
MSP_KERNEL(Tiles::kThreads, 1)
scan_apply(uint32_t* values, const uint32_t* sums, int64_t count) {
  MSP_SHARED uint32_t warp_sums[Tiles::kWarps];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Tiles::kTile;
  uint32_t carry = sums[blockIdx.x];
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int64_t i = first + k * Tiles::kThreads + static_cast<int>(threadIdx.x);
    const uint32_t value = i < count ? values[i] : 0;
    uint32_t total = 0;
    const uint32_t before = block_exclusive_sum<Tiles::kThreads>(value, warp_sums, total);
    if (i < count) values[i] = carry + before;
    carry += total;
    MSP_SYNC_BLOCK();
  }
}

template <class Tiles>
constexpr int64_t tile_count(int64_t items) {
  return (items + Tiles::kTile - 1) / Tiles::kTile;
}

/// values[i] = sum of values[0 .. i); `sums` holds tile_count<Tiles>(count) words.
template <class Tiles>
const char* exclusive_scan(uint32_t* values, uint32_t* sums, int64_t count, stream_t stream) {
  const int64_t tiles = tile_count<Tiles>(count);
  const dim3 grid(static_cast<unsigned>(tiles)), block(Tiles::kThreads);
  const auto reduce = scan_tile_sums<Tiles>;
  const auto scan = scan_of_sums<Tiles>;
  const auto apply = scan_apply<Tiles>;
  MSP_LAUNCH(reduce, grid, block, 0, stream, values, sums, count);
  MSP_LAUNCH(scan, dim3(1), block, 0, stream, sums, tiles);
  MSP_LAUNCH(apply, grid, block, 0, stream, values, sums, count);
  return launch_error();
}

// -------------------------------------------------------------------------------------------------------- radix sort

struct RadixPass {
  const uint32_t* keys;  // [segments, count]
  const uint32_t* ids;   // likewise; null: the place within the segment
  uint32_t* sorted_keys;
  uint32_t* sorted_ids;
  uint32_t* counts;  // [segments, kRadixBins, tiles]; after the scan the first place of each
  int64_t count;     // items of a segment
  int shift;

  MSP_DEVICE int digit(uint32_t key) const { return static_cast<int>((key >> shift) & (kRadixBins - 1)); }
  MSP_DEVICE int64_t counter(int bin) const {
    return (static_cast<int64_t>(blockIdx.y) * kRadixBins + bin) * gridDim.x + blockIdx.x;
  }
};

/// Grid: tiles, segments.
template <class Tiles>
MSP_KERNEL(Tiles::kThreads, 1)
radix_histogram(const RadixPass pass) {
  MSP_SHARED uint32_t bins[kRadixBins];
  const int t = static_cast<int>(threadIdx.x);
  for (int bin = t; bin < kRadixBins; bin += Tiles::kThreads) bins[bin] = 0;
  MSP_SYNC_BLOCK();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Tiles::kTile;
  const uint32_t* keys = pass.keys + static_cast<int64_t>(blockIdx.y) * pass.count;
  MSP_UNROLL_BY(8)
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int64_t i = first + k * Tiles::kThreads + t;
    if (i < pass.count) atomic_add(&bins[pass.digit(keys[i])], 1u);
  }
  MSP_SYNC_BLOCK();
  for (int bin = t; bin < kRadixBins; bin += Tiles::kThreads) pass.counts[pass.counter(bin)] = bins[bin];
}

/// Lanes whose digit equals this lane's.
MSP_DEVICE uint32_t equal_digits(int digit) {
  uint32_t peers = ~0u;
  MSP_UNROLL
  for (int bit = 0; bit < kRadixBits; ++bit) {
    const bool set = (digit >> bit) & 1;
    const uint32_t lanes = ballot(set);
    peers &= set ? lanes : ~lanes;
  }
  return peers;
}

template <class Tiles>
struct ScatterShared {
  uint32_t ranks[Tiles::kWarps][kRadixBins];  // items of a bin in a warp; then how many precede them in the block
  uint32_t first[kRadixBins];                 // place of a bin's first item in the tile
  uint32_t target[kRadixBins];                // and in the sorted array
  uint32_t keys[Tiles::kTile];
  uint32_t ids[Tiles::kTile];
  uint32_t warp_sums[Tiles::kWarps];
};

/// Turns the counts per warp and bin into places; every thread owns kBinsPerThread neighbouring bins.
template <class Tiles>
MSP_DEVICE void place_bins(ScatterShared<Tiles>& shared, const RadixPass& pass) {
  uint32_t own[Tiles::kBinsPerThread], sum = 0, total = 0;
  const int first_bin = static_cast<int>(threadIdx.x) * Tiles::kBinsPerThread;
  MSP_UNROLL
  for (int b = 0; b < Tiles::kBinsPerThread; ++b) {
    uint32_t before = 0;
    MSP_UNROLL
    for (int warp = 0; warp < Tiles::kWarps; ++warp) {
      const uint32_t count = shared.ranks[warp][first_bin + b];
      shared.ranks[warp][first_bin + b] = before;
      before += count;
    }
    own[b] = before;
    sum += before;
  }
  uint32_t place = block_exclusive_sum<Tiles::kThreads>(sum, shared.warp_sums, total);
  MSP_UNROLL
  for (int b = 0; b < Tiles::kBinsPerThread; ++b) {
    shared.first[first_bin + b] = place;
    shared.target[first_bin + b] = pass.counts[pass.counter(first_bin + b)];
    place += own[b];
  }
}

/// Grid: tiles, segments. Each warp ranks a run of neighbouring items in order, so equal digits keep their order.
template <class Tiles>
MSP_KERNEL(Tiles::kThreads, 1)
radix_scatter(const RadixPass pass) {
  MSP_SHARED ScatterShared<Tiles> shared;
  const int t = static_cast<int>(threadIdx.x), warp = warp_id(), lane = lane_id();
  for (int i = t; i < Tiles::kWarps * kRadixBins; i += Tiles::kThreads) (&shared.ranks[0][0])[i] = 0;
  const int64_t segment = static_cast<int64_t>(blockIdx.y) * pass.count;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Tiles::kTile;
  const int left = static_cast<int>(pass.count - first < Tiles::kTile ? pass.count - first : Tiles::kTile);
  const int run = warp * kLanes * Tiles::kItems + lane;
  uint32_t key[Tiles::kItems], id[Tiles::kItems];
  uint32_t rank[Tiles::kItems];
  MSP_UNROLL
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int i = run + k * kLanes;
    // items past the end take the last bin; being last in order they are staged behind all others and never written
    key[k] = i < left ? pass.keys[segment + first + i] : ~0u;
    id[k] = i < left && pass.ids ? pass.ids[segment + first + i] : static_cast<uint32_t>(first + i);
  }
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int digit = pass.digit(key[k]);
    const uint32_t peers = equal_digits(digit);
    rank[k] = shared.ranks[warp][digit] + static_cast<uint32_t>(popcount(peers & ((1u << lane) - 1u)));
    MSP_SYNC_WARP();
    if (peers >> lane == 1u) shared.ranks[warp][digit] = rank[k] + 1;  // the last of its peers
    MSP_SYNC_WARP();
  }
  MSP_SYNC_BLOCK();
  place_bins(shared, pass);
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Tiles::kItems; ++k) {
    const int digit = pass.digit(key[k]);
    const uint32_t place = shared.first[digit] + shared.ranks[warp][digit] + rank[k];
    shared.keys[place] = key[k];
    shared.ids[place] = id[k];
  }
  MSP_SYNC_BLOCK();
  for (int i = t; i < left; i += Tiles::kThreads) {
    const uint32_t sorted = shared.keys[i];
    const int digit = pass.digit(sorted);
    const int64_t target = static_cast<int64_t>(shared.target[digit]) + (i - static_cast<int>(shared.first[digit]));
    pass.sorted_keys[target] = sorted;
    pass.sorted_ids[target] = shared.ids[i];
  }
}

/// Two buffers of pairs; a pass reads one and writes the other.
struct SortBuffers {
  uint32_t* keys[2];
  uint32_t* ids[2];
  uint32_t* counts;  // radix_count_words<Tiles>() words
};

/// Words of SortBuffers::counts, the scan's sums included.
template <class Tiles>
constexpr int64_t radix_count_words(int64_t segments, int64_t count) {
  const int64_t counters = segments * kRadixBins * tile_count<Tiles>(count);
  return counters + tile_count<Tiles>(counters);
}

/// Sorts each of `segments` runs of `count` keys in buffers.keys[0] stably by their lowest `bits` bits. The ids of
/// equal keys ascend; an id is the item's first place in its segment. `result` tells which of the two buffers holds the
/// outcome. segments * count stays below 2^32 and segments below 65,536.
template <class Tiles>
const char* radix_sort(const SortBuffers& buffers, int64_t segments, int64_t count, int bits, int& result,
                       stream_t stream) {
  const int64_t counters = segments * kRadixBins * tile_count<Tiles>(count);
  const dim3 grid(static_cast<unsigned>(tile_count<Tiles>(count)), static_cast<unsigned>(segments)),
      block(Tiles::kThreads);
  const auto histogram = radix_histogram<Tiles>;
  const auto scatter = radix_scatter<Tiles>;
  result = 0;
  for (int shift = 0; shift < bits || shift == 0; shift += kRadixBits) {
    const RadixPass pass{buffers.keys[result],
                         shift == 0 ? nullptr : buffers.ids[result],
                         buffers.keys[1 - result],
                         buffers.ids[1 - result],
                         buffers.counts,
                         count,
                         shift};
    MSP_LAUNCH(histogram, grid, block, 0, stream, pass);
    const char* error = exclusive_scan<Tiles>(buffers.counts, buffers.counts + counters, counters, stream);
    if (error) return error;
    MSP_LAUNCH(scatter, grid, block, 0, stream, pass);
    result = 1 - result;
  }
  return launch_error();
}

}  // namespace muspace
