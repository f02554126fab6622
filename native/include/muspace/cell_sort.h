// SPDX-License-Identifier: Apache-2.0
// Cell sort on the device: keys -> CSR starts of the cells and the ids of each cell, ascending. Counts by atomics,
// scans, places, and orders inside the cells, so the outcome is bit-reproducible for any keys. No host read, no
// allocation.
//
// Below kGroupedFrom keys every key is counted by an atomic of its own; above, a block groups its keys in a hash table
// first, which leaves one global atomic per distinct cell of the block and makes the placement write runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "muspace/atomic.h"
#include "muspace/sort.h"
#include "muspace/target.h"
#include "muspace/vec.h"
#include "muspace/warp.h"

namespace muspace {

constexpr int kCellThreads = 256;
constexpr int kGroupThreads = 256, kGroupItems = 8, kGroupKeys = kGroupThreads * kGroupItems;  // a block groups them
constexpr int kGroupSlots = 2 * kGroupKeys;                                                    // of its hash table
constexpr int kStartThreads = 1024, kStartCells = 2 * kStartThreads;     // cells that a block scans
constexpr int kShortCell = 128;                                          // ids that a warp orders in registers
constexpr int kTinyCell = 32;                                            // ids that one thread compares
constexpr int kStagedCell = 4096;                                        // ids that a block orders in shared memory
using StartTiles = SortTiles<kCellThreads, kStartCells / kCellThreads>;
#if defined(MSP_BACKEND_EMU)
constexpr int64_t kGroupedFrom = 6000, kDirectCells = 4096, kSparseCells = 1000;
constexpr unsigned kLongBlocks = 3;
#else
constexpr int64_t kGroupedFrom = 500000;  // keys
constexpr int64_t kDirectCells = 262144;  // up to here each block adds up all counts before its own
constexpr int64_t kSparseCells = 16384;
constexpr unsigned kLongBlocks = 264;
#endif

/// What is sorted, and where to. Keys outside [0, cells) have no cell. Everything lies in device memory; count and
/// cells are below 2^31; keys and starts are 16-byte aligned.
struct CellSort {
  const int32_t* keys;
  int64_t count, cells;
  int32_t* starts;      // [cells + 1]
  int32_t* order;       // [count]; the first starts[cells] are written
  int32_t* counters;    // [counter_words], set to zero first
  int counter_words;    // at most kCellThreads
  int32_t* long_count;  // one of the counters: number of long cells
  int32_t* long_cells;  // [long_capacity()]; in no particular order

  /// Few keys a cell: one thread a key finds its rank; otherwise a warp sorts a cell. Longer cells take a block.
  MSP_HD bool sparse() const { return cells >= kSparseCells && count <= 4 * cells; }
  MSP_HD int long_limit() const { return sparse() ? kTinyCell : kShortCell; }
  int64_t long_capacity() const { return count / (long_limit() + 1) + 1; }
  bool grouped() const { return count >= kGroupedFrom; }
};

struct CellSortWorkspace {
  uint32_t* counts;     // per cell
  uint32_t* sums;       // per block of the scan
  int32_t *keys, *ids;  // grouped
  int32_t* ranks;       // among the keys of the cell, in the order in which the atomics came
  int32_t* placed;      // by cell, not yet in order
  int64_t bytes;

  CellSortWorkspace(const CellSort& sort, void* base) : bytes(0), base_(static_cast<char*>(base)) {
    const int64_t groups = (sort.count + kGroupKeys - 1) / kGroupKeys * kGroupKeys;
    counts = take<uint32_t>((sort.cells + kStartCells - 1) / kStartCells * kStartCells);
    sums = take<uint32_t>(tile_count<StartTiles>(sort.cells));
    ranks = take<int32_t>(groups);
    keys = take<int32_t>(sort.grouped() ? groups : 0);
    ids = take<int32_t>(sort.grouped() ? groups : 0);
    placed = sort.sparse() ? take<int32_t>(sort.count) : sort.order;
  }

