// SPDX-License-Identifier: Apache-2.0
// Forward, route "fused". A group of lanes owns the channels of one (query, head); a warp sets up 32 samples a round,
// one a lane, drops those outside their level, and hands 16-byte records to the groups through shared memory.
//
// What binds is the data path between the first cache level, shared memory and the registers: 128 bytes per clock, for
// a value row as for a record that is broadcast. Hence the short records, and neighbouring heads side by side where a
// row of `value` is shorter than 128 bytes.
#pragma once

#include "multi_scale_deformable_attn_tables.inl"

namespace muspace::msda {

/// kVector channels a lane and kGroup lanes per (query, head); kHeads heads side by side; kQueries queries per group;
/// kUnroll samples in flight; kPoints points per level, 0 when known only at run time. kStrided: lane i holds channels
/// i, i + kGroup, ... by scalar loads, for any number of channels up to kVector * kGroup. Blocks of up to kThreads
/// threads, kBlocks of them per multiprocessor, work through up to kBatches batches of queries.
template <int kVector_, int kGroup_, int kHeads_, int kQueries_, int kUnroll_, int kPoints_, bool kStrided_ = false,
          int kThreads_ = 256, int kBlocks_ = 5, int kBatches_ = 4>
struct ForwardPlan {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kHeads = kHeads_, kQueries = kQueries_;
  static constexpr int kUnroll = kUnroll_, kPoints = kPoints_, kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int kBatches = kBatches_, kWarps = kThreads / kLanes;
  static constexpr bool kStrided = kStrided_;
  static constexpr int kSlots = kLanes / kGroup * kQueries;  // (query, head) pairs of a warp
  static constexpr int kRound = kLanes / kSlots;             // samples of a slot that are set up per round
  static constexpr int kWarpQueries = kSlots / kHeads;
  static constexpr bool kUniformLevel = kPoints > 0 && kPoints % kRound == 0;  // a round lies within one level
  static constexpr int kBlockQueries = kWarps * kWarpQueries * kBatches;
};

template <class T, class Access>
struct ForwardArguments {
  const T* value;
  Coordinates<Access> coordinates;
  T* output;
  LevelSource levels;
  Extent32 extent;
  BlockGrid grid;  // rows: heads / Plan::kHeads
  int batches;     // batches of queries per block
  int strip_log2;  // query order, see fill_query_order
};

/// One sample, ready to gather. A corner outside the level takes the inner pixel's address and half of its weight, so
/// that nothing outside is read and 0 * Inf cannot arise.
struct alignas(16) ForwardRecord {
  uint32_t place;  // 4 * element offset of the row of `value`; + 1 if the right, + 2 if the lower corners have own rows
  float fx;
  float upper, lower;  // attention weight times the weight of the upper and of the lower pixel row
};

MSP_DEVICE ForwardRecord forward_record(const Sample<float>& sample, float attention, const TableLevel& level,
                                        int row_size) {
  int x = sample.x0, y = sample.y0;
  uint32_t flags = 3;
  float fx = sample.fx, lower = attention * sample.fy, upper = attention - lower, scale = 1.f;
  if (x < 0) {
    x = 0, scale = fx, fx = .5f, flags = 2;
  } else if (x + 1 >= level.width) {
    scale = 1.f - fx, fx = .5f, flags = 2;
  }
  if (y < 0) {
    y = 0, upper = lower = .5f * lower, flags &= 1;
  } else if (y + 1 >= level.height) {
    upper = lower = .5f * upper, flags &= 1;
  }
  ForwardRecord record;
  record.place = static_cast<uint32_t>((level.start + y * level.width + x) * row_size) * 4 + flags;
  record.fx = fx;
  record.upper = upper * scale;
  record.lower = lower * scale;
  return record;
}

/// 4 * elements from a pixel to the one below it, per record; nothing if it is the same for a whole round.
template <class Plan, bool kUniformLevel>
struct RowSteps {
  uint32_t row_steps[Plan::kWarps][kLanes];
};
template <class Plan>
struct RowSteps<Plan, true> {};

/// Kept small: what shared memory does not take, the first cache level has.
template <class Plan>
struct ForwardShared : RowSteps<Plan, Plan::kUniformLevel> {
  ForwardRecord records[Plan::kWarps][kLanes];
  TableLevel levels[kMaxTableLevels];
  int order[Plan::kBlockQueries];
};

/// The lane's channels of one value row.
template <class Plan, class T>
MSP_DEVICE void load_channels(const T* row, int channels_left, float (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      values[c] = c * Plan::kGroup < channels_left ? to_float(row[c * Plan::kGroup]) : 0.f;
    }
  } else {
    load_vector(row, values);
  }
}

template <class Plan, class T>
MSP_DEVICE void store_channels(T* row, int channels_left, const float (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      if (c * Plan::kGroup < channels_left) row[c * Plan::kGroup] = from_float<T>(values[c]);
    }
  } else {
    store_vector(row, values);
  }
}

