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

// lane_id() and warp_id() by unsigned arithmetic: parts of them are one shift or mask, not a signed division.
MSP_DEVICE int block_lane() { return static_cast<int>(threadIdx.x % static_cast<unsigned>(kLanes)); }
MSP_DEVICE int block_warp() { return static_cast<int>(threadIdx.x / static_cast<unsigned>(kLanes)); }

/// kVector channels a lane and kGroup lanes per (query, head); kHeads heads side by side; kQueries queries per group;
/// kUnroll samples in flight; kPoints points per level, 0 when known only at run time. kStrided: lane i holds channels
/// i, i + kGroup, ... by scalar loads, for any number of channels up to kVector * kGroup. Blocks of up to kThreads
/// threads, kBlocks of them per multiprocessor.
template <int kVector_, int kGroup_, int kHeads_, int kQueries_, int kUnroll_, int kPoints_, bool kStrided_ = false,
          int kThreads_ = 256, int kBlocks_ = 5>
struct ForwardPlan {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kHeads = kHeads_, kQueries = kQueries_;
  static constexpr int kUnroll = kUnroll_, kPoints = kPoints_, kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr bool kStrided = kStrided_;
  static constexpr int kSlots = kLanes / kGroup * kQueries;  // (query, head) pairs of a warp
  static constexpr int kRound = kLanes / kSlots;             // samples of a slot that are set up per round
  static constexpr int kWarpQueries = kSlots / kHeads;       // of a batch
  static constexpr bool kUniformLevel = kPoints > 0 && kPoints % kRound == 0;  // a round lies within one level
};

/// Records and row steps hold byte offsets; their two lowest bits are free for flags.
template <class Plan, class T>
constexpr int kPlaceUnit = Plan::kStrided || sizeof(T) > 4 ? 4 : static_cast<int>(sizeof(T));

/// Batches of queries of the blocks (tiles) of one image and row of heads: the first `longer` blocks take one more.
struct BatchShares {
  int least, longer;
  MSP_DEVICE int first(int tile) const { return tile * least + (tile < longer ? tile : longer); }
  MSP_DEVICE int count(int tile) const { return tile < longer ? least + 1 : least; }
};

constexpr int kMaxBatches = 8;  // of a block

template <class T, class Access>
struct ForwardArguments {
  const T* value;
  Coordinates<Access> coordinates;
  T* output;
  LevelSource levels;
  Extent32 extent;
  BlockGrid grid;  // rows: heads / Plan::kHeads
  BatchShares shares;
  int strip_log2;  // query order, see strip_query; negative: natural
};

/// One sample, ready to gather. A corner outside the level takes the inner pixel's address and half of its weight, so
/// that nothing outside is read and 0 * Inf cannot arise.
struct alignas(16) ForwardRecord {
  uint32_t place;  // unit * element offset of the row of `value`; + 1 if the right, + 2 if the lower corners exist
  float fx;
  float upper, lower;  // attention weight times the weight of the upper and of the lower pixel row
};

MSP_DEVICE ForwardRecord forward_record(const Sample<float>& sample, float attention, const TableLevel& level,
                                        uint32_t row_step) {
  const bool left_edge = sample.x0 < 0, upper_edge = sample.y0 < 0;
  const bool one_column = left_edge || sample.x0 + 1 >= level.width;
  const bool one_row = upper_edge || sample.y0 + 1 >= level.height;
  const int x = left_edge ? 0 : sample.x0, y = upper_edge ? 0 : sample.y0;
  const float column = one_column ? left_edge ? sample.fx : 1.f - sample.fx : 1.f;
  const float lower = attention * sample.fy, upper = attention - lower, half = .5f * (upper_edge ? lower : upper);
  ForwardRecord record;
  record.place = static_cast<uint32_t>(level.start + y * level.width + x) * row_step;
  record.place += (one_column ? 0u : 1u) + (one_row ? 0u : 2u);
  record.fx = one_column ? .5f : sample.fx;
  record.upper = (one_row ? half : upper) * column;
  record.lower = (one_row ? half : lower) * column;
  return record;
}

/// Half the step from a pixel to the one below it, per record; nothing if it is the same for a whole round.
template <class Plan, bool kUniformLevel>
struct RowSteps {
  uint32_t half_down[Plan::kThreads];
};
template <class Plan>
struct RowSteps<Plan, true> {};

