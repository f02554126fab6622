// SPDX-License-Identifier: Apache-2.0
// Sums per cell: kernels. A block takes one work item of the plan. Its entries are cut into equal shares, one a group
// of lanes that owns the channels of a row between them. A share adds its rows in registers and writes a sum where the
// cell changes: the share in which a cell begins owns the sum of the cell, later shares write parts, and the end adds
// the parts in order. So crowded cells need no second pass and no atomics, and the sums are bit-reproducible.
#pragma once

#include "cell_pool_rows.inl"

namespace muspace::bevpool {

#if defined(MSP_BACKEND_EMU)
constexpr int kPoolWindow = 64;  // entries that a block stages at a time
#else
constexpr int kPoolWindow = 1024;
#endif

struct PoolArguments {
  const int32_t *counters, *starts, *order;
  const WorkItem* items;
  int64_t item_capacity;
  const PlanEntry* entries;  // null: rows by `order`, every weight is 1. See FrustumWords, too
  const void* rows;          // channels last
  uint32_t row_count, weight_count;
  const void* weights;
  Storage weight_type, output_type;
  void* output;
  int64_t pixels;  // 0: channels last
  int channels, cells;
  bool wide;  // four channels of the output may be stored at once, channels last
  const int32_t* long_cells;
  int long_limit;
};

/// kVector elements a load, kSteps loads a lane and kGroup lanes: the channels of a block. kFlight rows at a time.
template <int kVector_, int kGroup_, int kSteps_, int kFlight_, int kThreads_, int kBlocks_>
struct PoolShape {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kSteps = kSteps_, kFlight = kFlight_;
  static constexpr int kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int kGroups = kLanes / kGroup, kShares = kThreads / kLanes * kGroups;
  static constexpr int kWidth = kVector * kGroup * kSteps, kOwn = kVector * kSteps;
  static constexpr int kPitch = (kWidth / 4 | 1) * 4;  // an odd number of 16-byte words: rows start in different banks
  static_assert(kWidth % 4 == 0, "the sums of a block are moved by four");
};

struct alignas(8) PoolRecord {
  int32_t row;  // negative: counts for nothing
  float weight;
};

struct alignas(16) Quad {
  float value[4];
};

template <class Shape>
struct PoolShared {
  alignas(16) float sums[kTileCells * Shape::kPitch];
  alignas(16) float parts[Shape::kShares * Shape::kWidth];
  PoolRecord records[kPoolWindow];
  int64_t places[kTileCells];
  int32_t starts[kTileCells + 1];              // first entry of each cell, within the item
  int16_t owner[kTileCells], last[kTileCells];  // shares of the window
};

/// What the lane loads: kSteps vectors of a row, at fixed distances from the first.
template <class Shape, class T>
struct LaneColumns {
  const char* first;
  int stride;         // bytes of a row
  int channels_left;  // from the lane's first channel on

