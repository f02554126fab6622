// SPDX-License-Identifier: Apache-2.0
// Cells of the points on device backends.
#include "cell_plan_layout.h"
#include "muspace/atomic.h"
#include "muspace/target.h"
#include "muspace/vec.h"
#include "muspace/warp.h"

namespace muspace::bevpool {
namespace {

constexpr int kKeyThreads = 256, kKeyItems = 4;
constexpr int32_t kNoInterval = 0x7f7f7f7f;

unsigned key_blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

template <class Integer, int kColumns>
constexpr int kRowPiece = kColumns * sizeof(Integer) % 16 == 0 ? 16 : kColumns * sizeof(Integer) % 8 == 0 ? 8 : 4;

/// Coordinates of one point, by the widest loads that the size of a row allows if the rows are `aligned`.
template <class Integer, int kColumns>
MSP_DEVICE void load_coordinates(const Integer* row, bool aligned, Integer (&values)[kColumns]) {
  constexpr int kPiece = kRowPiece<Integer, kColumns>, kEach = kPiece / static_cast<int>(sizeof(Integer));
  if constexpr (kEach > 1) {
    if (aligned) {
      MSP_UNROLL
      for (int c = 0; c < kColumns; c += kEach) {
        const Words<kPiece> piece = load_words<kPiece>(row + c);
        MSP_UNROLL
        for (int k = 0; k < kEach; ++k) memcpy(&values[c + k], &piece.word[k * (kPiece / 4 / kEach)], sizeof(Integer));
      }
      return;
    }
  }
  MSP_UNROLL
  for (int c = 0; c < kColumns; ++c) values[c] = row[c];
}

/// A KeyRule whose divisions are products.
struct DeviceRule {
  int64_t bounds[kMaxColumns], strides[kMaxColumns];
  int64_t run_stride, cells;
  Quotient by_run, by_count;
  uint32_t count;
};

DeviceRule device_rule(const KeyRule& rule) {
  DeviceRule device{};
  for (int c = 0; c < kMaxColumns; ++c) device.bounds[c] = rule.bounds[c], device.strides[c] = rule.strides[c];
  device.run_stride = rule.run_stride, device.cells = rule.cells;
  const int64_t most = int64_t{1} << 31;  // no point has such a number
  device.by_run = Quotient::by(rule.run < 1 ? 1 : rule.run);
  device.by_count = Quotient::by(rule.count < 1 ? 1 : rule.count);
  device.count = static_cast<uint32_t>(rule.count < 1 ? 1 : rule.count < most ? rule.count : most);
  return device;
}

/// The key from the sum over the columns. Sums and products wrap: what lies outside [0, cells) is dropped.
MSP_DEVICE int32_t finished_key(uint64_t key, bool inside, const DeviceRule& rule, uint32_t point) {
  if (rule.run_stride != 0) {
    const uint32_t run = rule.by_run(point), owner = run - rule.by_count(run) * rule.count;
    key += static_cast<uint64_t>(owner) * static_cast<uint64_t>(rule.run_stride);
  }
  return inside && key < static_cast<uint64_t>(rule.cells) ? static_cast<int32_t>(key) : -1;
}

template <class Integer, int kColumns>
MSP_DEVICE int32_t cell_key(const Integer (&row)[kColumns], const DeviceRule& rule, uint32_t point) {
  uint64_t key = 0;
  bool inside = true;
  MSP_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    inside &= row[c] >= 0 && row[c] < rule.bounds[c];
    key += static_cast<uint64_t>(row[c]) * static_cast<uint64_t>(rule.strides[c]);
  }
  return finished_key(key, inside, rule, point);
}

template <class Integer, int kColumns>
MSP_KERNEL(kKeyThreads, 1)
cell_keys(const Coordinates coords, const DeviceRule rule, int32_t* keys) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kKeyThreads * kKeyItems) + static_cast<int>(threadIdx.x);
  const Integer* data = static_cast<const Integer*>(coords.data);
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % kRowPiece<Integer, kColumns> == 0;
  Integer rows[kKeyItems][kColumns];
  bool taken[kKeyItems];
  MSP_UNROLL
  for (int k = 0; k < kKeyItems; ++k) {
    const int64_t point = first + k * kKeyThreads;
    taken[k] = point < coords.points;
    if (!taken[k]) continue;
    load_coordinates<Integer, kColumns>(data + point * kColumns, aligned, rows[k]);
    if (coords.mask) taken[k] = coords.mask[point] != 0;
  }
  MSP_UNROLL
  for (int k = 0; k < kKeyItems; ++k) {
    const int64_t point = first + k * kKeyThreads;
    if (point >= coords.points) continue;
    keys[point] = taken[k] ? cell_key<Integer, kColumns>(rows[k], rule, static_cast<uint32_t>(point)) : -1;
  }
}

