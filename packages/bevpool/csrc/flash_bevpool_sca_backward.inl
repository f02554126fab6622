// SPDX-License-Identifier: Apache-2.0
// Backward, route "block_sorted": a block takes a tile of queries in one level and head. It finds the (query, hit
// camera) pairs, sorts the samples of as many pairs as fit by cell of the level, walks them (see
// flash_bevpool_walk.inl), and adds the cameras' gradients of offsets and weights per query.
#pragma once

#include "flash_bevpool_sca_tables.inl"
#include "flash_bevpool_walk.inl"

namespace muspace::bevpool {

constexpr int kMaxSortedCameras = 32;  // a bit each

/// kTile queries, in strips of 2^kStripLog2 rows.
template <class Rows_, class Sort_, int kTile_, int kBlocks_, int kStripLog2_ = 4>
struct ScaSortPlan {
  using Rows = Rows_;
  using Sort = Sort_;
  static constexpr int kTile = kTile_, kBlocks = kBlocks_, kStripLog2 = kStripLog2_;
  static constexpr int kMaxPairs = Sort::kSamples / 4;  // with fewer than 4 points a list is not filled
  static_assert(kTile <= Sort::kThreads && kMaxPairs <= 1 << kOwnerBits, "a thread per query, a pair is an owner");
};

template <class Plan>
struct ScaBackwardShared {
  SortShared<typename Plan::Sort> sort;
  uint16_t places[Plan::Sort::kSamples];  // place in the sorted list, kNoPlace if the sample takes no part
  uint16_t pairs[Plan::kMaxPairs];        // query of the tile << 5 | camera
  int pair_queries[Plan::kMaxPairs];      // the query's number
  // of a query
  uint32_t hits[Plan::kTile];       // a bit per camera
  int first_pair[Plan::kTile + 1];  // number of its first pair in the tile
  int queries[Plan::kTile];         // its number
  float centres[Plan::kTile][2];    // x and y of its pillar
  float scales[Plan::kTile];        // camera_scale()
  // of a camera
  float matrices[kMaxSortedCameras][12];
  int found[kMaxSortedCameras];    // whether it hits in the tile
  int slots[kMaxSortedCameras];    // its number among those that do
  int cameras[kMaxSortedCameras];  // of a slot
  uint32_t scan[Plan::Sort::kWarps];
};

constexpr uint16_t kNoPlace = 0xffff;

/// Divisions of a call.
struct ScaDivisors {
  Divisor points, anchors;
};

/// A block's position and level.
template <class Plan>
struct ScaTile {
  int64_t image;
  int head, level_index, first_query, queries, column_bits, stack;
  ScaLevel level;
  template <class T, class Array>
  MSP_DEVICE explicit ScaTile(const ScaArguments<T, Array>& a) {
    head = static_cast<int>(blockIdx.y) / a.level_count;
    level_index = static_cast<int>(blockIdx.y) - head * a.level_count;
    image = blockIdx.z;
    first_query = static_cast<int>(blockIdx.x) * Plan::kTile;
    queries = a.queries() - first_query < Plan::kTile ? a.queries() - first_query : Plan::kTile;
    level = a.levels[level_index];
    stack = level.height + 1;
    column_bits = 0;
    while (level.width >> column_bits) ++column_bits;
  }
  /// Number of the query's first sample in this level.
  template <class T, class Array>
  MSP_DEVICE int64_t first_sample(const ScaArguments<T, Array>& a, int query) const {
    return (((image * a.queries() + query) * a.heads + head) * a.level_count + level_index) * a.points;
  }
};

/// Numbers of the pairs of the tile's queries, slots of the cameras. Barriers are part of it.
template <class Plan, class T, class Array>
MSP_DEVICE void find_pairs(ScaBackwardShared<Plan>& shared, const ScaArguments<T, Array>& a, const ScaTile<Plan>& tile,
                           const uint32_t* all_hits) {
  constexpr int kThreads = Plan::Sort::kThreads;
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < a.cameras * 12; i += kThreads) shared.matrices[i / 12][i % 12] = a.matrix(tile.image, 0)[i];
  if (t < kMaxSortedCameras) shared.found[t] = 0;
  MSP_SYNC_BLOCK();
  uint32_t hits = 0;
  if (t < tile.queries) {
    const PillarCell cell = strip_cell(a.x_cells, a.y_cells, tile.first_query + t, Plan::kStripLog2);
    const int query = cell.y * a.x_cells + cell.x;
    hits = all_hits[tile.image * a.queries() + query];
    shared.queries[t] = query;
    shared.hits[t] = hits;
    shared.centres[t][0] = cell_centre(a.geometry.x_min, a.geometry.x_step, cell.x);
    shared.centres[t][1] = cell_centre(a.geometry.y_min, a.geometry.y_step, cell.y);
    shared.scales[t] = camera_scale<float>(popcount(hits), a.average);
    for (uint32_t left = hits; left != 0; left &= left - 1u) shared.found[lowest_bit(left)] = 1;
  }
  const int own = popcount(hits), inclusive = warp_inclusive_sum(own);
  if (lane_id() == kLanes - 1) shared.scan[warp_id()] = static_cast<uint32_t>(inclusive);
  MSP_SYNC_BLOCK();
  int base = 0;
  for (int warp = 0; warp < warp_id(); ++warp) base += static_cast<int>(shared.scan[warp]);
  if (t < tile.queries) {
    shared.first_pair[t] = base + inclusive - own;
    if (t == tile.queries - 1) shared.first_pair[tile.queries] = base + inclusive;
  }
  if (t < a.cameras && shared.found[t] != 0) {
    int slot = 0;
    for (int camera = 0; camera < t; ++camera) slot += shared.found[camera];
    shared.slots[t] = slot;
    shared.cameras[slot] = t;
  }
  MSP_SYNC_BLOCK();
}

