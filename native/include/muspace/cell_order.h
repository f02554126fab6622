// SPDX-License-Identifier: Apache-2.0
// The last step of the cell sort: the ids of every cell in ascending order, and the launches. Only cell_sort.h includes
// this.
#pragma once

namespace muspace {

/// What happens to an id once its place is known, besides being written to the order.
struct NoEntry {
  static constexpr bool kWrites = false;
  MSP_DEVICE void operator()(int32_t, int32_t) const {}
};

constexpr int32_t kNoId = 0x7fffffff;
constexpr int kOrderWarps = kCellThreads / kLanes;
constexpr int64_t kManyCells = 100000;

struct OrderShared {
  int32_t ids[kStagedCell];
  uint32_t warp_sums[kOrderWarps];
};

template <int kItems>
MSP_DEVICE void exchange_items(int32_t (&ids)[kItems], int k, int j) {
  const int first = lane_id() * kItems;
  if (j >= kItems) {
    const bool low = (first & j) == 0;
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) {
      const int32_t other = shuffle_xor(ids[e], j / kItems);
      const bool up = ((first + e) & k) == 0;
      ids[e] = (low == up) == (ids[e] < other) ? ids[e] : other;
    }
  } else {
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) {
      if ((e & j) != 0) continue;
      const bool up = ((first + e) & k) == 0;
      const int32_t a = ids[e], b = ids[e | (j & (kItems - 1))];
      ids[e] = up == (a < b) ? a : b;
      ids[e | (j & (kItems - 1))] = up == (a < b) ? b : a;
    }
  }
}

/// Sorts the ids of a warp, lane * kItems + e the place of ids[e]; ids past the end are kNoId.
template <int kItems>
MSP_DEVICE void bitonic_sort(int32_t (&ids)[kItems]) {
  MSP_UNROLL
  for (int k = 2; k <= kLanes * kItems; k <<= 1) {
    MSP_UNROLL
    for (int j = k >> 1; j > 0; j >>= 1) exchange_items(ids, k, j);
  }
}

/// Whether the ids, place e * kLanes + lane each, ascend already. The warp reaches it together.
template <int kItems>
MSP_DEVICE bool ascending(const int32_t (&ids)[kItems]) {
  bool descent = false;
  MSP_UNROLL
  for (int e = 0; e < kItems; ++e) {
    const int32_t before = shuffle_up(ids[e], 1), last = e > 0 ? shuffle(ids[e > 0 ? e - 1 : 0], kLanes - 1) : -1;
    descent |= (lane_id() > 0 ? before : last) > ids[e];
  }
  return !any(descent);
}

/// One cell of up to kItems * kLanes ids by one warp. `staged` is the warp's own shared memory of that size.
template <int kItems, class Entry>
MSP_DEVICE void order_short_cell(int32_t* order, int32_t first, int count, int32_t* staged, const Entry& entry) {
  const int lane = lane_id();
  int32_t ids[kItems];
  MSP_UNROLL
  for (int e = 0; e < kItems; ++e) ids[e] = e * kLanes + lane < count ? order[first + e * kLanes + lane] : kNoId;
  const int descends = ascending(ids) ? 0 : 1;
  if (converged_max(descends) != 0) {
    bitonic_sort(ids);
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) staged[lane * kItems + e] = ids[e];
    MSP_SYNC_WARP();
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) {
      ids[e] = staged[e * kLanes + lane];
      if (e * kLanes + lane < count) order[first + e * kLanes + lane] = ids[e];
    }
    MSP_SYNC_WARP();
  }
  if constexpr (Entry::kWrites) {
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) {
      if (e * kLanes + lane < count) entry(first + e * kLanes + lane, ids[e]);
    }
  }
}