  /// A lane without channels reads some that exist; its sums go nowhere.
  MSP_DEVICE LaneColumns(const PoolArguments& a, int first_channel, int lane)
      : stride(a.channels * static_cast<int>(sizeof(T))) {
    int channel = first_channel + lane * Shape::kVector;
    if (channel >= a.channels) channel = 0;
    channels_left = a.channels - channel;
    first = static_cast<const char*>(a.rows) + channel * static_cast<int>(sizeof(T));
  }
  MSP_DEVICE void load(int32_t row, bool wanted, RawVector<T, Shape::kVector> (&raw)[Shape::kSteps]) const {
    constexpr int kDistance = Shape::kGroup * Shape::kVector;
    const char* place = first + static_cast<int64_t>(row) * stride;
    MSP_UNROLL
    for (int j = 0; j < Shape::kSteps; ++j) {
      raw[j] = zero_vector<T, Shape::kVector>();
      if (wanted && (j == 0 || j * kDistance < channels_left)) {
        raw[j] = load_words<sizeof(raw[j])>(place + j * kDistance * static_cast<int>(sizeof(T)));
      }
    }
  }
};

MSP_DEVICE bool take_item(const PoolArguments& a, WorkItem& item) {
  const int heavy = a.counters[0], light = a.counters[1], number = static_cast<int>(blockIdx.x);
  if (number >= heavy + light) return false;
  const int64_t place = number < heavy ? number : a.item_capacity - 1 - (number - heavy);
  const Words<16> words = load_words<16>(a.items + place);
  item.first_cell = static_cast<int32_t>(words.word[0]), item.cells = static_cast<int32_t>(words.word[1]);
  item.first_entry = static_cast<int32_t>(words.word[2]), item.entries = static_cast<int32_t>(words.word[3]);
  return true;
}

MSP_DEVICE FrustumWords frustum_of(const PoolArguments& a) {
  FrustumWords frustum;
  const Words<16> low = load_words<16>(a.counters + kFrustumWord), high = load_words<16>(a.counters + kFrustumWord + 4);
  frustum.used = static_cast<int32_t>(low.word[0]), frustum.pixels = low.word[1];
  frustum.by_image = {low.word[2], low.word[3]}, frustum.by_pixels = {high.word[0], high.word[1]};
  return frustum;
}

/// The entry at `place` of the plan, its weight loaded. Indices outside their arrays count for nothing.
MSP_DEVICE PoolRecord pool_record(const PoolArguments& a, const FrustumWords& frustum, int64_t place) {
  uint32_t row, weight = 0;
  if (a.entries && frustum.used == 0) {
    const Words<8> words = load_words<8>(a.entries + place);
    row = words.word[0], weight = words.word[1];
  } else {
    weight = static_cast<uint32_t>(a.order[place]);
    row = a.entries ? frustum.row(weight) : weight;
  }
  PoolRecord record;
  record.weight = 1.f;
  const bool known = row < a.row_count && (!a.entries || weight < a.weight_count);
  record.row = known ? static_cast<int32_t>(row) : -1;
  if (known && a.entries) record.weight = load_any(a.weights, a.weight_type, weight);
  return record;
}

template <int kThreads>
MSP_DEVICE void stage_records(const PoolArguments& a, const FrustumWords& frustum, int64_t first, int count,
                              PoolRecord* records) {
  MSP_UNROLL_BY(4)
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) records[i] = pool_record(a, frustum, first + i);
}

/// Entries of a window and of each of its shares.
struct PoolPortion {
  int first, count, each;
};

/// Which shares of the window hold entries of cell t.
template <class Shape>
MSP_DEVICE void find_shares(PoolShared<Shape>& shared, const PoolPortion& window, int t) {
  int begin = shared.starts[t] - window.first, end = shared.starts[t + 1] - window.first;
  begin = begin > 0 ? begin : 0;
  end = end < window.count ? end : window.count;
  shared.owner[t] = static_cast<int16_t>(begin < end ? begin / window.each : 0);
  shared.last[t] = static_cast<int16_t>(begin < end ? (end - 1) / window.each : 0);
}

/// Moves the lane's sums to `target`, its place in shared memory, and clears them.
template <class Shape>
MSP_DEVICE void flush_sums(float* target, float (&own)[Shape::kOwn]) {
  MSP_UNROLL
  for (int j = 0; j < Shape::kSteps; ++j) {
    float* place = target + j * Shape::kGroup * Shape::kVector;
    float* from = own + j * Shape::kVector;
    if constexpr (Shape::kVector % 4 == 0) {
      MSP_UNROLL
      for (int e = 0; e < Shape::kVector; e += 4) {
        *reinterpret_cast<Quad*>(place + e) = Quad{{from[e], from[e + 1], from[e + 2], from[e + 3]}};
      }
    } else {
      MSP_UNROLL
      for (int e = 0; e < Shape::kVector; ++e) place[e] = from[e];
    }
    MSP_UNROLL
    for (int e = 0; e < Shape::kVector; ++e) from[e] = 0.f;
  }
}

/// The lane's sums of the cell as an earlier window left them.
template <class Shape>
MSP_DEVICE void resume_sums(const float* source, float (&own)[Shape::kOwn]) {
  MSP_UNROLL
  for (int e = 0; e < Shape::kOwn; ++e) {
    own[e] = source[e / Shape::kVector * Shape::kGroup * Shape::kVector + e % Shape::kVector];
  }
}