/// Where a sample of query `within` of the tile lies.
template <class Plan, class T, class Array>
MSP_DEVICE LevelSample<float> locate_sample(const ScaBackwardShared<Plan>& shared, const ScaArguments<T, Array>& a,
                                            const ScaTile<Plan>& tile, const ScaDivisors& by, int within, int camera,
                                            int point, const float (&offset)[2]) {
  const Column<float> column =
      project_column(shared.matrices[camera], shared.centres[within][0], shared.centres[within][1]);
  const float z = a.z_anchors[point - by.anchors.quotient(point) * a.anchors];
  return locate_point(anchor_reference(a.geometry, column, z), offset[0], offset[1], tile.level.height,
                      tile.level.width);
}

/// Sorts the samples of `pairs` pairs; returns how many take part.
template <class Plan, class T, class Array>
MSP_DEVICE int sort_pairs(ScaBackwardShared<Plan>& shared, const ScaArguments<T, Array>& a, const ScaTile<Plan>& tile,
                          const ScaDivisors& by, int pairs) {
  using Sort = typename Plan::Sort;
  WalkRecord own[Sort::kPerThread];
  int place[Sort::kPerThread];
  MSP_UNROLL
  for (int k = 0; k < Sort::kPerThread; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * Sort::kThreads, pair = by.points.quotient(i);
    own[k] = {};
    place[k] = -1;
    if (pair >= pairs) continue;
    const int entry = shared.pairs[pair], within = entry >> 5, camera = entry & 31, point = i - pair * a.points;
    float offset[2], weight;
    a.samples.load(tile.first_sample(a, shared.queries[within]) + point, offset, weight);
    const LevelSample<float> sample = locate_sample(shared, a, tile, by, within, camera, point, offset);
    if (!sample.inside) continue;
    const int row = shared.slots[camera] * tile.stack + sample.y0 + 1,
              cell = (row << tile.column_bits) | (sample.x0 + 1);
    own[k] = {sample.fx, sample.fy, weight * shared.scales[within],
              static_cast<uint32_t>(cell) << kOwnerBits | static_cast<uint32_t>(pair)};
    place[k] = 0;
  }
  widen_box<Sort>(shared.sort, own, place, tile.column_bits);
  MSP_SYNC_BLOCK();
  int total = 0;
  if (shared.sort.box[1] >= 0) total = sort_records<Sort>(shared.sort, own, place, tile.column_bits);
  MSP_UNROLL
  for (int k = 0; k < Sort::kPerThread; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * Sort::kThreads;
    shared.places[i] = place[k] < 0 ? kNoPlace : static_cast<uint16_t>(place[k]);
  }
  MSP_SYNC_BLOCK();
  return total;
}

