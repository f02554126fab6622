// SPDX-License-Identifier: Apache-2.0
// Backward, route "block_sorted": a block collects the samples of a tile of cells that count, sorts them by cell of the
// feature map and walks them. See flash_bevpool_walk.inl.
//
// A sample in the last column or row, where the border is repeated, is one whose fraction is 0: corner features and
// depth parameters are the same on both sides.
#pragma once

#include "flash_bevpool_tests.inl"
#include "flash_bevpool_walk.inl"

namespace muspace::bevpool {

/// Blocks take tiles of kTileWidth * kTileHeight cells.
template <class Rows_, class Sort_, int kTileWidth_, int kTileHeight_, int kBlocks_>
struct FlashSortPlan {
  using Rows = Rows_;
  using Sort = Sort_;
  static constexpr int kTileWidth = kTileWidth_, kTileHeight = kTileHeight_, kBlocks = kBlocks_;
  static constexpr int kCells = kTileWidth * kTileHeight, kThreads = Sort::kThreads, kWarps = Sort::kWarps;
  static constexpr int kStep = kWarps * kWarpCells;  // cells whose tests run together
  static_assert(kCells % kStep == 0 && kCells <= 1 << kOwnerBits, "a cell is an owner");
};

template <class Plan>
struct FlashBackwardShared {
  SortShared<typename Plan::Sort> sort;
  float slopes[2 * Plan::Sort::kSamples];  // of mean and scale, in the order of the records
  CameraShared cameras;
  TestColumn columns[Plan::kThreads];
  int counts[Plan::kCells];
  int stored, rounds;
};

/// A block's position.
template <class Plan>
struct FlashBlock {
  CellTile tile;
  int64_t image_pixel, image_cell;
  int column_bits;
  template <class Arguments>
  MSP_DEVICE explicit FlashBlock(const Arguments& a)
      : tile(CellTile::of(a, Plan::kTileWidth, Plan::kTileHeight)),
        image_pixel(tile.image * a.image_pixels()),
        image_cell(static_cast<int64_t>(tile.image) * a.y_cells * a.x_cells),
        column_bits(0) {
    while (a.width >> column_bits) ++column_bits;
  }
};

/// The feature map's cell of a sample, and its fractions with the repeated border taken in. `row` is counted through
/// the cameras.
template <class Arguments>
MSP_DEVICE WalkRecord flash_record(const Arguments& a, const KeptSample& sample, int row, int column_bits, int owner) {
  WalkRecord record;
  record.fx = sample.place.x0 + 1 < a.width ? sample.place.fx : 0.f;
  record.fy = sample.place.y0 + 1 < a.height ? sample.place.fy : 0.f;
  record.weight = sample.weight.weight;
  record.tag =
      static_cast<uint32_t>((row << column_bits) | sample.place.x0) << kOwnerBits | static_cast<uint32_t>(owner);
  return record;
}

/// One round of tests: appends those samples that count while there is room; returns how many of them belong to the
/// lane's cell.
template <class Plan, class T>
MSP_DEVICE int store_samples(FlashBackwardShared<Plan>& shared, const FlashArguments<T>& a,
                             const FlashBlock<Plan>& block, const WarpTests<FlashArguments<T>>& tests, int first,
                             int first_cell) {
  const int cell = lane_id() / kCellLanes;
  const KeptSample sample = tests.test(block.image_pixel, first);
  const uint32_t kept = ballot(sample.kept);
  int base = 0;
  if (lane_id() == 0 && kept != 0) base = atomic_add(&shared.stored, popcount(kept));
  const int i = shuffle(base, 0) + popcount(kept & low_bits(lane_id()));
  if (sample.kept && i < Plan::Sort::kSamples) {
    const DepthSlope<float> slope = depth_slope(a.geometry, sample.weight);
    shared.sort.records[i] = flash_record(a, sample, tests.row(sample), block.column_bits, first_cell + sample.cell);
    shared.slopes[2 * i] = slope.mean, shared.slopes[2 * i + 1] = slope.scale;
  }
  return popcount(kept & low_bits(tests.tests_before(cell + 1, first))) -
         popcount(kept & low_bits(tests.tests_before(cell, first)));
}

/// Walks the sorted records and adds to both gradients. Lane 2 * corner + parameter of a group has the depth gradient
/// of that corner.
template <class Plan, class T>
MSP_DEVICE void walk_flash(FlashBackwardShared<Plan>& shared, const FlashArguments<T>& a, const FlashBlock<Plan>& block,
                           int total) {
  using Rows = typename Plan::Rows;
  const int lane = static_cast<int>(threadIdx.x) % Rows::kGroup;
  const WalkShare share(total, static_cast<int>(threadIdx.x) / Rows::kGroup, Plan::kThreads / Rows::kGroup);
  const int64_t first_channel = static_cast<int64_t>(blockIdx.y) * Rows::kChannels + lane * Rows::kVector;
  const int64_t base = block.image_pixel * a.channels + first_channel;
  CellWalk<Rows, T> walk{a.image_feats + base,
                         a.grad_feats + base,
                         true,
                         a.row_bytes,
                         static_cast<uint32_t>(a.channels) * 4u,
                         static_cast<int>(a.channels - first_channel)};
  const T* gradients = a.grad_output + first_channel;
  float* grad_depth = a.grad_depth + 2 * block.image_pixel + (lane & 1);
  const int depth_corner = lane < 8 ? lane >> 1 : 0;
  float depth_sum = 0.f;
  const auto flush_depth = [&] {
    if (lane < 8 && walk.place.mask >> depth_corner & 1)
      atomic_add(row_at(grad_depth, walk.pixel(depth_corner), 8u), depth_sum);
    depth_sum = 0.f;
  };
  const auto place_of = [&](int cell) {
    const int row = cell >> block.column_bits, x = cell & ((1 << block.column_bits) - 1);
    const bool right = x + 1 < a.width, lower = row + 1 < (a.map_rows.quotient(row) + 1) * a.height;
    return CellPlace{row * a.width + x, a.width, 1 | (right ? 2 : 0) | (lower ? right ? 12 : 4 : 0)};
  };
  MSP_NO_UNROLL
  for (int j = share.begin; j < share.begin + share.length; ++j) {
    const bool active = j < share.end;
    const WalkRecord record = shared.sort.records[active ? j : 0];
    float dot = 0.f;
    if (active) {
      const int owner = record.owner();
      const int64_t row = block.image_cell + static_cast<int64_t>(block.tile.y + owner / Plan::kTileWidth) * a.x_cells +
                          block.tile.x + owner % Plan::kTileWidth;
      float gradient[Rows::kPerLane];
      load_row<Rows>(gradients + row * a.channels, walk.channels_left, gradient);
      if (record.cell() != walk.cell) {
        flush_depth();
        walk.enter(record.cell(), place_of(record.cell()));
      }
      const CornerWeights<float> w = walk_weights(record.fx, record.fy);
      MSP_UNROLL
      for (int c = 0; c < Rows::kPerLane; ++c) {
        dot = muspace::fma(interpolate(w, walk.corner[0][c], walk.corner[1][c], walk.corner[2][c], walk.corner[3][c]),
                           gradient[c], dot);
        gradient[c] *= record.weight;
        MSP_UNROLL
        for (int k = 0; k < 4; ++k) walk.sum[k][c] = muspace::fma(w.at[k], gradient[c], walk.sum[k][c]);
      }
    }
    dot = group_sum<Rows::kGroup>(dot);
    if (active) {
      const float column = depth_corner & 1 ? record.fx : 1.f - record.fx;
      const float corner = column * (depth_corner & 2 ? record.fy : 1.f - record.fy);
      depth_sum = muspace::fma(dot * record.weight * corner, shared.slopes[2 * j + (lane & 1)], depth_sum);
    }
  }
  walk.flush_all();
  flush_depth();
}

/// Sorts and walks what the block has stored. Barriers before and after are part of it.
template <class Plan, class T>
MSP_DEVICE void flush_samples(FlashBackwardShared<Plan>& shared, const FlashArguments<T>& a,
                              const FlashBlock<Plan>& block) {
  using Sort = typename Plan::Sort;
  constexpr int kPerThread = Sort::kPerThread;
  const int t = static_cast<int>(threadIdx.x);
  reset_box(shared.sort);
  MSP_SYNC_BLOCK();
  const int stored = shared.stored;
  WalkRecord own[kPerThread];
  float slopes[kPerThread][2];
  int place[kPerThread];
  MSP_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    const int i = t + k * Plan::kThreads;
    place[k] = i < stored ? 0 : -1;
    own[k] = {};
    slopes[k][0] = slopes[k][1] = 0.f;
    if (i >= stored) continue;
    own[k] = shared.sort.records[i];
    own[k].weight *= inverse_count<float>(shared.counts[own[k].owner()]);
    slopes[k][0] = shared.slopes[2 * i], slopes[k][1] = shared.slopes[2 * i + 1];
  }
  widen_box<Sort>(shared.sort, own, place, block.column_bits);
  MSP_SYNC_BLOCK();
  if (stored > 0) {
    const int total = sort_records<Sort>(shared.sort, own, place, block.column_bits);
    MSP_UNROLL
    for (int k = 0; k < kPerThread; ++k) {
      if (place[k] < 0) continue;
      shared.slopes[2 * place[k]] = slopes[k][0], shared.slopes[2 * place[k] + 1] = slopes[k][1];
    }
    MSP_SYNC_BLOCK();
    walk_flash(shared, a, block, total);
  }
  MSP_SYNC_BLOCK();
  if (t == 0) shared.stored = 0;
  MSP_SYNC_BLOCK();
}