 private:
  template <class Item>
  Item* take(int64_t count) {
    char* begin = base_ ? base_ + bytes : nullptr;
    bytes += (count * static_cast<int64_t>(sizeof(Item)) + 255) / 256 * 256;
    return reinterpret_cast<Item*>(begin);
  }
  char* base_;
};

// ------------------------------------------------------------------------------------------------------------- counts

MSP_DEVICE void clear_counters(const CellSort& sort) {
  const int t = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && t < sort.counter_words) sort.counters[t] = 0;
}

/// keys[i] for i < count, else -1. `first` is a multiple of four.
MSP_DEVICE void load_keys(const CellSort& sort, int64_t first, int32_t (&keys)[4]) {
  if (first + 3 < sort.count) {
    const Words<16> words = load_words<16>(sort.keys + first);
    MSP_UNROLL
    for (int u = 0; u < 4; ++u) keys[u] = static_cast<int32_t>(words.word[u]);
  } else {
    MSP_UNROLL
    for (int u = 0; u < 4; ++u) keys[u] = first + u < sort.count ? sort.keys[first + u] : -1;
  }
  MSP_UNROLL
  for (int u = 0; u < 4; ++u) {
    if (static_cast<uint32_t>(keys[u]) >= static_cast<uint32_t>(sort.cells)) keys[u] = -1;
  }
}

/// Four neighbouring keys a thread; equal neighbours share an atomic.
template <class Unused>
MSP_KERNEL(kCellThreads, 1)
count_keys(const CellSort sort, uint32_t* counts, int32_t* ranks) {
  clear_counters(sort);
  const int64_t first = 4 * (static_cast<int64_t>(blockIdx.x) * kCellThreads + static_cast<int>(threadIdx.x));
  if (first >= sort.count) return;
  int32_t keys[4];
  load_keys(sort, first, keys);
  uint32_t rank[4];
  MSP_UNROLL
  for (int u = 0; u < 4; ++u) {
    const bool head = u == 0 || keys[u] != keys[u - 1];
    uint32_t run = 1;
    MSP_UNROLL
    for (int v = u + 1; v < 4; ++v) run += keys[v] == keys[u] && run == static_cast<uint32_t>(v - u) ? 1u : 0u;
    rank[u] = head && keys[u] >= 0 ? atomic_add(counts + keys[u], run) : 0u;
  }
  MSP_UNROLL
  for (int u = 1; u < 4; ++u) {
    if (keys[u] == keys[u - 1]) rank[u] = rank[u - 1] + 1;
  }
  if (first + 3 < sort.count) {
    Words<16> words;
    MSP_UNROLL
    for (int u = 0; u < 4; ++u) words.word[u] = rank[u];
    *reinterpret_cast<Words<16>*>(ranks + first) = words;
  } else {
    MSP_UNROLL
    for (int u = 0; u < 4; ++u) {
      if (first + u < sort.count) ranks[first + u] = static_cast<int32_t>(rank[u]);
    }
  }
}

/// Keys that a block groups. The two arrays serve one purpose after the other.
struct KeyGroups {
  int32_t keys[kGroupSlots];     // hash table, -1: free; then the first rank of the group; at last keys and ranks
  uint32_t counts[kGroupSlots];  // keys of a group; then its place; at last the ids
  uint32_t warp_sums[kGroupThreads / kLanes];
};

/// The slot of `key`, which it takes if no equal key has. A block has half as many keys as slots.
MSP_DEVICE int group_slot(KeyGroups& groups, int32_t key) {
  constexpr int kShift = 20;  // kGroupSlots is 2^12
  static_assert(kGroupSlots == 1 << (32 - kShift), "the hash takes the upper bits");
  int slot = static_cast<int>(static_cast<uint32_t>(key) * 0x9e3779b1u >> kShift);
  for (;;) {
    int32_t found = static_cast<volatile int32_t*>(groups.keys)[slot];
    if (found == -1) {
      found = atomic_compare_swap(groups.keys + slot, -1, key);
      if (found == -1) return slot;
    }
    if (found == key) return slot;
    slot = (slot + 1) & (kGroupSlots - 1);
  }
}