/// Rows of three int32: four neighbouring rows a thread by three loads.
template <class Unused>
MSP_KERNEL(kKeyThreads, 1)
cell_keys_by_fours(const Coordinates coords, const DeviceRule rule, int32_t* keys) {
  const int64_t first = 4 * (static_cast<int64_t>(blockIdx.x) * kKeyThreads + static_cast<int>(threadIdx.x));
  if (first >= coords.points) return;
  const int32_t* data = static_cast<const int32_t*>(coords.data) + 3 * first;
  int32_t values[12];
  if (first + 3 < coords.points) {
    MSP_UNROLL
    for (int k = 0; k < 3; ++k) {
      const Words<16> words = load_words<16>(data + 4 * k);
      memcpy(values + 4 * k, words.word, sizeof(words));
    }
  } else {
    MSP_UNROLL
    for (int k = 0; k < 12; ++k) values[k] = first + k / 3 < coords.points ? data[k] : -1;
  }
  Words<16> found;
  MSP_UNROLL
  for (int u = 0; u < 4; ++u) {
    const int32_t row[3] = {values[3 * u], values[3 * u + 1], values[3 * u + 2]};
    int32_t key = cell_key<int32_t, 3>(row, rule, static_cast<uint32_t>(first) + u);
    if (coords.mask && first + u < coords.points && coords.mask[first + u] == 0) key = -1;
    found.word[u] = static_cast<uint32_t>(key);
  }
  if (first + 3 < coords.points) {
    *reinterpret_cast<Words<16>*>(keys + first) = found;
  } else {
    MSP_UNROLL
    for (int u = 0; u < 4; ++u) {
      if (first + u < coords.points) keys[first + u] = static_cast<int32_t>(found.word[u]);
    }
  }
}

/// Rows of four int64: two threads a row, so that a warp's loads are dense.
template <class Unused>
MSP_KERNEL(kKeyThreads, 1)
cell_keys_by_halves(const Coordinates coords, const DeviceRule rule, int32_t* keys) {
  const int t = static_cast<int>(threadIdx.x), half = t & 1;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kKeyThreads * kKeyItems) + t;
  const int64_t halves = 2 * coords.points;
  int64_t pairs[kKeyItems][2];
  MSP_UNROLL
  for (int k = 0; k < kKeyItems; ++k) {
    const int64_t i = first + k * kKeyThreads;
    pairs[k][0] = pairs[k][1] = -1;
    if (i < halves) {
      const Words<16> words = load_words<16>(static_cast<const int64_t*>(coords.data) + 2 * i);
      memcpy(pairs[k], words.word, sizeof(pairs[k]));
    }
  }
  MSP_UNROLL
  for (int k = 0; k < kKeyItems; ++k) {
    const int64_t i = first + k * kKeyThreads;
    uint64_t key = 0;
    bool inside = true;
    MSP_UNROLL
    for (int c = 0; c < 2; ++c) {
      const int64_t coordinate = pairs[k][c];
      inside &= coordinate >= 0 && coordinate < (half != 0 ? rule.bounds[2 + c] : rule.bounds[c]);
      key += static_cast<uint64_t>(coordinate) *
             static_cast<uint64_t>(half != 0 ? rule.strides[2 + c] : rule.strides[c]);
    }
    const uint32_t low = shuffle_xor(static_cast<uint32_t>(key), 1);
    const uint32_t high = shuffle_xor(static_cast<uint32_t>(key >> 32), 1), votes = ballot(inside);
    if (half != 0 || i >= halves) continue;
    const int64_t point = i / 2;
    inside = (votes >> lane_id() & 3u) == 3u && (coords.mask == nullptr || coords.mask[point] != 0);
    keys[point] = finished_key(key + (low | static_cast<uint64_t>(high) << 32), inside, rule,
                               static_cast<uint32_t>(point));
  }
}

template <class Integer>
void run_cell_keys(const Coordinates& coords, const DeviceRule& rule, int columns, int32_t* keys, stream_t stream) {
  constexpr auto one = cell_keys<Integer, 1>, two = cell_keys<Integer, 2>, three = cell_keys<Integer, 3>,
                 four = cell_keys<Integer, 4>;
  const auto kernel = columns == 1 ? one : columns == 2 ? two : columns == 3 ? three : four;
  MSP_LAUNCH(kernel, dim3(key_blocks(coords.points, kKeyThreads * kKeyItems)), dim3(kKeyThreads), 0, stream, coords,
             rule, keys);
}

