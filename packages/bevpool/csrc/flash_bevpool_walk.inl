// SPDX-License-Identifier: Apache-2.0
// Backward, route "block_sorted" of flash_bevpool and flash_bevpool_sca: a block sorts its samples by cell (the square
// between four pixel centres) in shared memory. Groups of lanes walk equal shares of the sorted list: the four corner
// rows of the features and the four sums of their gradients stay in registers while the cell does not change, so rows
// are loaded once per cell and few sums reach global memory. Correctness does not depend on the order, only the number
// of additions does.
#pragma once

#include "flash_bevpool_tables.inl"

namespace muspace::bevpool {

constexpr int kOwnerBits = 10;
constexpr int64_t kMaxWalkCells = int64_t{1} << (32 - kOwnerBits);

/// kSamples at a time, sorted by kThreads threads, up to kCounters cells told apart.
template <int kSamples_, int kThreads_, int kCounters_>
struct SortPlan {
  static constexpr int kSamples = kSamples_, kThreads = kThreads_, kCounters = kCounters_;
  static constexpr int kPerThread = kSamples / kThreads, kWarps = kThreads / kLanes;
  static_assert(kSamples % kThreads == 0 && kSamples < 65536, "places are 16 bits");
};

struct alignas(16) WalkRecord {
  float fx, fy, weight;
  uint32_t tag;  // cell << kOwnerBits | owner; a cell is row << column_bits | column, the owner names a gradient row
  MSP_DEVICE int cell() const { return static_cast<int>(tag >> kOwnerBits); }
  MSP_DEVICE int owner() const { return static_cast<int>(tag & ((1u << kOwnerBits) - 1u)); }
};
struct alignas(16) CornerDots {
  float at[4];  // inner products of the output gradient with the corners
};

template <class Plan>
struct SortShared {
  union {
    uint32_t counters[Plan::kCounters / 2];  // two 16-bit counters a word, while sorting
    WalkRecord records[Plan::kSamples + 8];  // then the sorted records
    CornerDots dots[Plan::kSamples + 8];     // which inner products may overwrite
  };
  int box[4];  // columns and rows, least and largest
  int warp_sums[Plan::kWarps];
};

/// Cells of a bounding box, made coarser until they fit the counters.
struct Buckets {
  int left, top, columns, shift_x, shift_y, count;
  MSP_DEVICE static Buckets of(const int (&box)[4], int limit) {
    const int width = box[1] - box[0], height = box[3] - box[2];
    Buckets b{box[0], box[2], 0, 0, 0, 0};
    const auto fits = [&] {
      return static_cast<int64_t>((width >> b.shift_x) + 1) * ((height >> b.shift_y) + 1) <= limit;
    };
    while (!fits()) {
      if (width >> b.shift_x) {
        ++b.shift_x;
      } else {
        ++b.shift_y;
      }
    }
    b.columns = (width >> b.shift_x) + 1;
    b.count = b.columns * ((height >> b.shift_y) + 1);
    return b;
  }
  MSP_DEVICE int operator()(int cell, int column_bits) const {
    const int x = (cell & ((1 << column_bits) - 1)) - left, y = (cell >> column_bits) - top;
    return (y >> shift_y) * columns + (x >> shift_x);
  }
};

/// Threads 0 .. 3 of the block; a barrier has to follow.
template <class Plan>
MSP_DEVICE void reset_box(SortShared<Plan>& shared) {
  if (threadIdx.x < 4) shared.box[threadIdx.x] = threadIdx.x % 2 ? -1 : INT32_MAX;
}

/// Widens the box to this thread's records. place[k] < 0: the record takes no part.
template <class Plan>
MSP_DEVICE void widen_box(SortShared<Plan>& shared, const WalkRecord (&own)[Plan::kPerThread],
                          const int (&place)[Plan::kPerThread], int column_bits) {
  int left = INT32_MAX, right = -1, top = INT32_MAX, bottom = -1;
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (place[k] < 0) continue;
    const int x = own[k].cell() & ((1 << column_bits) - 1), y = own[k].cell() >> column_bits;
    left = x < left ? x : left, right = x > right ? x : right;
    top = y < top ? y : top, bottom = y > bottom ? y : bottom;
  }
  left = warp_min(left), right = warp_max(right), top = warp_min(top), bottom = warp_max(bottom);
  if (lane_id() == 0) {
    atomic_min(&shared.box[0], left);
    atomic_max(&shared.box[1], right);
    atomic_min(&shared.box[2], top);
    atomic_max(&shared.box[3], bottom);
  }
}