/// `warp_cells` cells a warp, far apart so that crowded neighbours meet different warps.
template <class Entry>
MSP_DEVICE void order_short_cells(const CellSort& sort, int block, int blocks, int warp_cells, int32_t* staged,
                                  const Entry& entry) {
  const int64_t stride = static_cast<int64_t>(blocks) * kOrderWarps, warp = block * kOrderWarps + warp_id();
  int32_t* own = staged + warp_id() * kShortCell;
  const int64_t cell = warp + (lane_id() & (warp_cells - 1)) * stride;  // lane i holds the i-th
  const int32_t own_first = cell < sort.cells ? sort.starts[cell] : 0;
  int32_t own_count = cell < sort.cells ? sort.starts[cell + 1] - own_first : 0;
  if (own_count > kShortCell) own_count = 0;
  MSP_NO_UNROLL
  for (int i = 0; i < warp_cells; ++i) {
    const int32_t first = shuffle(own_first, i), count = shuffle(own_count, i);
    const int most = converged_max(count);
    if (most <= (Entry::kWrites ? 0 : 1)) continue;
    if (most <= kLanes) {
      order_short_cell<1>(sort.order, first, count, own, entry);
    } else if (most <= 2 * kLanes) {
      order_short_cell<2>(sort.order, first, count, own, entry);
    } else if (most <= 4 * kLanes) {
      order_short_cell<4>(sort.order, first, count, own, entry);
    } else if constexpr (kShortCell > 4 * kLanes) {
      order_short_cell<kShortCell / kLanes>(sort.order, first, count, own, entry);
    }
  }
}

/// A block orders up to kStagedCell ids: warps sort runs of kShortCell, then every id finds its place by binary
/// searches in the other runs.
template <class Entry>
MSP_DEVICE void order_staged_cell(OrderShared& shared, const int32_t* placed, int32_t* order, int32_t first, int count,
                                  const Entry& entry) {
  constexpr int kItems = kShortCell / kLanes;
  const int t = static_cast<int>(threadIdx.x), runs = (count + kShortCell - 1) / kShortCell;
  for (int i = t; i < runs * kShortCell; i += kCellThreads) shared.ids[i] = i < count ? placed[first + i] : kNoId;
  MSP_SYNC_BLOCK();
  for (int run = warp_id(); run - warp_id() < runs; run += kOrderWarps) {  // as often for every warp
    int32_t ids[kItems];
    int32_t* own = shared.ids + (run < runs ? run : 0) * kShortCell + lane_id() * kItems;
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) ids[e] = run < runs ? own[e] : kNoId;
    bitonic_sort(ids);
    MSP_UNROLL
    for (int e = 0; e < kItems; ++e) {
      if (run < runs) own[e] = ids[e];
    }
  }
  MSP_SYNC_BLOCK();
  for (int i = t; i < runs * kShortCell; i += kCellThreads) {
    const int32_t id = shared.ids[i];
    if (id == kNoId) continue;
    int place = i % kShortCell;
    for (int run = 0; run < runs; ++run) {
      if (run == i / kShortCell) continue;
      const int32_t* other = shared.ids + run * kShortCell;
      int smaller = 0;
      MSP_UNROLL
      for (int half = kShortCell / 2; half > 0; half >>= 1) {
        if (other[smaller + half - 1] < id) smaller += half;
      }
      place += smaller + (other[smaller] < id ? 1 : 0);
    }
    order[first + place] = id;
    entry(first + place, id);
  }
  MSP_SYNC_BLOCK();
}