/// Turns the counts of the slots into places, and the keys of the taken slots into the first rank of the
/// block's keys in the cell. Returns the block's number of keys that have a cell.
MSP_DEVICE uint32_t place_groups(KeyGroups& groups, uint32_t* counts) {
  constexpr int kSlots = kGroupSlots / kGroupThreads;
  const int t = static_cast<int>(threadIdx.x);
  uint32_t own[kSlots], sum = 0, total = 0;
  MSP_UNROLL
  for (int k = 0; k < kSlots; ++k) {
    own[k] = groups.counts[k * kGroupThreads + t];
    sum += own[k];
  }
  uint32_t place = block_exclusive_sum<kGroupThreads>(sum, groups.warp_sums, total);
  MSP_UNROLL
  for (int k = 0; k < kSlots; ++k) {
    const int slot = k * kGroupThreads + t;
    if (own[k] == 0) continue;
    groups.counts[slot] = place;
    place += own[k];
    groups.keys[slot] = static_cast<int32_t>(atomic_add(counts + groups.keys[slot], own[k]));
  }
  return total;
}

template <class Unused>
MSP_KERNEL(kGroupThreads, 4)
count_grouped_keys(const CellSort sort, uint32_t* counts, int32_t* keys, int32_t* ranks, int32_t* ids) {
  MSP_SHARED KeyGroups groups;
  clear_counters(sort);
  const int t = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroupKeys;
  int32_t key[kGroupItems];
  uint32_t rank[kGroupItems];
  int slot[kGroupItems];
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    const int64_t i = first + u * kGroupThreads + t;
    key[u] = i < sort.count ? sort.keys[i] : -1;
    if (static_cast<uint32_t>(key[u]) >= static_cast<uint32_t>(sort.cells)) key[u] = -1;
  }
  for (int i = t; i < kGroupSlots; i += kGroupThreads) groups.keys[i] = -1, groups.counts[i] = 0;
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    slot[u] = 0, rank[u] = 0;
    if (key[u] < 0) continue;
    slot[u] = group_slot(groups, key[u]);
    rank[u] = atomic_add(groups.counts + slot[u], 1u);
  }
  MSP_SYNC_BLOCK();
  const int total = static_cast<int>(place_groups(groups, counts));
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    const uint32_t within = rank[u];
    rank[u] += static_cast<uint32_t>(groups.keys[slot[u]]);
    slot[u] = static_cast<int>(groups.counts[slot[u]] + within);
  }
  MSP_SYNC_BLOCK();
  int32_t *staged_ranks = groups.keys + kGroupKeys, *staged_ids = reinterpret_cast<int32_t*>(groups.counts);
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    if (key[u] < 0) continue;
    groups.keys[slot[u]] = key[u];
    staged_ranks[slot[u]] = static_cast<int32_t>(rank[u]);
    staged_ids[slot[u]] = static_cast<int32_t>(first) + u * kGroupThreads + t;
  }
  MSP_SYNC_BLOCK();
  for (int i = t; i < kGroupKeys; i += kGroupThreads) {
    keys[first + i] = i < total ? groups.keys[i] : -1;
    if (i >= total) continue;
    ranks[first + i] = staged_ranks[i];
    ids[first + i] = staged_ids[i];
  }
}

// ------------------------------------------------------------------------------------------------------------- starts

/// What the scan's blocks may do with the starts they hold: visit(starts of kStartCells cells and the next one, first
/// cell). Every thread of the block calls it.
struct NoVisit {
  struct Shared {};
  MSP_DEVICE void operator()(const uint32_t*, int64_t, Shared&) const {}
};

MSP_DEVICE uint32_t sum_of_counts_before(const uint32_t* counts, int64_t end, uint32_t* warp_sums) {
  uint32_t sum = 0, total = 0;
  for (int64_t i = 4 * static_cast<int>(threadIdx.x); i < end; i += 4 * kStartThreads) {
    const Words<16> words = load_words<16>(counts + i);
    sum += words.word[0] + words.word[1] + words.word[2] + words.word[3];
  }
  block_exclusive_sum<kStartThreads>(sum, warp_sums, total);
  MSP_SYNC_BLOCK();
  return total;
}