/// Adds kCount samples of one slot, the records of which start at `position`.
template <class Plan, int kCount, class T>
MSP_DEVICE void gather(const ForwardShared<Plan>& shared, const T* value, uint32_t lane_offset, int row_size,
                       uint32_t uniform_step, int slot, int position, int channels_left, float (&sum)[Plan::kVector]) {
  float corner[kCount][4][Plan::kVector], weight[kCount][4];
  MSP_UNROLL
  for (int u = 0; u < kCount; ++u) {
    const int entry = (position + u) * Plan::kSlots + slot;
    const ForwardRecord record = shared.records[warp_id()][entry];
    uint32_t step = uniform_step;
    if constexpr (!Plan::kUniformLevel) step = shared.row_steps[warp_id()][entry];
    const uint32_t right = (record.place & 1u) ? static_cast<uint32_t>(row_size) * 4 : 0u;
    const uint32_t down = (record.place & 2u) ? step : 0u, place = (record.place & ~3u) + lane_offset;
    load_channels<Plan>(at_offset(value, place), channels_left, corner[u][0]);
    load_channels<Plan>(at_offset(value, place + right), channels_left, corner[u][1]);
    load_channels<Plan>(at_offset(value, place + down), channels_left, corner[u][2]);
    load_channels<Plan>(at_offset(value, place + down + right), channels_left, corner[u][3]);
    weight[u][1] = record.fx * record.upper;
    weight[u][0] = record.upper - weight[u][1];
    weight[u][3] = record.fx * record.lower;
    weight[u][2] = record.lower - weight[u][3];
  }
  MSP_UNROLL
  for (int u = 0; u < kCount; ++u) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      MSP_UNROLL
      for (int k = 0; k < 4; ++k) sum[c] = muspace::fma(weight[u][k], corner[u][k][c], sum[c]);
    }
  }
}

/// Set-up role of a lane: one sample per round, of one (query, head).
template <class Plan, class Access>
struct SampleStream {
  Coordinates<Access> coordinates;  // of the image
  int samples;                      // L * P
  int heads, head;                  // the head whose samples this lane sets up
  int within;                       // place in the slot's round
  int offset;                       // first sample of the current (query, head), plus `within`; -1: no query
  float xy[2], weight;

  MSP_DEVICE void begin(int query) { offset = query >= 0 ? (query * heads + head) * samples + within : -1; }
  MSP_DEVICE void fetch(int first) {
    xy[0] = -1e30f, xy[1] = 0.f, weight = 0.f;  // outside every level
    if (offset >= 0 && first + within < samples) coordinates.load(offset + first, xy, weight);
  }
};

/// Writes the records of this round, compacted per slot; returns which lanes wrote one.
template <class Plan, class Access>
MSP_DEVICE uint32_t prepare(ForwardShared<Plan>& shared, const SampleStream<Plan, Access>& stream,
                            const TableLevel& level, int slot, int row_size) {
  const Sample<float> sample = locate(stream.xy[0], stream.xy[1], level.height, level.width);
  const uint32_t inside = ballot(sample.inside);
  if (sample.inside) {
    const uint32_t before = (inside >> (slot * Plan::kRound)) & ((1u << stream.within) - 1u);
    const int entry = popcount(before) * Plan::kSlots + slot;
    shared.records[warp_id()][entry] = forward_record(sample, stream.weight, level, row_size);
    if constexpr (!Plan::kUniformLevel)
      shared.row_steps[warp_id()][entry] = static_cast<uint32_t>(level.width * row_size) * 4;
  }
  return inside;
}

/// Queries of a block, in strips (see fill_query_order) or in their natural order.
struct QueryOrder {
  const int* order;
  int first, queries;
  bool strips;
  MSP_DEVICE int operator()(int place) const {
    if (strips) return order[place];
    return first + place < queries ? first + place : -1;
  }
};

/// Adds the samples that this round left for the lane's group.
template <class Plan, class T>
MSP_DEVICE void gather_round(const ForwardShared<Plan>& shared, const T* value, uint32_t lane_offset, int row_size,
                             uint32_t uniform_step, uint32_t inside, int channels_left,
                             float (&sums)[Plan::kQueries][Plan::kVector]) {
  constexpr uint32_t kRoundMask = Plan::kRound == 32 ? ~0u : (1u << (Plan::kRound % 32)) - 1u;
  MSP_UNROLL
  for (int k = 0; k < Plan::kQueries; ++k) {
    const int slot = lane_id() / Plan::kGroup * Plan::kQueries + k;
    int count = popcount((inside >> (slot * Plan::kRound)) & kRoundMask), j = 0;
    if (Plan::kStrided && channels_left <= 0) count = 0;
    MSP_NO_UNROLL
    for (; j + Plan::kUnroll <= count; j += Plan::kUnroll) {
      gather<Plan, Plan::kUnroll>(shared, value, lane_offset, row_size, uniform_step, slot, j, channels_left, sums[k]);
    }
    if constexpr (Plan::kUnroll > 1) {
      MSP_NO_UNROLL
      for (; j < count; ++j) {
        gather<Plan, 1>(shared, value, lane_offset, row_size, uniform_step, slot, j, channels_left, sums[k]);
      }
    }
  }
}