/// The share of the calling group of lanes. Places are those within the item.
template <class Shape, class T>
MSP_DEVICE void walk_share(PoolShared<Shape>& shared, const LaneColumns<Shape, T>& columns, const PoolPortion& window,
                           int cells, int share, int lane) {
  const int first = window.first + share * window.each, window_end = window.first + window.count;
  const int last = first + window.each < window_end ? first + window.each : window_end;
  if (first >= last) return;
  const PoolRecord* records = shared.records - window.first;
  int cell = 0;
  MSP_UNROLL
  for (int half = kTileCells / 2; half > 0; half >>= 1) {
    if (cell + half < cells && shared.starts[cell + half] <= first) cell += half;
  }
  int end = shared.starts[cell + 1];
  float own[Shape::kOwn];
  MSP_UNROLL
  for (int e = 0; e < Shape::kOwn; ++e) own[e] = 0.f;
  // the share in which a cell begins, or goes on from an earlier window, owns the cell's sum
  float *sums = shared.sums + lane * Shape::kVector, *target = sums + cell * Shape::kPitch;
  if (shared.starts[cell] < first) {
    if (share > 0) {
      target = shared.parts + share * Shape::kWidth + lane * Shape::kVector;
    } else {
      resume_sums<Shape>(target, own);
    }
  }
  MSP_NO_UNROLL
  for (int k = first; k < last; k += Shape::kFlight) {
    RawVector<T, Shape::kVector> raw[Shape::kFlight][Shape::kSteps];
    float weight[Shape::kFlight];
    MSP_UNROLL
    for (int u = 0; u < Shape::kFlight; ++u) {
      const PoolRecord record = records[k + u < last ? k + u : k];
      weight[u] = record.weight;
      columns.load(record.row, k + u < last && record.row >= 0, raw[u]);
    }
    MSP_UNROLL
    for (int u = 0; u < Shape::kFlight; ++u) {
      if (k + u >= last) continue;
      if (k + u == end) {
        flush_sums<Shape>(target, own);
        do {
          ++cell;
          end = shared.starts[cell + 1];
        } while (end <= k + u);
        target = sums + cell * Shape::kPitch;
      }
      MSP_UNROLL
      for (int j = 0; j < Shape::kSteps; ++j) {
        add_weighted<T, Shape::kVector>(own + j * Shape::kVector, raw[u][j], weight[u]);
      }
    }
  }
  flush_sums<Shape>(target, own);
}

/// Four channels of a cell: what its owner and, in order, the later shares of the window added up.
template <class Shape>
MSP_DEVICE Quad cell_sum(const PoolShared<Shape>& shared, int cell, int quad) {
  Quad sum{{0.f, 0.f, 0.f, 0.f}};
  if (shared.starts[cell + 1] == shared.starts[cell]) return sum;
  sum = *reinterpret_cast<const Quad*>(shared.sums + cell * Shape::kPitch + 4 * quad);
  for (int share = shared.owner[cell] + 1; share <= shared.last[cell]; ++share) {
    const Quad part = *reinterpret_cast<const Quad*>(shared.parts + share * Shape::kWidth + 4 * quad);
    MSP_UNROLL
    for (int e = 0; e < 4; ++e) sum.value[e] += part.value[e];
  }
  return sum;
}

template <class Shape>
MSP_DEVICE void add_parts(PoolShared<Shape>& shared, int cells) {
  constexpr int kQuads = Shape::kWidth / 4;
  for (int i = static_cast<int>(threadIdx.x); i < cells * kQuads; i += Shape::kThreads) {
    const int cell = i / kQuads, quad = i % kQuads;
    if (shared.last[cell] == shared.owner[cell]) continue;
    *reinterpret_cast<Quad*>(shared.sums + cell * Shape::kPitch + 4 * quad) = cell_sum(shared, cell, quad);
  }
}

template <class Shape, class TO>
MSP_DEVICE void store_cells(const PoolShared<Shape>& shared, const PoolArguments& a, int cells, int first_channel) {
  constexpr int kQuads = Shape::kWidth / 4;
  const int t = static_cast<int>(threadIdx.x), channels = a.channels - first_channel;
  const bool channels_last = a.pixels == 0;
  int cell_bits = 0;
  while (1 << cell_bits < cells) ++cell_bits;
  // neighbouring threads write neighbouring elements: channels of a cell, or cells of a channel
  const int tasks = channels_last ? cells * kQuads : kQuads << cell_bits;
  for (int i = t; i < tasks; i += Shape::kThreads) {
    const int cell = channels_last ? i / kQuads : i & ((1 << cell_bits) - 1);
    const int quad = channels_last ? i % kQuads : i >> cell_bits;
    if (cell >= cells || 4 * quad >= channels) continue;
    const Quad sum = cell_sum(shared, cell, quad);
    const int64_t step = channels_last ? 1 : a.pixels;
    TO* target = static_cast<TO*>(a.output) + shared.places[cell] + (first_channel + 4 * quad) * step;
    if (channels_last && a.wide) {
      store_vector(target, sum.value);
      continue;
    }
    MSP_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (4 * quad + e < channels) target[e * step] = from_float<TO>(sum.value[e]);
    }
  }
}