/// Any number of ids: a block looks through the keys for those of the cell, which come in ascending order.
template <class Entry>
MSP_DEVICE void order_by_search(OrderShared& shared, const CellSort& sort, int32_t cell, int32_t first,
                                const Entry& entry) {
  constexpr int kItems = 16;
  const int t = static_cast<int>(threadIdx.x);
  int32_t place = first;
  for (int64_t base = 0; base < sort.count; base += kItems * kCellThreads) {
    const int64_t own = base + t * kItems;
    uint32_t found = 0, total = 0;
    MSP_UNROLL
    for (int k = 0; k < kItems; k += 4) {
      int32_t keys[4] = {-1, -1, -1, -1};
      if (own + k < sort.count) load_keys(sort, own + k, keys);
      MSP_UNROLL
      for (int u = 0; u < 4; ++u) found |= keys[u] == cell ? 1u << (k + u) : 0u;
    }
    const uint32_t before = block_exclusive_sum<kCellThreads>(static_cast<uint32_t>(popcount(found)), shared.warp_sums,
                                                              total);
    int32_t at = place + static_cast<int32_t>(before);
    for (int k = 0; k < kItems; ++k) {
      if ((found >> k & 1u) == 0) continue;
      sort.order[at] = static_cast<int32_t>(own) + k;
      entry(at, static_cast<int32_t>(own) + k);
      ++at;
    }
    place += static_cast<int32_t>(total);
    MSP_SYNC_BLOCK();
  }
}

template <class Entry>
MSP_DEVICE void order_long_cells(OrderShared& shared, const CellSort& sort, const int32_t* placed, unsigned blocks,
                                 const Entry& entry) {
  const int cells = *sort.long_count;
  for (int i = static_cast<int>(blockIdx.x); i < cells; i += static_cast<int>(blocks)) {
    const int32_t cell = sort.long_cells[i], first = sort.starts[cell];
    const int count = sort.starts[cell + 1] - first;
    if (count <= kStagedCell) {
      order_staged_cell(shared, placed, sort.order, first, count, entry);
    } else {
      order_by_search(shared, sort, cell, first, entry);
    }
  }
}

/// The first `long_blocks` blocks take the long cells, the others the short ones.
template <class Entry>
MSP_KERNEL(kCellThreads, Entry::kWrites ? 5 : 6)
order_cells(const CellSort sort, unsigned long_blocks, int warp_cells, const Entry entry) {
  MSP_SHARED OrderShared shared;
  if (blockIdx.x < long_blocks) {
    order_long_cells(shared, sort, sort.order, long_blocks, entry);
  } else {
    order_short_cells(sort, static_cast<int>(blockIdx.x - long_blocks), static_cast<int>(gridDim.x - long_blocks),
                      warp_cells, shared.ids, entry);
  }
}

/// The same for few ids a cell: a thread per id counts the smaller ones.
template <class Entry>
MSP_KERNEL(kCellThreads, Entry::kWrites ? 5 : 6)
order_sparse_cells(const CellSort sort, const int32_t* placed, unsigned long_blocks, const Entry entry) {
  MSP_SHARED OrderShared shared;
  if (blockIdx.x < long_blocks) {
    order_long_cells(shared, sort, placed, long_blocks, entry);
    return;
  }
  const int64_t i = static_cast<int64_t>(blockIdx.x - long_blocks) * kCellThreads + static_cast<int>(threadIdx.x);
  if (i >= sort.starts[sort.cells]) return;
  const int32_t id = placed[i], cell = sort.keys[id], first = sort.starts[cell], last = sort.starts[cell + 1];
  if (last - first > kTinyCell) return;
  int32_t place = first;
  for (int32_t k = first; k < last; ++k) place += placed[k] < id ? 1 : 0;
  sort.order[place] = id;
  entry(place, id);
}

// ------------------------------------------------------------------------------------------------------------- launch

inline int64_t cell_sort_workspace_bytes(const CellSort& sort) { return CellSortWorkspace(sort, nullptr).bytes; }

inline unsigned cell_blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

