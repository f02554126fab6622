// SPDX-License-Identifier: Apache-2.0
// Forward. A warp finds which cameras hit its queries, then takes the hit cameras of each query in turn: a group of
// lanes owns the channels of one (query, head), the warp sets up 32 samples a round, one a lane, drops those outside
// their level, and hands 16-byte records to the groups through shared memory. Sums over cameras stay in registers.
//
// What binds is the data path between the first cache level, shared memory and the registers: hence the short records,
// and neighbouring heads side by side where a row of one head is shorter than 128 bytes.
#pragma once

#include "flash_bevpool_sca_tables.inl"

namespace muspace::bevpool {

constexpr int kForwardStripLog2 = 3;

/// Rows of kGroup lanes per (query, head), kHeads heads side by side; kPoints points per level, 0 when known only at
/// run time or when a set-up lane's anchor changes. Blocks of kThreads threads, kBlocks of them per multiprocessor.
template <class Rows_, int kHeads_, int kPoints_, int kThreads_, int kBlocks_>
struct ScaPlan {
  using Rows = Rows_;
  static constexpr int kHeads = kHeads_, kPoints = kPoints_, kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int kSlots = kLanes / Rows::kGroup;    // (query, head) pairs of a warp
  static constexpr int kRound = kLanes / kSlots;          // samples of a slot that are set up per round
  static constexpr int kRecords = kSlots * (kRound + 1);  // room for those of a warp
  static constexpr int kWarpQueries = kSlots / kHeads, kQueries = kThreads / kLanes * kWarpQueries;
  static constexpr bool kUniformLevel = kPoints > 0 && kPoints % kRound == 0;  // a round lies within one level
  static constexpr bool kSameAnchor = kPoints > 0;  // a lane's, in every round: see fixed_anchor()
  static_assert(kSlots % kHeads == 0 && kWarpQueries * kCameraGroup <= kLanes, "a lane per query and camera");
};

/// One sample, ready to gather. A corner outside the level takes the inner pixel's address and half of its weight, so
/// that nothing outside is read and 0 * Inf cannot arise.
struct alignas(16) ScaRecord {
  uint32_t
      place;  // 4 * row of the features, counted through the cameras; + 1 if the right, + 2 if the lower corners exist
  float fx;
  float upper, lower;  // attention weight times the weight of the upper and of the lower pixel row
};

MSP_DEVICE ScaRecord sca_record(const LevelSample<float>& sample, float attention, const ScaLevel& level,
                                int camera_row) {
  const bool left_edge = sample.x0 < 0, upper_edge = sample.y0 < 0;
  const bool one_column = left_edge || sample.x0 + 1 >= level.width;
  const bool one_row = upper_edge || sample.y0 + 1 >= level.height;
  const int x = left_edge ? 0 : sample.x0, y = upper_edge ? 0 : sample.y0;
  const float column = one_column ? left_edge ? sample.fx : 1.f - sample.fx : 1.f;
  const float lower = attention * sample.fy, upper = attention - lower, half = .5f * (upper_edge ? lower : upper);
  ScaRecord record;
  record.place = 4 * static_cast<uint32_t>(camera_row + level.start + y * level.width + x);
  record.place += (one_column ? 0u : 1u) + (one_row ? 0u : 2u);
  record.fx = one_column ? .5f : sample.fx;
  record.upper = (one_row ? half : upper) * column;
  record.lower = (one_row ? half : lower) * column;
  return record;
}

/// Width of the level of each record; nothing if it is the same for a whole round.
template <class Plan, bool kUniformLevel>
struct RecordWidths {
  int widths[Plan::kThreads / kLanes * Plan::kRecords];
};
template <class Plan>
struct RecordWidths<Plan, true> {};

template <class Plan>
struct ScaForwardShared : RecordWidths<Plan, Plan::kUniformLevel> {
  // a warp's: kRecords; the i-th of a slot is entry slot * (kRound + 1) + i: neither stores nor loads meet in a bank
  ScaRecord records[Plan::kThreads / kLanes * Plan::kRecords];
  float matrices[kCameraGroup][12];
};

/// Adds `count` records of one slot; the next one is on its way while the rows of this one are.
template <class Plan, class T>
MSP_DEVICE void gather_sca(const ScaForwardShared<Plan>& shared, const T* feats, uint32_t row_bytes, int width,
                           int entry, int count, int channels_left, float (&sum)[Plan::Rows::kPerLane]) {
  ScaRecord next = shared.records[entry];
  MSP_NO_UNROLL
  for (; count > 0; --count, ++entry) {
    const ScaRecord record = next;
    next = shared.records[entry + 1];
    if constexpr (!Plan::kUniformLevel) width = shared.widths[entry];
    const CornerRows<T> rows(feats, record.place, static_cast<uint32_t>(width), row_bytes);
    add_corners<typename Plan::Rows>(rows, record.fx, record.upper, record.lower, channels_left, sum);
  }
}

/// Set-up role of a lane: one sample per round, of one (query, head).
template <class Plan, class T, class Array>
struct ScaStream {
  const ScaArguments<T, Array>& a;
  int samples, within, points;  // of a head; place in the slot's round
  int64_t base;                 // first sample of the (query, head); -1: no query
  float offset[2], weight;
  Reference<float> reference;
  Column<float> column;