/// Exclusive scan of the packed 16-bit counters of the first `words` words; returns their sum.
template <class Plan>
MSP_DEVICE int scan_counters(SortShared<Plan>& shared, int words) {
  const int t = static_cast<int>(threadIdx.x), per_thread = (words + Plan::kThreads - 1) / Plan::kThreads;
  const int begin = t * per_thread < words ? t * per_thread : words;
  const int end = begin + per_thread < words ? begin + per_thread : words;
  int sum = 0;
  for (int i = begin; i < end; ++i)
    sum += static_cast<int>((shared.counters[i] & 0xffffu) + (shared.counters[i] >> 16));
  const int inclusive = warp_inclusive_sum(sum);
  if (lane_id() == kLanes - 1) shared.warp_sums[warp_id()] = inclusive;
  MSP_SYNC_BLOCK();
  int base = inclusive - sum, total = 0;
  MSP_UNROLL
  for (int i = 0; i < Plan::kWarps; ++i) {
    if (i < warp_id()) base += shared.warp_sums[i];
    total += shared.warp_sums[i];
  }
  for (int i = begin; i < end; ++i) {
    const uint32_t pair = shared.counters[i];
    const uint32_t low = static_cast<uint32_t>(base), high = low + (pair & 0xffffu);
    base = static_cast<int>(high + (pair >> 16));
    shared.counters[i] = low | (high << 16);
  }
  return total;
}

/// Counting sort of the block's records by cell; returns how many take part and puts each at place[k]. The box has to
/// be complete, with a barrier behind it. A barrier has to follow.
template <class Plan>
MSP_DEVICE int sort_records(SortShared<Plan>& shared, const WalkRecord (&own)[Plan::kPerThread],
                            int (&place)[Plan::kPerThread], int column_bits) {
  const Buckets buckets = Buckets::of(shared.box, Plan::kCounters);
  const int words = (buckets.count + 1) / 2;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += Plan::kThreads) shared.counters[i] = 0;
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (place[k] < 0) continue;
    const int bucket = buckets(own[k].cell(), column_bits), half = (bucket & 1) * 16;
    place[k] = static_cast<int>((atomic_add(&shared.counters[bucket >> 1], 1u << half) >> half) & 0xffffu);
  }
  MSP_SYNC_BLOCK();
  const int total = scan_counters(shared, words);
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (place[k] < 0) continue;
    const int bucket = buckets(own[k].cell(), column_bits), half = (bucket & 1) * 16;
    place[k] += static_cast<int>((shared.counters[bucket >> 1] >> half) & 0xffffu);
  }
  MSP_SYNC_BLOCK();  // the records take the counters' memory
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (place[k] >= 0) shared.records[place[k]] = own[k];
  }
  return total;
}

/// Where a cell lies: corners 2 * (lower row) + (right column).
struct CellPlace {
  int pixel;  // of corner 0, which need not exist
  int down;   // pixels from a row to the next
  int mask;   // which corners exist
};

/// What a lane keeps while it walks: the corners of the current cell, and which of them exist.
template <class Rows, class T>
struct CellWalk {
  const T* feats;     // of the lane's first channel
  float* grad_feats;  // likewise
  bool adds;          // whether the gradient of the features is wanted
  uint32_t row_bytes, grad_row_bytes;
  int channels_left;
  int cell = -2;
  CellPlace place{0, 0, 0};
  float sum[4][Rows::kPerLane] = {}, corner[4][Rows::kPerLane] = {};

  MSP_DEVICE uint32_t pixel(int k) const {
    return static_cast<uint32_t>(place.pixel + (k & 1 ? 1 : 0) + (k & 2 ? place.down : 0));
  }
  MSP_DEVICE void flush(int k) {
    if (place.mask >> k & 1) add_row<Rows>(row_at(grad_feats, pixel(k), grad_row_bytes), channels_left, sum[k]);
  }
  MSP_DEVICE void load(int k) {
    if (place.mask >> k & 1) load_row<Rows>(row_at(feats, pixel(k), row_bytes), channels_left, corner[k]);
  }
  /// Moves on. To the right neighbour: the right column becomes the left one.
  MSP_DEVICE void enter(int next, const CellPlace& next_place) {
    const bool neighbour = next == cell + 1;
    if (adds) {
      flush(0);
      flush(2);
      if (!neighbour) {
        flush(1);
        flush(3);
      }
    }
    cell = next, place = next_place;
    MSP_UNROLL
    for (int c = 0; c < Rows::kPerLane; ++c) {
      MSP_UNROLL
      for (int row = 0; row < 4; row += 2) {
        sum[row][c] = neighbour ? sum[row + 1][c] : 0.f;
        corner[row][c] = neighbour ? corner[row + 1][c] : 0.f;
        sum[row + 1][c] = corner[row + 1][c] = 0.f;
      }
    }
    if (!neighbour) {
      load(0);
      load(2);
    }
    load(1);
    load(3);
  }
  MSP_DEVICE void flush_all() {
    if (!adds) return;
    MSP_UNROLL
    for (int k = 0; k < 4; ++k) flush(k);
  }
};

/// Corner weights for a walk, fewer operations than bilinear_weights().
MSP_DEVICE CornerWeights<float> walk_weights(float fx, float fy) {
  const float w11 = fx * fy, w01 = fx - w11, w10 = fy - w11;
  return {{1.f - fx - w10, w01, w10, w11}};
}

/// A group's share of `total` records. Odd lengths: the groups of a warp read different banks. All groups take `length`
/// steps, those from `end` on are idle.
struct WalkShare {
  int begin, end, length;
  MSP_DEVICE WalkShare(int total, int group, int groups) {
    length = ((total + groups - 1) / groups) | 1;
    begin = group * length < total ? group * length : total;
    end = begin + length < total ? begin + length : total;
  }
};

}  // namespace muspace::bevpool