/// Element offset of the first channel of a cell.
MSP_DEVICE int64_t cell_place(const PoolArguments& a, int32_t cell) {
  if (a.pixels == 0) return static_cast<int64_t>(cell) * a.channels;
  const uint32_t pixels = static_cast<uint32_t>(a.pixels), image = static_cast<uint32_t>(cell) / pixels;
  return static_cast<int64_t>(image) * a.channels * a.pixels + (static_cast<uint32_t>(cell) - image * pixels);
}

/// Grid: item capacity, blocks of channels.
template <class Shape, class T>
MSP_KERNEL(Shape::kThreads, Shape::kBlocks)
pool_items(const PoolArguments a) {
  MSP_SHARED PoolShared<Shape> shared;
  WorkItem item;
  const FrustumWords frustum = frustum_of(a);
  if (!take_item(a, item)) return;  // the whole block
  const int t = static_cast<int>(threadIdx.x), lane = lane_id() % Shape::kGroup, group = lane_id() / Shape::kGroup;
  const int first_channel = static_cast<int>(blockIdx.y) * Shape::kWidth;
  const LaneColumns<Shape, T> columns(a, first_channel, lane);
  PoolPortion window{0, item.entries < kPoolWindow ? item.entries : kPoolWindow, 0};
  stage_records<Shape::kThreads>(a, frustum, item.first_entry, window.count, shared.records);
  if (t <= item.cells) shared.starts[t] = a.starts[item.first_cell + t] - item.first_entry;
  if (t < item.cells) shared.places[t] = cell_place(a, item.first_cell + t);
  MSP_SYNC_BLOCK();
  while (window.count > 0) {
    window.each = (window.count + Shape::kShares - 1) / Shape::kShares;
    if (t < item.cells) find_shares(shared, window, t);
    if (group < Shape::kGroups) {
      walk_share<Shape, T>(shared, columns, window, item.cells, warp_id() * Shape::kGroups + group, lane);
    }
    MSP_SYNC_BLOCK();
    window.first += window.count;
    if (window.first >= item.entries) break;
    add_parts(shared, item.cells);
    window.count = item.entries - window.first < kPoolWindow ? item.entries - window.first : kPoolWindow;
    stage_records<Shape::kThreads>(a, frustum, item.first_entry + window.first, window.count, shared.records);
    MSP_SYNC_BLOCK();
  }
  if (a.output_type == Storage::f32) {
    store_cells<Shape, float>(shared, a, item.cells, first_channel);
  } else if (a.output_type == Storage::f16) {
    store_cells<Shape, half_t>(shared, a, item.cells, first_channel);
  } else {
    store_cells<Shape, bfloat16_t>(shared, a, item.cells, first_channel);
  }
}

// ---------------------------------------------------------------------------------------------------------- plain sums

constexpr int kPlainThreads = 256;

/// One thread a cell and channel, whatever the numbers are.
template <class T>
MSP_DEVICE void plain_sum(const PoolArguments& a, int32_t cell, int channel) {
  const T* rows = static_cast<const T*>(a.rows) + channel;
  const FrustumWords frustum = frustum_of(a);
  float sum = 0.f;
  const int32_t last = a.starts[cell + 1];
  for (int32_t k = a.starts[cell]; k < last; ++k) {
    const PoolRecord record = pool_record(a, frustum, k);
    if (record.row < 0) continue;
    sum = muspace::fma(record.weight, to_float(rows[static_cast<int64_t>(record.row) * a.channels]), sum);
  }
  const int64_t step = a.pixels == 0 ? 1 : a.pixels;
  store_any(a.output, a.output_type, cell_place(a, cell) + channel * step, sum);
}

template <class T>
MSP_KERNEL(kPlainThreads, 1)
pool_linear(const PoolArguments a) {
  const int64_t count = static_cast<int64_t>(a.cells) * a.channels;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPlainThreads + static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int64_t>(gridDim.x) * kPlainThreads) {
    plain_sum<T>(a, static_cast<int32_t>(i / a.channels), static_cast<int>(i % a.channels));
  }
}

/// A warp a cell, a lane every 32nd channel.
template <class T>
MSP_KERNEL(kPlainThreads, 1)
pool_two_dimensional(const PoolArguments a) {
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * (kPlainThreads / kLanes) + warp_id();
  if (cell >= a.cells) return;
  for (int channel = lane_id(); channel < a.channels; channel += kLanes) {
    plain_sum<T>(a, static_cast<int32_t>(cell), channel);
  }
}

}  // namespace muspace::bevpool