  MSP_DEVICE ScaStream(const ScaArguments<T, Array>& arguments, int place)
      : a(arguments),
        samples(arguments.level_count * (Plan::kPoints ? Plan::kPoints : arguments.points)),
        within(place),
        points(Plan::kPoints ? Plan::kPoints : arguments.points),
        base(-1) {}
  MSP_DEVICE void fetch(int first) {
    offset[0] = offset[1] = weight = 0.f;
    if (base >= 0 && (Plan::kUniformLevel || first + within < samples))
      a.samples.load(base + first + within, offset, weight);
  }
  MSP_DEVICE void refer(int point) { reference = anchor_reference(a.geometry, column, a.z_anchors[point % a.anchors]); }
};

/// All samples of one hit camera per slot, round by round. `camera` < 0: the set-up lane's slot has none left; the
/// whole block calls it all the same.
template <class Plan, class T, class Array>
MSP_DEVICE void gather_camera(ScaForwardShared<Plan>& shared, ScaStream<Plan, T, Array>& stream, int camera,
                              const T* feats, int channels_left, float (&sum)[Plan::Rows::kPerLane]) {
  constexpr uint32_t kRoundMask = Plan::kRound == 32 ? ~0u : (1u << (Plan::kRound % 32)) - 1u;
  const ScaArguments<T, Array>& a = stream.a;
  const int slot = lane_id() / Plan::kRound, records = warp_id() * Plan::kRecords;
  const int camera_row = camera * a.rows;
  stream.fetch(0);
  MSP_NO_UNROLL
  for (int first = 0; first < stream.samples; first += Plan::kRound) {
    const int number = Plan::kUniformLevel ? first : first + stream.within;
    int l = number / stream.points;
    if (!Plan::kUniformLevel && l >= a.level_count) l = a.level_count - 1;
    const ScaLevel level = a.levels[l];
    if (!Plan::kSameAnchor && camera >= 0) stream.refer(first + stream.within - l * stream.points);
    LevelSample<float> sample{};
    if (camera >= 0 && (Plan::kUniformLevel || number < stream.samples)) {
      sample = locate_point(stream.reference, stream.offset[0], stream.offset[1], level.height, level.width);
    }
    const uint32_t inside = ballot(sample.inside);
    if (sample.inside) {
      const uint32_t before = (inside >> (slot * Plan::kRound)) & ((1u << stream.within) - 1u);
      const int entry = records + slot * (Plan::kRound + 1) + popcount(before);
      shared.records[entry] = sca_record(sample, stream.weight, level, camera_row);
      if constexpr (!Plan::kUniformLevel) shared.widths[entry] = level.width;
    }
    if (first + Plan::kRound < stream.samples)
      stream.fetch(first + Plan::kRound);  // under way while this round gathers
    MSP_SYNC_WARP();
    const int own = lane_id() / Plan::Rows::kGroup, count = popcount((inside >> (own * Plan::kRound)) & kRoundMask);
    gather_sca<Plan>(shared, feats, a.row_bytes, level.width, records + own * (Plan::kRound + 1),
                     channels_left > 0 ? count : 0, channels_left, sum);
    MSP_SYNC_WARP();
  }
}

/// Grid: tiles of Plan::kQueries queries; rows of Plan::kHeads heads, each with its blocks of channels; images.
template <class Plan, class T, class Array>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
sca_forward(const ScaArguments<T, Array> a) {
  using Rows = typename Plan::Rows;
  MSP_SHARED ScaForwardShared<Plan> shared;
  // a slot's set-up lanes are its group's lanes: kRound == Rows::kGroup
  const int lane = lane_id(), slot = lane / Plan::kRound;
  const int index =
      static_cast<int>(blockIdx.x) * Plan::kQueries + warp_id() * Plan::kWarpQueries + slot / Plan::kHeads;
  const bool exists = index < a.queries();
  const PillarCell cell = strip_cell(a.x_cells, a.y_cells, exists ? index : 0, kForwardStripLog2);
  int head_row = static_cast<int>(blockIdx.y), channel_block = 0;
  if constexpr (!Rows::kExact) {
    head_row = static_cast<int>(blockIdx.y) / a.channel_blocks;
    channel_block = static_cast<int>(blockIdx.y) - head_row * a.channel_blocks;
  }
  const int head = head_row * Plan::kHeads + slot % Plan::kHeads;
  const int64_t image = blockIdx.z, image_query = image * a.queries() + int64_t{cell.y} * a.x_cells + cell.x;
  ScaStream<Plan, T, Array> stream(a, lane % Plan::kRound);
  if (exists) stream.base = (image_query * a.heads + head) * stream.samples;
  const int first_channel = channel_block * Rows::kChannels + lane % Rows::kGroup * Rows::kVector;
  const int channels_left = Rows::kExact ? Rows::kChannels : a.channels - first_channel;
  const T* feats = a.image_feats + image * a.cameras * a.rows * a.row_size() + head * a.channels + first_channel;
  float sum[Rows::kPerLane] = {};
  int hits = 0;
  MSP_NO_UNROLL
  for (int first_camera = 0; first_camera < a.cameras; first_camera += kCameraGroup) {
    const int cameras = a.cameras - first_camera < kCameraGroup ? a.cameras - first_camera : kCameraGroup;
    MSP_SYNC_BLOCK();
    for (int i = static_cast<int>(threadIdx.x); i < cameras * 12; i += Plan::kThreads) {
      shared.matrices[i / 12][i % 12] = a.matrix(image, first_camera)[i];
    }
    MSP_SYNC_BLOCK();
    // lane query * kCameraGroup + camera looks whether that camera hits
    const int tested = lane / kCameraGroup,
              source = (tested < Plan::kWarpQueries ? tested : 0) * Plan::kHeads * Plan::kRound;
    const PillarCell other{shuffle(cell.x, source), shuffle(cell.y, source)};
    const bool other_exists = shuffle(static_cast<int>(exists), source) != 0 && tested < Plan::kWarpQueries;
    const bool hit = other_exists && lane % kCameraGroup < cameras &&
                     camera_hits(a, project_pillar(a.geometry, shared.matrices[lane % kCameraGroup], other.x, other.y));
    uint32_t left = (ballot(hit) >> (slot / Plan::kHeads * kCameraGroup)) & ((1u << kCameraGroup) - 1u);
    hits += popcount(left);
    const int rounds = converged_max(popcount(left));
    MSP_NO_UNROLL
    for (int round = 0; round < rounds; ++round, left &= left - 1u) {
      const int camera = left != 0 ? lowest_bit(left) : -1;
      if (camera >= 0) {
        stream.column = project_pillar(a.geometry, shared.matrices[camera], cell.x, cell.y);
        if (Plan::kSameAnchor) stream.refer(stream.within);
      }
      gather_camera<Plan>(shared, stream, camera < 0 ? -1 : first_camera + camera, feats, channels_left, sum);
    }
  }
  if (!exists || channels_left <= 0) return;
  const float scale = camera_scale<float>(hits, a.average);
  MSP_UNROLL
  for (int c = 0; c < Rows::kPerLane; ++c) sum[c] *= scale;
  store_row<Rows>(a.output + image_query * a.row_size() + head * a.channels + first_channel, channels_left, sum);
}

}  // namespace muspace::bevpool
