// SPDX-License-Identifier: Apache-2.0
// Cells of the points, on the cpu.
//
// Intervals as voxel pooling callers prepare them ascend and are disjoint; they are worked on side by side. Any other
// order takes one pass on one thread that visits every point once, however often the intervals cover it.
#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "cell_pool.h"
#include "muspace/cpu.h"
#include "muspace/cpu_call.h"
#include "muspace/parallel.h"

namespace muspace::bevpool {
namespace {

constexpr int64_t kPointBlock = 16384;
constexpr int64_t kIntervalBlock = 1024;

struct PointRange {
  int64_t first, last;
};

int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }

// Products and sums wrap instead of overflowing: a rule may hold any numbers, and keys outside [0, cells) are dropped.
template <class Integer, int kColumns>
MSP_CPU_INLINE void key_run(const Integer* coords, const uint8_t* mask, const KeyRule& rule, uint64_t offset,
                            int64_t count, int32_t* keys) {
  const uint64_t cells = static_cast<uint64_t>(rule.cells);
  for (int64_t i = 0; i < count; ++i) {
    uint64_t key = offset;
    bool inside = true;
    for (int k = 0; k < kColumns; ++k) {
      const int64_t coordinate = coords[i * kColumns + k];
      inside &= coordinate >= 0;
      inside &= coordinate < rule.bounds[k];
      key += static_cast<uint64_t>(coordinate) * static_cast<uint64_t>(rule.strides[k]);
    }
    inside &= key < cells;
    keys[i] = inside ? static_cast<int32_t>(key) : -1;
  }
  if (mask == nullptr) return;
  for (int64_t i = 0; i < count; ++i) keys[i] = mask[i] != 0 ? keys[i] : -1;
}

template <class Integer, int kColumns>
MSP_CPU_INLINE void key_points(const Coordinates& coords, const KeyRule& rule, const PointRange& range, int32_t* keys) {
  const Integer* const data = static_cast<const Integer*>(coords.data);
  const int64_t run = std::max<int64_t>(rule.run, 1), count = std::max<int64_t>(rule.count, 1);
  for (int64_t i = range.first; i < range.last;) {
    const int64_t owner = i / run, left = (owner + 1) * run - i, n = std::min(left, range.last - i);
    const uint64_t offset = static_cast<uint64_t>(owner % count) * static_cast<uint64_t>(rule.run_stride);
    key_run<Integer, kColumns>(data + i * kColumns, coords.mask == nullptr ? nullptr : coords.mask + i, rule, offset, n,
                               keys + i);
    i += n;
  }
}

#define MSP_CELL_KEYS_CPU_INSTANCE(suffix, Integer, columns)                                                  \
  MSP_CPU_CLONES void key_points_##suffix##columns(const Coordinates& coords, const KeyRule& rule,            \
                                                   const PointRange& range, int32_t* keys) {                  \
    key_points<Integer, columns>(coords, rule, range, keys);                                                  \
  }
#define MSP_CELL_KEYS_CPU_INSTANCES(suffix, Integer) \
  MSP_CELL_KEYS_CPU_INSTANCE(suffix, Integer, 1)     \
  MSP_CELL_KEYS_CPU_INSTANCE(suffix, Integer, 2)     \
  MSP_CELL_KEYS_CPU_INSTANCE(suffix, Integer, 3)     \
  MSP_CELL_KEYS_CPU_INSTANCE(suffix, Integer, 4)
MSP_CELL_KEYS_CPU_INSTANCES(i32_, int32_t)
MSP_CELL_KEYS_CPU_INSTANCES(i64_, int64_t)
#undef MSP_CELL_KEYS_CPU_INSTANCES
#undef MSP_CELL_KEYS_CPU_INSTANCE

using KeyPoints = void (*)(const Coordinates&, const KeyRule&, const PointRange&, int32_t*);
constexpr KeyPoints kKeyPoints[2][kMaxColumns] = {
    {key_points_i32_1, key_points_i32_2, key_points_i32_3, key_points_i32_4},
    {key_points_i64_1, key_points_i64_2, key_points_i64_3, key_points_i64_4}};

// The points of interval i, or none, with the fault that this is.
PointRange interval_range(const Intervals& in, int64_t i, int* faults) {
  const int64_t first = in.starts[i], length = in.lengths[i];
  if (first < 0 || length < 0 || first + length > in.points) {
    *faults |= kInterval;
    return PointRange{0, 0};
  }
  return PointRange{first, first + length};
}