inline const char* count_cells(const CellSort& sort, const CellSortWorkspace& w, stream_t stream) {
  const int64_t padded = (sort.cells + kStartCells - 1) / kStartCells * kStartCells;
  const char* error = zero_fill(w.counts, static_cast<size_t>(padded) * sizeof(uint32_t), stream);
  if (error) return error;
  const dim3 block(kCellThreads);
  if (sort.count == 0) {
    return zero_fill(sort.counters, static_cast<size_t>(sort.counter_words) * sizeof(int32_t), stream);
  }
  if (sort.grouped()) {
    const auto count = count_grouped_keys<void>;
    MSP_LAUNCH(count, dim3(cell_blocks(sort.count, kGroupKeys)), dim3(kGroupThreads), 0, stream, sort, w.counts, w.keys,
               w.ranks, w.ids);
  } else {
    const auto count = count_keys<void>;
    MSP_LAUNCH(count, dim3(cell_blocks(sort.count, 4 * kCellThreads)), block, 0, stream, sort, w.counts, w.ranks);
  }
  return launch_error();
}

template <class Visit>
const char* scan_cells(const CellSort& sort, const CellSortWorkspace& w, const Visit& visit, stream_t stream) {
  const int64_t tiles = tile_count<StartTiles>(sort.cells);
  const bool direct = sort.cells <= kDirectCells;
  if (!direct) {
    const auto reduce = scan_tile_sums<StartTiles>;
    const auto scan = scan_of_sums<StartTiles>;
    MSP_LAUNCH(reduce, dim3(static_cast<unsigned>(tiles)), dim3(StartTiles::kThreads), 0, stream, w.counts, w.sums,
               sort.cells);
    MSP_LAUNCH(scan, dim3(1), dim3(StartTiles::kThreads), 0, stream, w.sums, tiles);
  }
  const auto starts = cell_starts<Visit>;
  MSP_LAUNCH(starts, dim3(static_cast<unsigned>(tiles)), dim3(kStartThreads), 0, stream, sort, w.counts,
             direct ? nullptr : w.sums, visit);
  return launch_error();
}

template <class Entry>
const char* place_and_order(const CellSort& sort, const CellSortWorkspace& w, const Entry& entry, stream_t stream) {
  const dim3 block(kCellThreads);
  if (sort.grouped()) {
    const auto place = place_grouped_keys<void>;
    MSP_LAUNCH(place, dim3(cell_blocks(sort.count, kGroupKeys)), dim3(kGroupThreads), 0, stream, sort.starts, w.keys,
               w.ranks, w.ids, w.placed);
  } else {
    const auto place = place_keys<void>;
    MSP_LAUNCH(place, dim3(cell_blocks(sort.count, 4 * kCellThreads)), block, 0, stream, sort, w.ranks, w.placed);
  }
  const int64_t capacity = sort.long_capacity();
  const unsigned longs = capacity < kLongBlocks ? static_cast<unsigned>(capacity) : kLongBlocks;
  if (sort.sparse()) {
    const auto order = order_sparse_cells<Entry>;
    MSP_LAUNCH(order, dim3(longs + cell_blocks(sort.count, kCellThreads)), block, 0, stream, sort, w.placed, longs,
               entry);
  } else {
    const auto order = order_cells<Entry>;
    const int warp_cells = sort.cells < kManyCells ? 2 : 4;  // a power of two
    MSP_LAUNCH(order, dim3(longs + cell_blocks(sort.cells, kOrderWarps * warp_cells)), block, 0, stream, sort, longs,
               warp_cells, entry);
  }
  return launch_error();
}

/// Sorts. `visit` sees the starts, see NoVisit; `entry` every id with its place, see NoEntry. `workspace` has
/// cell_sort_workspace_bytes(sort) bytes, 16-byte aligned.
template <class Visit, class Entry>
const char* cell_sort(const CellSort& sort, void* workspace, const Visit& visit, const Entry& entry, stream_t stream) {
  const CellSortWorkspace w(sort, workspace);
  const char* error = count_cells(sort, w, stream);
  if (!error) error = scan_cells(sort, w, visit, stream);
  if (!error && sort.count > 0) error = place_and_order(sort, w, entry, stream);
  return error;
}

}  // namespace muspace