/// One batch of queries: sets up and gathers all samples, round by round; next() is the set-up query of the next batch.
template <class Plan, class T, class Access, class Next>
MSP_DEVICE void gather_batch(ForwardShared<Plan>& shared, const ForwardArguments<T, Access>& a, const T* value,
                             uint32_t lane_offset, SampleStream<Plan, Access>& stream, int points, const Next& next,
                             int channels_left, float (&sums)[Plan::kQueries][Plan::kVector]) {
  const int row_size = a.extent.heads * a.extent.channels;
  MSP_NO_UNROLL
  for (int first = 0; first < stream.samples; first += Plan::kRound) {
    int l = (Plan::kUniformLevel ? first : first + stream.within) / points;
    if (!Plan::kUniformLevel && l >= a.extent.levels) l = a.extent.levels - 1;
    const TableLevel level = shared.levels[l];
    const uint32_t inside = prepare(shared, stream, level, lane_id() / Plan::kRound, row_size);
    // the next round's locations are under way while this round gathers
    if (first + Plan::kRound < stream.samples) {
      stream.fetch(first + Plan::kRound);
    } else {
      stream.begin(next());
      stream.fetch(0);
    }
    MSP_SYNC_WARP();
    gather_round(shared, value, lane_offset, row_size, static_cast<uint32_t>(level.width * row_size) * 4, inside,
                 channels_left, sums);
    MSP_SYNC_WARP();
  }
}

template <class Plan, class T, class Access>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
forward_fused(const ForwardArguments<T, Access> a) {
  MSP_SHARED ForwardShared<Plan> shared;
  const int lane = lane_id(), group = lane / Plan::kGroup, group_lane = lane % Plan::kGroup, slot = lane / Plan::kRound;
  const int heads = a.extent.heads, channels = a.extent.channels, row_size = heads * channels;
  const int points = Plan::kPoints ? Plan::kPoints : a.extent.points, first_head = a.grid.row() * Plan::kHeads;
  const int batch_queries = static_cast<int>(blockDim.x) / kLanes * Plan::kWarpQueries;
  const int64_t image = a.grid.image(), image_query = image * a.extent.queries;
  SampleStream<Plan, Access> stream;
  stream.samples = a.extent.levels * points;
  stream.coordinates = a.coordinates.from(image_query * heads * stream.samples);
  stream.heads = heads;
  stream.head = first_head + slot / Plan::kQueries % Plan::kHeads;
  stream.within = lane % Plan::kRound;
  // places, in a batch, of the query that this lane sets up and of the first one that its group owns
  const int warp_place = warp_id() * Plan::kWarpQueries;
  const int setup = warp_place + slot / Plan::kQueries / Plan::kHeads * Plan::kQueries + slot % Plan::kQueries;
  const int owned = warp_place + group / Plan::kHeads * Plan::kQueries;
  const QueryOrder order{shared.order, a.grid.tile() * batch_queries * a.batches, a.extent.queries, a.strip_log2 >= 0};
  if (!order.strips) {  // the first locations are under way while the level table is read
    stream.begin(order(setup));
    stream.fetch(0);
  }
  fill_level_table(shared.levels, a.levels, a.extent.levels);
  MSP_SYNC_BLOCK();
  if (order.strips) {
    fill_query_order(shared.order, batch_queries * a.batches, order.first, order.queries, shared.levels,
                     a.extent.levels, a.strip_log2);
    MSP_SYNC_BLOCK();
    stream.begin(order(setup));
    stream.fetch(0);
  }

  const int first_channel = Plan::kStrided ? group_lane : group_lane * Plan::kVector;
  const int channels_left = channels - first_channel, lane_offset = group % Plan::kHeads * channels + first_channel;
  const T* value = a.value + (image * a.extent.rows * heads + first_head) * channels;
  T* output = a.output + image_query * row_size + first_head * channels;
  MSP_NO_UNROLL
  for (int batch = 0; batch < a.batches; ++batch) {
    float sums[Plan::kQueries][Plan::kVector] = {};
    const auto next = [&] { return batch + 1 < a.batches ? order((batch + 1) * batch_queries + setup) : -1; };
    gather_batch(shared, a, value, static_cast<uint32_t>(lane_offset) * 4, stream, points, next, channels_left, sums);
    MSP_UNROLL
    for (int k = 0; k < Plan::kQueries; ++k) {
      const int query = order(batch * batch_queries + owned + k);
      if (query < 0 || (Plan::kStrided && channels_left <= 0)) continue;
      store_channels<Plan>(output + (query * row_size + lane_offset), channels_left, sums[k]);
    }
  }
}

}  // namespace muspace::msda