/// owners[point] = first interval that covers it. A warp an interval; no warp operation.
template <class Unused>
MSP_KERNEL(kKeyThreads, 1)
interval_owners(const Intervals in, int32_t* owners, int32_t* faults) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kKeyThreads + static_cast<int>(threadIdx.x)) / 32;
  if (i >= in.intervals) return;
  const int64_t start = in.starts[i], length = in.lengths[i];
  if (start < 0 || length < 0 || start + length > in.points) {
    if (lane == 0) atomic_or(faults, kInterval);
    return;
  }
  bool overlap = false;
  for (int64_t k = start + lane; k < start + length; k += 32) {
    overlap |= atomic_min(owners + k, static_cast<int32_t>(i)) != kNoInterval;
  }
  if (overlap) atomic_or(faults, kOverlap);
}

/// In: the owners in `keys`. Out: the keys.
template <class Unused>
MSP_KERNEL(kKeyThreads, 1)
interval_keys(const Intervals in, int32_t* keys, int32_t* row_keys, int32_t* faults) {
  const int64_t point = static_cast<int64_t>(blockIdx.x) * kKeyThreads + static_cast<int>(threadIdx.x);
  if (point >= in.points) return;
  const int32_t owner = keys[point];
  int32_t key = -1, row = -1;
  if (owner != kNoInterval) {
    key = in.ranks_bev[point], row = in.ranks_feat[point];
    const int32_t weight = in.ranks_depth[point];
    int fault = 0;
    if (key < 0 || key >= in.cells || key != in.ranks_bev[in.starts[owner]]) fault |= kBevRank;
    if (row < 0 || row >= in.rows) fault |= kFeatRank;
    if (weight < 0 || weight >= in.weights) fault |= kDepthRank;
    if (fault != 0) {
      atomic_or(faults, fault);
      key = row = -1;
    }
  }
  keys[point] = key;
  row_keys[point] = row;
}

template <class Unused>
MSP_KERNEL(kKeyThreads, 1)
reset_owners(int32_t* owners, int64_t points, int32_t* faults) {
  const int64_t point = static_cast<int64_t>(blockIdx.x) * kKeyThreads + static_cast<int>(threadIdx.x);
  if (point == 0) *faults = 0;
  if (point < points) owners[point] = kNoInterval;
}

}  // namespace

Status launch_cell_keys(const Coordinates& coords, const KeyRule& rule, int32_t* keys, const Place& place) {
  const DeviceGuard guard(place.device);
  if (coords.points == 0) return success();
  if (rule.columns < 1 || rule.columns > kMaxColumns) {
    return failure(kValueError, "cell_keys: expected 1 to %d columns, got %d", kMaxColumns, rule.columns);
  }
  const DeviceRule device = device_rule(rule);
  const stream_t stream = stream_at(place.ctx);
  const bool aligned = reinterpret_cast<std::uintptr_t>(coords.data) % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(keys) % 16 == 0;
  if (!coords.wide && rule.columns == 3 && aligned) {
    const auto by_fours = cell_keys_by_fours<void>;
    MSP_LAUNCH(by_fours, dim3(key_blocks(coords.points, 4 * kKeyThreads)), dim3(kKeyThreads), 0, stream, coords, device,
               keys);
  } else if (coords.wide && rule.columns == 4 && aligned) {
    const auto by_halves = cell_keys_by_halves<void>;
    MSP_LAUNCH(by_halves, dim3(key_blocks(2 * coords.points, kKeyThreads * kKeyItems)), dim3(kKeyThreads), 0, stream,
               coords, device, keys);
  } else if (coords.wide) {
    run_cell_keys<int64_t>(coords, device, rule.columns, keys, stream);
  } else {
    run_cell_keys<int32_t>(coords, device, rule.columns, keys, stream);
  }
  const char* error = launch_error();
  return error ? failure(kRuntimeError, "cell_keys: %s", error) : success();
}

Status launch_interval_keys(const Intervals& intervals, int32_t* keys, int32_t* row_keys, int32_t* faults,
                            const Place& place) {
  const DeviceGuard guard(place.device);
  const stream_t stream = stream_at(place.ctx);
  const dim3 block(kKeyThreads), points(key_blocks(intervals.points + 1, kKeyThreads));
  const auto reset = reset_owners<void>;
  const auto find = interval_keys<void>;
  const auto own = interval_owners<void>;
  MSP_LAUNCH(reset, points, block, 0, stream, keys, intervals.points, faults);
  if (intervals.intervals > 0) {
    MSP_LAUNCH(own, dim3(key_blocks(intervals.intervals, kKeyThreads / 32)), block, 0, stream, intervals, keys, faults);
  }
  MSP_LAUNCH(find, points, block, 0, stream, intervals, keys, row_keys, faults);
  const char* error = launch_error();
  return error ? failure(kRuntimeError, "interval_keys: %s", error) : success();
}

}  // namespace muspace::bevpool