// Key and row of a point that belongs to the interval whose first point has the rank `cell`.
void key_of_point(const Intervals& in, int64_t point, int32_t cell, int32_t* keys, int32_t* row_keys, int* faults) {
  const int32_t rank = in.ranks_bev[point], row = in.ranks_feat[point], weight = in.ranks_depth[point];
  int fault = 0;
  if (rank < 0 || rank >= in.cells || rank != cell) fault |= kBevRank;
  if (row < 0 || row >= in.rows) fault |= kFeatRank;
  if (weight < 0 || weight >= in.weights) fault |= kDepthRank;
  *faults |= fault;
  keys[point] = fault == 0 ? rank : -1;
  row_keys[point] = fault == 0 ? row : -1;
}

void clear_keys(int64_t points, int64_t threads, int32_t* keys, int32_t* row_keys) {
  parallel_for(blocks_of(points, kPointBlock), threads, [&](int64_t block) {
    const int64_t first = block * kPointBlock, last = std::min(points, first + kPointBlock);
    std::fill(keys + first, keys + last, -1);
    std::fill(row_keys + first, row_keys + last, -1);
  });
}

bool ascending_and_disjoint(const Intervals& in) {
  int64_t end = 0;
  for (int64_t i = 0; i < in.intervals; ++i) {
    int fault = 0;
    const PointRange range = interval_range(in, i, &fault);
    if (range.first == range.last) continue;
    if (range.first < end) return false;
    end = range.last;
  }
  return true;
}

int keys_side_by_side(const Intervals& in, int64_t threads, int32_t* keys, int32_t* row_keys) {
  std::atomic<int> faults{0};
  clear_keys(in.points, threads, keys, row_keys);
  parallel_for(blocks_of(in.intervals, kIntervalBlock), threads, [&](int64_t block) {
    int found = 0;
    const int64_t last = std::min(in.intervals, (block + 1) * kIntervalBlock);
    for (int64_t i = block * kIntervalBlock; i < last; ++i) {
      const PointRange range = interval_range(in, i, &found);
      for (int64_t k = range.first; k < range.last; ++k) {
        key_of_point(in, k, in.ranks_bev[range.first], keys, row_keys, &found);
      }
    }
    faults.fetch_or(found, std::memory_order_relaxed);
  });
  return faults.load();
}

// A point belongs to the first interval that covers it. While the intervals are walked, row_keys[point] is the first
// point of the interval that took it, and keys[point] leads from a taken point towards the next free one.
int keys_in_order(const Intervals& in, int32_t* keys, int32_t* row_keys) {
  const int32_t points = static_cast<int32_t>(in.points);
  int faults = 0;
  int32_t* const next = keys;  // keys are written last
  const auto free_from = [&](int32_t point) {
    int32_t end = point;
    while (end < points && next[end] != end) end = next[end];
    while (point < end) {
      const int32_t step = next[point];
      next[point] = end;
      point = step;
    }
    return end;
  };
  for (int32_t k = 0; k < points; ++k) next[k] = k, row_keys[k] = -1;
  int64_t covered = 0, taken = 0;
  for (int64_t i = 0; i < in.intervals; ++i) {
    const PointRange range = interval_range(in, i, &faults);
    covered += range.last - range.first;
    for (int32_t k = free_from(static_cast<int32_t>(range.first)); k < range.last; k = free_from(k)) {
      row_keys[k] = static_cast<int32_t>(range.first);
      next[k] = k + 1;
      ++taken;
    }
  }
  if (covered > taken) faults |= kOverlap;
  for (int64_t k = 0; k < in.points; ++k) {
    if (row_keys[k] < 0) {
      keys[k] = -1;
    } else {
      key_of_point(in, k, in.ranks_bev[row_keys[k]], keys, row_keys, &faults);
    }
  }
  return faults;
}

}  // namespace

Status launch_cell_keys(const Coordinates& coords, const KeyRule& rule, int32_t* keys, const Place& place) {
  return cpu::guarded("cell_keys", [&] {
    if (rule.columns < 1 || rule.columns > kMaxColumns) throw std::invalid_argument("expected 1 to 4 columns");
    if (rule.cells < 0 || rule.cells > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument("expected fewer than 2^31 cells");
    }
    cpu::prefer_huge_pages(keys, coords.points * static_cast<int64_t>(sizeof(int32_t)));
    const KeyPoints task = kKeyPoints[coords.wide ? 1 : 0][rule.columns - 1];
    parallel_for(blocks_of(coords.points, kPointBlock), place.ctx, [&](int64_t block) {
      const int64_t first = block * kPointBlock;
      task(coords, rule, PointRange{first, std::min(coords.points, first + kPointBlock)}, keys);
    });
  });
}

Status launch_interval_keys(const Intervals& intervals, int32_t* keys, int32_t* row_keys, int32_t* faults,
                            const Place& place) {
  return cpu::guarded("interval_keys", [&] {
    *faults = ascending_and_disjoint(intervals) ? keys_side_by_side(intervals, place.ctx, keys, row_keys)
                                                : keys_in_order(intervals, keys, row_keys);
  });
}

}  // namespace muspace::bevpool