/// Kept small: what shared memory does not take, the first cache level has.
template <class Plan>
struct ForwardShared : RowSteps<Plan, Plan::kUniformLevel> {
  ForwardRecord records[Plan::kThreads];  // a warp's: kLanes, entry kSlots * i + slot the i-th of a slot
  TableLevel levels[kMaxTableLevels];
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

/// What the gathers of a lane have in common. Steps are in units of kPlaceUnit elements.
template <class T>
struct ValueRows {
  const T* value;
  uint32_t lane_offset, right, half_down;
  int channels_left;
};

/// Adds kCount samples of one slot, from entry `first` of the warp's records.
template <class Plan, int kCount, class T>
MSP_DEVICE void gather(const ForwardShared<Plan>& shared, const ValueRows<T>& rows, int first,
                       float (&sum)[Plan::kVector]) {
  constexpr int kUnit = kPlaceUnit<Plan, T>;
  float corner[kCount][4][Plan::kVector], weight[kCount][4];
  MSP_UNROLL
  for (int u = 0; u < kCount; ++u) {
    const int entry = first + u * Plan::kSlots;
    const ForwardRecord record = shared.records[entry];
    uint32_t half_down = rows.half_down;
    if constexpr (!Plan::kUniformLevel) half_down = shared.half_down[entry];
    // products instead of selections: each fuses with the addition that follows
    const uint32_t to_right = record.place & 1u, upper = (record.place & ~3u) + rows.lane_offset;
    const uint32_t lower = (record.place & 2u) * half_down + upper;
    load_channels<Plan>(at_offset<kUnit>(rows.value, upper), rows.channels_left, corner[u][0]);
    load_channels<Plan>(at_offset<kUnit>(rows.value, to_right * rows.right + upper), rows.channels_left, corner[u][1]);
    load_channels<Plan>(at_offset<kUnit>(rows.value, lower), rows.channels_left, corner[u][2]);
    load_channels<Plan>(at_offset<kUnit>(rows.value, to_right * rows.right + lower), rows.channels_left, corner[u][3]);
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
    const bool exists = Plan::kUniformLevel || first + within < samples;
    if (offset >= 0 && exists) coordinates.load(offset + first, xy, weight);
  }
};

/// Writes the records of this round, compacted per slot; returns which lanes wrote one.
template <class Plan, class Access>
MSP_DEVICE uint32_t prepare(ForwardShared<Plan>& shared, const SampleStream<Plan, Access>& stream,
                            const TableLevel& level, int slot, uint32_t row_step) {
  const Sample<float> sample = locate(stream.xy[0], stream.xy[1], level.height, level.width);
  const uint32_t inside = ballot(sample.inside);
  if (sample.inside) {
    const uint32_t before = (inside >> (slot * Plan::kRound)) & ((1u << stream.within) - 1u);
    const int entry = block_warp() * kLanes + popcount(before) * Plan::kSlots + slot;
    shared.records[entry] = forward_record(sample, stream.weight, level, row_step);
    if constexpr (!Plan::kUniformLevel)
      shared.half_down[entry] = static_cast<uint32_t>(level.width) * (row_step / 2);
  }
  return inside;
}

/// Adds the samples that this round left for the lane's group.
template <class Plan, class T>
MSP_DEVICE void gather_round(const ForwardShared<Plan>& shared, const ValueRows<T>& rows, uint32_t inside,
                             float (&sums)[Plan::kQueries][Plan::kVector]) {
  constexpr uint32_t kRoundMask = Plan::kRound == 32 ? ~0u : (1u << (Plan::kRound % 32)) - 1u;
  MSP_UNROLL
  for (int k = 0; k < Plan::kQueries; ++k) {
    const int slot = block_lane() / Plan::kGroup * Plan::kQueries + k;
    int count = popcount((inside >> (slot * Plan::kRound)) & kRoundMask), entry = block_warp() * kLanes + slot;
    if (Plan::kStrided && rows.channels_left <= 0) count = 0;
    MSP_NO_UNROLL
    for (; count >= Plan::kUnroll; count -= Plan::kUnroll, entry += Plan::kUnroll * Plan::kSlots) {
      gather<Plan, Plan::kUnroll>(shared, rows, entry, sums[k]);
    }
    if constexpr (Plan::kUnroll > 1) {
      MSP_NO_UNROLL
      for (; count > 0; --count, entry += Plan::kSlots) gather<Plan, 1>(shared, rows, entry, sums[k]);
    }
  }
}

/// The queries of a warp, -1 past the end. Finding a query's place in strips takes divisions, so each is found once, by
/// some lane, and handed round.
template <class Plan>
struct QueryWalk {
  static constexpr int kFound = kMaxBatches * Plan::kWarpQueries / kLanes;
  int found[kFound];