/// Sums four values over a group; lane i (mod 4) of the group returns the sum of values[i].
template <int kGroup>
MSP_DEVICE float transposed_sum(const float (&values)[4]) {
  const bool odd = lane_id() & 1, upper = lane_id() & 2;
  const float low = (odd ? values[1] : values[0]) + shuffle_xor(odd ? values[0] : values[1], 1);
  const float high = (odd ? values[3] : values[2]) + shuffle_xor(odd ? values[2] : values[3], 1);
  float sum = (upper ? high : low) + shuffle_xor(upper ? low : high, 2);
  MSP_UNROLL
  for (int lanes = 4; lanes < kGroup; lanes <<= 1) sum += shuffle_xor(sum, lanes);
  return sum;
}

/// Each group walks its share of the sorted samples, adds to the gradient of the features and leaves the inner products
/// in place of the records.
template <class Plan, class T, class Array>
MSP_DEVICE void walk_pairs(ScaBackwardShared<Plan>& shared, const ScaArguments<T, Array>& a, const ScaTile<Plan>& tile,
                           int total) {
  using Rows = typename Plan::Rows;
  const int lane = static_cast<int>(threadIdx.x) % Rows::kGroup;
  const WalkShare share(total, static_cast<int>(threadIdx.x) / Rows::kGroup, Plan::Sort::kThreads / Rows::kGroup);
  const int first_channel = lane * Rows::kVector;
  const int64_t row_size = a.row_size(), head_channel = int64_t{tile.head} * a.channels + first_channel;
  const int64_t base = tile.image * a.cameras * a.rows * row_size + head_channel;
  CellWalk<Rows, T> walk{
      a.image_feats + base, a.grad_feats ? a.grad_feats + base : nullptr, a.grad_feats != nullptr,
      a.row_bytes,          static_cast<uint32_t>(row_size) * 4u,         a.channels - first_channel};
  const T* gradients = a.grad_output + tile.image * a.queries() * row_size + head_channel;
  const auto place_of = [&](int cell) {
    const int stacked = cell >> tile.column_bits, slot = tile.level.stack.quotient(stacked);
    const int y = stacked - slot * tile.stack, x = cell & ((1 << tile.column_bits) - 1);  // lower row and right column
    const int row = shared.cameras[slot] * a.rows + tile.level.start + (y - 1) * tile.level.width + x - 1;
    int mask = (x > 0 ? 5 : 0) | (x < tile.level.width ? 10 : 0);
    mask &= (y > 0 ? 3 : 0) | (y < tile.level.height ? 12 : 0);
    return CellPlace{row, tile.level.width, mask};
  };
  MSP_NO_UNROLL
  for (int j = share.begin; j < share.begin + share.length; ++j) {
    const bool active = j < share.end;
    float dots[4] = {};
    if (active) {
      const WalkRecord record = shared.sort.records[j];
      float gradient[Rows::kPerLane];
      const auto query = static_cast<uint32_t>(shared.pair_queries[record.owner()]);
      load_row<Rows>(row_at(gradients, query, a.row_bytes), walk.channels_left, gradient);
      if (record.cell() != walk.cell) walk.enter(record.cell(), place_of(record.cell()));
      const CornerWeights<float> w = walk_weights(record.fx, record.fy);
      MSP_UNROLL
      for (int c = 0; c < Rows::kPerLane; ++c) {
        MSP_UNROLL
        for (int k = 0; k < 4; ++k) {
          walk.sum[k][c] = muspace::fma(w.at[k] * record.weight, gradient[c], walk.sum[k][c]);
          dots[k] = muspace::fma(walk.corner[k][c], gradient[c], dots[k]);
        }
      }
    }
    const float dot = transposed_sum<Rows::kGroup>(dots);
    MSP_SYNC_WARP();  // every lane of the group has read its record
    if (active && lane < 4) shared.sort.dots[j].at[lane] = dot;
  }
  walk.flush_all();
}

