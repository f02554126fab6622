// SPDX-License-Identifier: Apache-2.0
// Layout of a plan on device backends, in words:
//
//   counters[16]                heavy and light items, long cells; from word 4 the frustum, see FrustumWords
//   starts[cells + 1]           starts[c] .. starts[c + 1] are the entries of cell c
//   items                       portions of work for the sums, see WorkItem
//   long_cells                  cells with more entries than CellSort::long_limit(), in no particular order
//   order[points]               the point of every entry
//   entries[2 * points]         with weights: {row, weight index} of every entry; unused in frustum order
//
// Every part begins at a multiple of four words. Only the first starts[cells] entries are written.
#pragma once
#include <cstdint>

#include "cell_pool.h"
#include "muspace/cell_sort.h"

namespace muspace::bevpool {

constexpr int kPlanCounters = 16, kTileCells = 32;

/// Neighbouring cells of one tile and their entries. The entries before the last cell are at most the plan's portion.
struct alignas(16) WorkItem {
  int32_t first_cell, cells, first_entry, entries;
};

struct PlanEntry {
  int32_t row, weight;
};

/// n / divisor of numbers below 2^31 by a product: divisors that are not known when compiled.
struct Quotient {
  uint32_t factor, shift;

  static Quotient by(int64_t divisor) {
    if (divisor >= int64_t{1} << 31) return {0, 32};  // always 0
    uint32_t bits = 0;
    while (int64_t{1} << bits < divisor) ++bits;
    return {static_cast<uint32_t>((uint64_t{1} << (31 + bits)) / static_cast<uint64_t>(divisor) + 1), 31 + bits};
  }
  MSP_HD uint32_t operator()(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * factor >> shift);
  }
};

/// Rows and weights by frustum order: point = (image * depth_bins + bin) * pixels + pixel reads the row image * pixels
/// + pixel and its own weight, so that such a plan needs no entries. Eight words of the plan.
struct alignas(16) FrustumWords {
  int32_t used;  // 0: the plan has entries
  uint32_t pixels;
  Quotient by_image, by_pixels;
  int32_t unused[2];

  MSP_HD uint32_t row(uint32_t point) const {
    return by_image(point) * pixels + (point - by_pixels(point) * pixels);
  }
};
constexpr int kFrustumWord = 4;

/// Entries of a work item, as a power of two: few where there are enough items all the same, but enough of them to fill
/// the device.
inline int item_log2(int64_t points, int64_t cells, bool weighted) {
#if defined(MSP_BACKEND_EMU)
  return points < 2000 ? 5 : weighted || cells < 64 ? 7 : 8;
#else
  return points < 250000 ? 8 : weighted || cells < 100000 ? 9 : 11;
#endif
}

struct PlanLayout {
  int32_t *counters, *starts, *long_cells, *order;
  WorkItem* items;
  int64_t item_capacity;
  PlanEntry* entries;  // null without weights
  int64_t words;

  PlanLayout(int64_t points, int64_t cells, bool weighted, int32_t* base) : words(0), base_(base) {
    item_capacity = (cells + kTileCells - 1) / kTileCells + (points >> item_log2(points, cells, weighted));
    counters = take(kPlanCounters);
    starts = take(cells + 1);
    items = reinterpret_cast<WorkItem*>(take(4 * item_capacity));
    CellSort sort{};
    sort.count = points, sort.cells = cells;
    long_cells = take(sort.long_capacity());
    order = take(points);
    entries = weighted ? reinterpret_cast<PlanEntry*>(take(2 * points)) : nullptr;
  }

 private:
  int32_t* take(int64_t count) {
    int32_t* begin = base_ ? base_ + words : nullptr;
    words += (count + 3) / 4 * 4;
    return begin;
  }
  int32_t* base_;
};

}  // namespace muspace::bevpool