/// How far the tests of a block have come.
struct TestPosition {
  int first_camera, group, first;  // chunk of cameras, the block's first cell, test of a warp
};

/// Goes on with the tests of the block's cells from `at`, cameras in chunks, up to the end or, with `pause`, until the
/// next round of at most kThreads samples might not fit. Without `pause` it counts the samples per cell. The whole
/// block agrees on everything; a barrier is part of it.
template <class Plan, class T>
MSP_DEVICE void collect_samples(FlashBackwardShared<Plan>& shared, const FlashArguments<T>& a,
                                const FlashBlock<Plan>& block, bool pause, TestPosition& at) {
  const int cell = lane_id() / kCellLanes;
  WarpTests<FlashArguments<T>> tests(a, shared.cameras, shared.columns + warp_id() * kLanes);
  bool full = false;
  MSP_NO_UNROLL
  for (; !full && at.first_camera < a.cameras; at.first_camera += full ? 0 : kCameraChunk) {
    MSP_SYNC_BLOCK();
    load_cameras(shared.cameras, a, block.tile.image, at.first_camera);
    MSP_SYNC_BLOCK();
    MSP_NO_UNROLL
    for (; !full && at.group < Plan::kCells; at.group += full ? 0 : Plan::kStep) {
      const int first_cell = at.group + warp_id() * kWarpCells, own = first_cell + cell;
      const int x = block.tile.x + own % Plan::kTileWidth, y = block.tile.y + own / Plan::kTileWidth;
      MSP_SYNC_WARP();
      tests.begin(at.first_camera, x < a.x_cells && y < a.y_cells ? x : -1, y);
      MSP_SYNC_WARP();
      int rounds = converged_max(tests.tests()), kept_of_cell = 0;
      if (pause) {
        MSP_SYNC_BLOCK();
        if (threadIdx.x == 0) shared.rounds = 0;
        MSP_SYNC_BLOCK();
        if (lane_id() == 0) atomic_max(&shared.rounds, rounds);
        MSP_SYNC_BLOCK();
        rounds = shared.rounds;
      }
      MSP_NO_UNROLL
      for (; at.first < rounds; at.first += kLanes) {
        if (pause) {
          MSP_SYNC_BLOCK();
          full = shared.stored > Plan::Sort::kSamples - Plan::kThreads;
          MSP_SYNC_BLOCK();
          if (full) break;
        }
        kept_of_cell += store_samples(shared, a, block, tests, at.first, first_cell);
      }
      if (!pause && lane_id() % kCellLanes == 0) shared.counts[own] += kept_of_cell;
      if (!full) at.first = 0;
    }
    if (!full) at.group = 0;
  }
  MSP_SYNC_BLOCK();
}

/// Grid: tiles of cells of all images, blocks of channels. Where a tile has more samples than fit, the first pass has
/// counted them and a second one works through them in portions.
template <class Plan, class T>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
flash_backward_sorted(const FlashArguments<T> a) {
  MSP_SHARED FlashBackwardShared<Plan> shared;
  const FlashBlock<Plan> block(a);
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < Plan::kCells; i += Plan::kThreads) shared.counts[i] = 0;
  if (t == 0) shared.stored = 0;
  MSP_SYNC_BLOCK();
  bool pause = false;
  TestPosition at{0, 0, 0};
  MSP_NO_UNROLL
  for (;;) {
    collect_samples(shared, a, block, pause, at);
    if (!pause && shared.stored > Plan::Sort::kSamples) {
      MSP_SYNC_BLOCK();
      if (t == 0) shared.stored = 0;
      pause = true;
      at = {0, 0, 0};
      MSP_SYNC_BLOCK();
      continue;
    }
    flush_samples(shared, a, block);
    if (at.first_camera >= a.cameras) break;
  }
}

}  // namespace muspace::bevpool
