// SPDX-License-Identifier: Apache-2.0
// Plans on device backends: the cell sort, cut into work items on the way.
#include "cell_plan_layout.h"

namespace muspace::bevpool {
namespace {

/// Cuts tiles of 32 cells where (first entry - first entry of the tile) passes a multiple of the portion, so without a
/// serial walk.
/// Items of more than half a portion grow from the front of the list and start first, the others from its back.
struct CutItems {
  struct Shared {
    int counts[2], places[2];
  };
  WorkItem* items;
  int64_t capacity;
  int32_t* counters;
  int64_t cells;
  int portion_log2;
  FrustumWords frustum;

  static constexpr int kWarps = kStartThreads / kLanes, kTiles = kStartCells / kTileCells / kWarps;
  static_assert(kTileCells == kLanes, "a lane looks at a cell of a tile");

  MSP_DEVICE void operator()(const uint32_t* starts, int64_t first_cell, Shared& shared) const {
    const int t = static_cast<int>(threadIdx.x), lane = lane_id();
    WorkItem item[kTiles];
    int place[kTiles];
    bool heavy[kTiles];
    if (t < 2) shared.counts[t] = 0;
    if (t == 0 && blockIdx.x == 0) *reinterpret_cast<FrustumWords*>(counters + kFrustumWord) = frustum;
    MSP_SYNC_BLOCK();
    MSP_UNROLL
    for (int k = 0; k < kTiles; ++k) {
      const int within = (warp_id() * kTiles + k) * kTileCells;
      const uint32_t* tile = starts + within;
      const uint32_t bin = (tile[lane] - tile[0]) >> portion_log2, before = shuffle_up(bin, 1);
      const bool head = first_cell + within < cells && (lane == 0 || bin != before);
      const uint32_t heads = ballot(head), after = lane == kLanes - 1 ? 0u : heads >> (lane + 1);
      const int next = after != 0 ? lane + 1 + popcount((after & (~after + 1u)) - 1u) : kTileCells;
      const int64_t left = cells - first_cell - within;
      item[k].first_cell = static_cast<int32_t>(first_cell) + within + lane;
      item[k].cells = static_cast<int32_t>(next < left ? next : left) - lane;
      item[k].first_entry = static_cast<int32_t>(tile[lane]);
      item[k].entries = static_cast<int32_t>(tile[next] - tile[lane]);
      heavy[k] = item[k].entries > 1 << (portion_log2 - 1);
      place[k] = head ? atomic_add(&shared.counts[heavy[k] ? 0 : 1], 1) : -1;
    }
    MSP_SYNC_BLOCK();
    if (t < 2) shared.places[t] = atomic_add(counters + t, shared.counts[t]);
    MSP_SYNC_BLOCK();
    MSP_UNROLL
    for (int k = 0; k < kTiles; ++k) {
      if (place[k] < 0) continue;
      const int64_t i = shared.places[heavy[k] ? 0 : 1] + place[k];
      items[heavy[k] ? i : capacity - 1 - i] = item[k];
    }
  }
};

/// Writes {row, weight index} of an entry.
struct WriteEntry {
  static constexpr bool kWrites = true;
  PlanEntry* entries;
  const int32_t *rows, *weights;

  MSP_DEVICE void operator()(int32_t place, int32_t point) const {
    Words<8> words;
    words.word[0] = static_cast<uint32_t>(rows[point]);
    words.word[1] = static_cast<uint32_t>(weights ? weights[point] : point);
    *reinterpret_cast<Words<8>*>(entries + place) = words;
  }
};

CellSort sort_of(const PlanLayout& layout, const int32_t* keys, int64_t points, int64_t cells) {
  CellSort sort{};
  sort.keys = keys;
  sort.count = points, sort.cells = cells;
  sort.starts = layout.starts, sort.order = layout.order;
  sort.counters = layout.counters, sort.counter_words = kPlanCounters;
  sort.long_count = layout.counters ? layout.counters + 2 : nullptr;
  sort.long_cells = layout.long_cells;
  return sort;
}

}  // namespace

int64_t plan_words(int64_t points, int64_t cells, bool weighted) {
  return PlanLayout(points, cells, weighted, nullptr).words;
}

int64_t plan_workspace_bytes(int64_t points, int64_t cells, bool weighted) {
  return cell_sort_workspace_bytes(sort_of(PlanLayout(points, cells, weighted, nullptr), nullptr, points, cells));
}

Status launch_plan(const int32_t* keys, int64_t points, int64_t cells, const PointMap& map, int32_t* plan,
                   void* workspace, const Place& place) {
  if (map.rows == nullptr && map.depth_bins > 0 && (map.weights || map.pixels <= 0 || map.pixels >> 31)) {
    return failure(kValueError, "cell_plan: frustum order needs a number of pixels below 2^31 and no weight ranks");
  }
  if (cells == 0) return success();
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  const PlanLayout layout(points, cells, map.weighted(), plan);
  const CellSort sort = sort_of(layout, keys, points, cells);
  FrustumWords frustum{};
  if (map.rows == nullptr && map.depth_bins > 0) {
    frustum.used = 1, frustum.pixels = static_cast<uint32_t>(map.pixels);
    frustum.by_image = Quotient::by(map.depth_bins * map.pixels), frustum.by_pixels = Quotient::by(map.pixels);
  }
  const CutItems cut{layout.items, layout.item_capacity, layout.counters,
                     cells,        item_log2(points, cells, map.weighted()), frustum};
  const WriteEntry write{layout.entries, map.rows, map.weights};
  const char* error = map.rows ? cell_sort(sort, workspace, cut, write, stream)
                               : cell_sort(sort, workspace, cut, NoEntry{}, stream);
  return error ? failure(kRuntimeError, "cell_plan: %s", error) : success();
}

}  // namespace muspace::bevpool