  /// `first` is the index of the warp's first query; the next batch begins `batch_queries` later.
  MSP_DEVICE void find(int first, int batch_queries, int queries, const TableLevel* table, int levels, int strip_log2) {
    MSP_UNROLL
    for (int i = 0; i < kFound; ++i) {
      const int place = i * kLanes + block_lane();
      const int index = first + place / Plan::kWarpQueries * batch_queries + place % Plan::kWarpQueries;
      found[i] = index < queries ? index : -1;
      if (strip_log2 >= 0 && index < queries) found[i] = strip_query(table, levels, index, strip_log2);
    }
  }
  /// Query at `place` of the warp's part of a batch.
  MSP_DEVICE int operator()(int batch, int place) const {
    const int begin = batch * Plan::kWarpQueries;  // a batch lies within one element of `found`
    return shuffle(kFound == 1 || begin < kLanes ? found[0] : found[kFound - 1], begin % kLanes + place);
  }
  static_assert(kFound == 1 || kFound == 2, "one of two is chosen");
};

/// One batch of queries: sets up and gathers all samples, round by round; next() is the set-up query of the next batch.
template <class Plan, class T, class Access, class Next>
MSP_DEVICE void gather_batch(ForwardShared<Plan>& shared, SampleStream<Plan, Access>& stream, ValueRows<T>& rows,
                             int levels, int points, const Next& next, float (&sums)[Plan::kQueries][Plan::kVector]) {
  MSP_NO_UNROLL
  for (int first = 0; first < stream.samples; first += Plan::kRound) {
    int l = (Plan::kUniformLevel ? first : first + stream.within) / points;
    if (!Plan::kUniformLevel && l >= levels) l = levels - 1;
    const TableLevel level = shared.levels[l];
    const uint32_t inside = prepare(shared, stream, level, block_lane() / Plan::kRound, rows.right);
    if constexpr (Plan::kUniformLevel) rows.half_down = static_cast<uint32_t>(level.width) * (rows.right / 2);
    // the next round's locations are under way while this round gathers
    if (first + Plan::kRound < stream.samples) {
      stream.fetch(first + Plan::kRound);
    } else {
      stream.begin(next());
      stream.fetch(0);
    }
    MSP_SYNC_WARP();
    gather_round(shared, rows, inside, sums);
    MSP_SYNC_WARP();
  }
}

template <class Plan, class T, class Access>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
forward_fused(const ForwardArguments<T, Access> a) {
  MSP_SHARED ForwardShared<Plan> shared;
  const int lane = block_lane(), slot = lane / Plan::kRound, group = lane / Plan::kGroup;
  const int group_lane = lane % Plan::kGroup;
  const int heads = a.extent.heads, channels = a.extent.channels, row_size = heads * channels;
  const int points = Plan::kPoints ? Plan::kPoints : a.extent.points, first_head = a.grid.row() * Plan::kHeads;
  const int64_t image = a.grid.image(), image_query = image * a.extent.queries;
  SampleStream<Plan, Access> stream;
  stream.samples = a.extent.levels * points;
  stream.coordinates = a.coordinates.from(image_query * heads * stream.samples);
  stream.heads = heads;
  stream.head = first_head + slot / Plan::kQueries % Plan::kHeads;
  stream.within = lane % Plan::kRound;
  // places, in the warp's part of a batch, of the query that this lane sets up and of the first that its group owns
  const int setup = slot / Plan::kQueries / Plan::kHeads * Plan::kQueries + slot % Plan::kQueries;
  const int owned = group / Plan::kHeads * Plan::kQueries;
  const int batches = a.shares.count(a.grid.tile()), first_batch = a.shares.first(a.grid.tile());
  QueryWalk<Plan> query;
  const auto start = [&](int strip_log2) {
    const int warps = static_cast<int>(blockDim.x) / kLanes;
    query.find((first_batch * warps + block_warp()) * Plan::kWarpQueries, warps * Plan::kWarpQueries, a.extent.queries,
               shared.levels, a.extent.levels, strip_log2);
    stream.begin(query(0, setup));
    stream.fetch(0);
  };
  if (a.strip_log2 < 0) start(-1);  // the first locations are under way while the level table is read
  fill_level_table(shared.levels, a.levels, a.extent.levels);
  MSP_SYNC_BLOCK();
  if (a.strip_log2 >= 0) {
    start(queries_are_pixels(shared.levels, a.extent.levels, a.extent.queries) ? a.strip_log2 : -1);
  }

  constexpr uint32_t kUnit = kPlaceUnit<Plan, T>;
  const int first_channel = Plan::kStrided ? group_lane : group_lane * Plan::kVector;
  const int lane_offset = group % Plan::kHeads * channels + first_channel;
  ValueRows<T> rows;
  rows.value = a.value + (image * a.extent.rows * heads + first_head) * channels;
  rows.lane_offset = static_cast<uint32_t>(lane_offset) * kUnit;
  rows.right = static_cast<uint32_t>(row_size) * kUnit;
  rows.channels_left = channels - first_channel;
  T* output = a.output + image_query * row_size + first_head * channels;
  MSP_NO_UNROLL
  for (int batch = 0; batch < batches; ++batch) {
    float sums[Plan::kQueries][Plan::kVector] = {};
    const auto next = [&] { return batch + 1 < batches ? query(batch + 1, setup) : -1; };
    gather_batch(shared, stream, rows, a.extent.levels, points, next, sums);
    MSP_UNROLL
    for (int k = 0; k < Plan::kQueries; ++k) {
      const int row = query(batch, owned + k);
      if (row < 0 || (Plan::kStrided && rows.channels_left <= 0)) continue;
      const uint32_t place = static_cast<uint32_t>(row) * rows.right + rows.lane_offset;
      store_channels<Plan>(at_offset<kUnit>(output, place), rows.channels_left, sums[k]);
    }
  }
}

}  // namespace muspace::msda
