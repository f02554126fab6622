// SPDX-License-Identifier: Apache-2.0
// Forward. A warp tests the samples of four cells and hands those that count to groups of eight lanes, one per cell,
// through shared memory. The sums of a cell run in the order camera, height.
#pragma once

#include "flash_bevpool_tests.inl"

namespace muspace::bevpool {

constexpr int kForwardThreads = 256;
constexpr int kForwardTileWidth = 8, kForwardTileHeight = kForwardThreads / kLanes * kWarpCells / kForwardTileWidth;
#if defined(MSP_BACKEND_EMU)
constexpr int kForwardRecords = 40;
#else
constexpr int kForwardRecords = 96;  // of a warp
#endif
static_assert(kForwardRecords >= kLanes, "a round fits");

/// A sample, ready to gather.
struct alignas(16) FlashRecord {
  uint32_t place;  // 4 * pixel, + 1 if there is a pixel to the right, + 2 if there is one below
  float fx;
  float upper, lower;  // depth weight times the weight of the upper and of the lower pixel row
};

struct FlashForwardShared {
  CameraShared cameras;
  TestColumn columns[kForwardThreads];
  FlashRecord records[kForwardThreads / kLanes][kForwardRecords];
};

/// Adds the records begin .. end of the group's cell.
template <class Plan, class T>
MSP_DEVICE void gather_records(const FlashRecord* records, int begin, int end, const T* feats, uint32_t row_bytes,
                               int width, int channels_left, float (&sum)[Plan::kPerLane]) {
  MSP_NO_UNROLL
  for (int i = begin; i < end; ++i) {
    const FlashRecord record = records[i];
    const CornerRows<T> rows(feats, record.place, static_cast<uint32_t>(width), row_bytes);
    add_corners<Plan>(rows, record.fx, record.upper, record.lower, channels_left, sum);
  }
}

/// Grid: tiles of cells of all images, blocks of channels.
template <class Plan, class T, int kBlocks>
MSP_KERNEL(kForwardThreads, kBlocks)
flash_forward(const FlashArguments<T> a) {
  MSP_SHARED FlashForwardShared shared;
  const CellTile tile = CellTile::of(a, kForwardTileWidth, kForwardTileHeight);
  const int cell = lane_id() / kCellLanes, group_lane = lane_id() % kCellLanes;
  const int within = warp_id() * kWarpCells + cell;
  const int x = tile.x + within % kForwardTileWidth, y = tile.y + within / kForwardTileWidth;
  const bool exists = x < a.x_cells && y < a.y_cells;
  const int64_t first_channel = static_cast<int64_t>(blockIdx.y) * Plan::kChannels + group_lane * Plan::kVector;
  const int channels_left = static_cast<int>(a.channels - first_channel);
  const int64_t image_pixel = tile.image * a.image_pixels();
  const T* feats = a.image_feats + image_pixel * a.channels + first_channel;
  FlashRecord* records = shared.records[warp_id()];
  WarpTests<FlashArguments<T>> tests(a, shared.cameras, shared.columns + warp_id() * kLanes);
  float sum[Plan::kPerLane] = {};
  int count = 0;
  MSP_NO_UNROLL
  for (int first_camera = 0; first_camera < a.cameras; first_camera += kCameraChunk) {
    MSP_SYNC_BLOCK();
    load_cameras(shared.cameras, a, tile.image, first_camera);
    MSP_SYNC_BLOCK();
    tests.begin(first_camera, exists ? x : -1, y);
    MSP_SYNC_WARP();
    int stored = 0, begin = 0, end = 0;  // records of the warp, and those of the lane's cell
    const int rounds = converged_max(tests.tests());
    MSP_NO_UNROLL
    for (int first = 0; first < rounds; first += kLanes) {
      const KeptSample sample = tests.test(image_pixel, first);
      const uint32_t kept = ballot(sample.kept);
      if (sample.kept) {
        FlashRecord record;
        record.place = 4 * static_cast<uint32_t>(tests.pixel(sample));
        record.place += static_cast<uint32_t>(right_step(sample.place, a.width));
        record.place += sample.place.y0 + 1 < a.height ? 2u : 0u;
        record.fx = sample.place.fx;
        record.lower = sample.weight.weight * sample.place.fy;
        record.upper = sample.weight.weight - record.lower;
        records[stored + popcount(kept & low_bits(lane_id()))] = record;
      }
      begin += popcount(kept & low_bits(tests.tests_before(cell, first)));
      end += popcount(kept & low_bits(tests.tests_before(cell + 1, first)));
      stored += popcount(kept);
      MSP_SYNC_WARP();
      if (stored > kForwardRecords - kLanes || first + kLanes >= rounds) {
        gather_records<Plan>(records, begin, end, feats, a.row_bytes, a.width, channels_left, sum);
        count += end - begin;
        stored = begin = end = 0;
      }
      MSP_SYNC_WARP();
    }
  }
  if (!exists || channels_left <= 0) return;
  const float scale = inverse_count<float>(count);
  MSP_UNROLL
  for (int c = 0; c < Plan::kPerLane; ++c) sum[c] *= scale;
  const int64_t row = (static_cast<int64_t>(tile.image) * a.y_cells + y) * a.x_cells + x;
  store_row<Plan>(a.output + row * a.channels + first_channel, channels_left, sum);
}

}  // namespace muspace::bevpool