/// `counts` is zero beyond the last cell. `sums` holds the counts before each block, or is null.
template <class Visit>
MSP_KERNEL(kStartThreads, 1)
cell_starts(const CellSort sort, const uint32_t* counts, const uint32_t* sums, const Visit visit) {
  MSP_SHARED uint32_t starts[kStartCells + 1];
  MSP_SHARED uint32_t warp_sums[kStartThreads / kLanes];
  MSP_SHARED typename Visit::Shared visit_shared;
  MSP_SHARED int long_cells, long_place;
  const int t = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kStartCells;
  if (t == 0) long_cells = 0;
  const uint32_t base = sums ? sums[blockIdx.x] : sum_of_counts_before(counts, first, warp_sums);
  const Words<8> own = load_words<8>(counts + first + 2 * t);
  uint32_t total = 0;
  const uint32_t place = base + block_exclusive_sum<kStartThreads>(own.word[0] + own.word[1], warp_sums, total);
  starts[2 * t] = place;
  starts[2 * t + 1] = place + own.word[0];
  if (t == kStartThreads - 1) starts[kStartCells] = base + total;
  MSP_SYNC_BLOCK();
  const uint32_t limit = static_cast<uint32_t>(sort.long_limit());
  int slot[2];
  MSP_UNROLL
  for (int k = 0; k < 2; ++k) {
    if (own.word[k] > limit) slot[k] = atomic_add(&long_cells, 1);
  }
  for (int i = t; i <= kStartCells; i += kStartThreads) {
    if (first + i <= sort.cells && (i < kStartCells || first + i == sort.cells)) {
      sort.starts[first + i] = static_cast<int32_t>(starts[i]);
    }
  }
  MSP_SYNC_BLOCK();
  if (t == 0 && long_cells > 0) long_place = atomic_add(sort.long_count, long_cells);
  visit(starts, first, visit_shared);
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < 2; ++k) {
    if (own.word[k] > limit) sort.long_cells[long_place + slot[k]] = static_cast<int32_t>(first) + 2 * t + k;
  }
}

// ---------------------------------------------------------------------------------------------------------- placement

template <class Unused>
MSP_KERNEL(kCellThreads, 1)
place_keys(const CellSort sort, const int32_t* ranks, int32_t* placed) {
  const int64_t first = 4 * (static_cast<int64_t>(blockIdx.x) * kCellThreads + static_cast<int>(threadIdx.x));
  if (first >= sort.count) return;
  int32_t keys[4], place[4];
  load_keys(sort, first, keys);
  const Words<16> words = load_words<16>(ranks + first);  // allocated to a multiple of four
  MSP_UNROLL
  for (int u = 0; u < 4; ++u) {
    if (keys[u] >= 0) place[u] = sort.starts[keys[u]] + static_cast<int32_t>(words.word[u]);
  }
  MSP_UNROLL
  for (int u = 0; u < 4; ++u) {
    if (keys[u] >= 0) placed[place[u]] = static_cast<int32_t>(first) + u;
  }
}

template <class Unused>
MSP_KERNEL(kGroupThreads, 1)
place_grouped_keys(const int32_t* starts, const int32_t* keys, const int32_t* ranks, const int32_t* ids,
                   int32_t* placed) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroupKeys + static_cast<int>(threadIdx.x);
  int32_t place[kGroupItems];
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) place[u] = keys[first + u * kGroupThreads];
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    if (place[u] >= 0) place[u] = starts[place[u]] + ranks[first + u * kGroupThreads];
  }
  MSP_UNROLL
  for (int u = 0; u < kGroupItems; ++u) {
    if (place[u] >= 0) placed[place[u]] = ids[first + u * kGroupThreads];
  }
}

}  // namespace muspace

#include "muspace/cell_order.h"