/// Gradients of offsets and weights of queries begin .. end of the tile, summed over their pairs in order.
template <class Plan, class T, class Array>
MSP_DEVICE void write_gradients(const ScaBackwardShared<Plan>& shared, const ScaArguments<T, Array>& a,
                                const ScaTile<Plan>& tile, const ScaDivisors& by, int begin, int end) {
  MSP_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * a.points; i += Plan::Sort::kThreads) {
    const int within = begin + by.points.quotient(i), point = i - (within - begin) * a.points,
              query = shared.queries[within];
    const int64_t number = tile.first_sample(a, query) + point;
    float offset[2], weight;
    a.samples.load(number, offset, weight);
    const float scale = shared.scales[within];
    PointGradient<float> sum{0.f, 0.f, 0.f};
    MSP_NO_UNROLL
    for (int pair = shared.first_pair[within]; pair < shared.first_pair[within + 1]; ++pair) {
      const int local = pair - shared.first_pair[begin];
      const int place = shared.places[local * a.points + point];
      if (place == kNoPlace) continue;
      const CornerDots d = shared.sort.dots[place];
      const int camera = shared.pairs[local] & 31;
      const LevelSample<float> sample = locate_sample(shared, a, tile, by, within, camera, point, offset);
      const PointGradient<float> part =
          point_gradient(d.at[0], d.at[1], d.at[2], d.at[3], sample.fx, sample.fy, weight, scale);
      sum.offset_x += part.offset_x, sum.offset_y += part.offset_y, sum.weight += part.weight;
    }
    if (!a.grad_weights.empty()) a.grad_weights.store(number, sum.weight);
    if (a.grad_offsets.empty()) continue;
    a.grad_offsets.store(2 * number, sum.offset_x);
    a.grad_offsets.store(2 * number + 1, sum.offset_y);
  }
}

/// Grid: tiles of queries; levels of each head; images. `hits` [images, queries]: the cameras that hit, a bit each.
template <class Plan, class T, class Array>
MSP_KERNEL(Plan::Sort::kThreads, Plan::kBlocks)
sca_backward_sorted(const ScaArguments<T, Array> a, const uint32_t* hits, const ScaDivisors by) {
  MSP_SHARED ScaBackwardShared<Plan> shared;
  const ScaTile<Plan> tile(a);
  const int t = static_cast<int>(threadIdx.x);
  find_pairs(shared, a, tile, hits);
  const int most =
      Plan::kMaxPairs * a.points <= Plan::Sort::kSamples ? Plan::kMaxPairs : by.points.quotient(Plan::Sort::kSamples);
  MSP_NO_UNROLL
  for (int begin = 0; begin < tile.queries;) {
    // as many queries as fit; one query always does
    int low = begin + 1, high = tile.queries;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (shared.first_pair[middle] - shared.first_pair[begin] <= most) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int end = low, first_pair = shared.first_pair[begin], pairs = shared.first_pair[end] - first_pair;
    if (t >= begin && t < end) {
      int pair = shared.first_pair[t] - first_pair;
      for (uint32_t left = shared.hits[t]; left != 0; left &= left - 1u, ++pair) {
        shared.pairs[pair] = static_cast<uint16_t>(t << 5 | lowest_bit(left));
        shared.pair_queries[pair] = shared.queries[t];
      }
    }
    reset_box(shared.sort);
    MSP_SYNC_BLOCK();
    if (pairs > 0) {
      const int total = sort_pairs(shared, a, tile, by, pairs);
      if (total > 0) walk_pairs(shared, a, tile, total);
      MSP_SYNC_BLOCK();
    }
    if (a.wants_sample_gradients()) write_gradients(shared, a, tile, by, begin, end);
    MSP_SYNC_BLOCK();
    begin = end;
  }
}

}  // namespace muspace::bevpool
