// SPDX-License-Identifier: Apache-2.0
// Backward, route "block_sorted". A block takes the samples of a tile of queries in one level and head and sorts them
// by cell (the square between four pixel centres) in shared memory. Groups of lanes walk equal shares of the sorted
// list: the four corner rows of `value` and the four sums of their gradients stay in registers while the cell does not
// change, so value rows are loaded once per cell and few sums reach global memory. Correctness does not depend on the
// order, only the number of additions does; any input is safe, and long cells cost nothing because shares are equal.
#pragma once

#include "multi_scale_deformable_attn_tables.inl"

namespace muspace::msda {

/// kSamples of a tile, sorted by kThreads threads with up to kCounters cells told apart; kMinPoints bounds the queries
/// of a tile to kSamples / kMinPoints. kVector, kGroup, kStrided as in ForwardPlan. kAddValue false leaves the gradient
/// of `value` out (the ordered route computes it in its own way).
template <int kVector_, int kGroup_, int kSamples_, int kThreads_, int kBlocks_, int kCounters_, int kMinPoints_,
          bool kStrided_, bool kAddValue_ = true>
struct SortPlan {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kSamples = kSamples_, kThreads = kThreads_;
  static constexpr int kBlocks = kBlocks_, kCounters = kCounters_, kMinPoints = kMinPoints_;
  static constexpr bool kStrided = kStrided_, kAddValue = kAddValue_;
  static constexpr int kPerThread = kSamples / kThreads, kGroups = kThreads / kGroup, kWarps = kThreads / kLanes;
  static constexpr int kQueries = kSamples / kMinPoints;
};

template <class T, class Access>
struct BackwardArguments {
  const T* value;
  const T* grad_output;
  Coordinates<Access> coordinates;
  float* grad_value;
  CoordinateGradients<Access> grad_coordinates;
  LevelSource levels;
  Extent32 extent;
  SmallDivisor points, levels_divisor;
  BlockGrid grid;  // rows: (head, level) pairs
  int tile_queries;
  int strip_log2;
};

struct alignas(16) SortedSample {
  float fx, fy, weight;
  uint32_t grad_row;  // 4 * element offset of the output gradient's row within the image and head
};
struct alignas(16) SampleDots {
  float dot[4];  // inner products of the output gradient with the four corners
};

template <class Plan>
struct SortShared {
  union {
    uint32_t counters[Plan::kCounters / 2];    // two 16-bit counters a word, while sorting
    SortedSample samples[Plan::kSamples + 8];  // then the sorted samples,
    SampleDots dots[Plan::kSamples + 8];       // each overwritten by its inner products
  };
  int cells[Plan::kSamples + 8];
  int box[4];
  int warp_sums[Plan::kWarps];
  int order[Plan::kQueries];       // queries of the tile; ~query when its output gradient is zero
  int16_t places[Plan::kSamples];  // place in the sorted list, -1 if the sample takes no part
  TableLevel levels[kMaxTableLevels];
};

/// What one block works on.
struct SortTile {
  int image, level_index, head, queries, samples, points;
  int width, height, start;
  int column_bits;       // a cell is (row + 1) << column_bits | (column + 1)
  int64_t first_sample;  // number of the image's first sample

  /// Number of a sample, counted from the image's first one.
  MSP_DEVICE int sample(const Extent32& e, int query, int point) const {
    return ((query * e.heads + head) * e.levels + level_index) * points + point;
  }
};

template <class Plan>
struct TileSamples {
  float fx[Plan::kPerThread], fy[Plan::kPerThread], weight[Plan::kPerThread];
  int cell[Plan::kPerThread], place[Plan::kPerThread];  // place -1: takes no part
};

/// Cells of the tile's bounding box, made coarser until they fit the counters.
struct Buckets {
  int left, top, columns, shift_x, shift_y, count;
  MSP_DEVICE static Buckets of(const int (&box)[4], int limit) {
    const int width = box[1] - box[0], height = box[3] - box[2];
    Buckets b{box[0], box[2], width + 1, 0, 0, 0};
    while (((width >> b.shift_x) + 1) * ((height >> b.shift_y) + 1) > limit) {
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

/// Marks the tile's queries whose row of the output gradient is zero. Padding lies at the end of the queries: when the
/// last row of a tile is not zero the others are not looked at. True if any was marked; the whole block agrees.
template <class Plan, class T, class Access>
MSP_DEVICE bool mark_zero_rows(SortShared<Plan>& shared, const BackwardArguments<T, Access>& a, const SortTile& tile) {
  const int channels = a.extent.channels, row_size = a.extent.heads * channels;
  const T* rows =
      a.grad_output + (static_cast<int64_t>(tile.image) * a.extent.queries * a.extent.heads + tile.head) * channels;
  const auto is_zero = [&](int place) {
    const int query = place < tile.queries ? shared.order[place] : -1;
    bool nonzero = false;
    MSP_NO_UNROLL
    for (int c = lane_id(); c < channels && query >= 0; c += kLanes) {
      nonzero = nonzero || to_float(rows[query * row_size + c]) != 0.f;
    }
    return !any(nonzero);
  };
  if (!is_zero(tile.queries - 1)) return false;
  MSP_SYNC_BLOCK();
  MSP_NO_UNROLL
  for (int first = 0; first < tile.queries; first += Plan::kWarps) {
    const int place = first + warp_id();
    if (is_zero(place) && place < tile.queries && lane_id() == 0) shared.order[place] = ~shared.order[place];
  }
  MSP_SYNC_BLOCK();
  return true;
}

/// Loads and locates this thread's samples, and widens shared.box to their cells.
template <class Plan, class T, class Access>
MSP_DEVICE void load_samples(SortShared<Plan>& shared, const BackwardArguments<T, Access>& a, const SortTile& tile,
                             TileSamples<Plan>& own) {
  const Coordinates<Access> coordinates = a.coordinates.from(tile.first_sample);
  float xy[Plan::kPerThread][2];
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * Plan::kThreads;
    xy[k][0] = -1e30f, xy[k][1] = 0.f, own.weight[k] = 0.f;  // outside every level
    if (i < tile.samples) {
      const int place = a.points.quotient(i);
      coordinates.load(tile.sample(a.extent, shared.order[place], i - place * tile.points), xy[k], own.weight[k]);
    }
  }
  const bool marked = mark_zero_rows(shared, a, tile);
  int left = INT32_MAX, right = -1, top = INT32_MAX, bottom = -1;
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    const Sample<float> sample = locate(xy[k][0], xy[k][1], tile.height, tile.width);
    const int x = sample.x0 + 1, y = sample.y0 + 1;
    bool takes_part = sample.inside;
    if (marked && takes_part) {
      takes_part = shared.order[a.points.quotient(static_cast<int>(threadIdx.x) + k * Plan::kThreads)] >= 0;
    }
    own.fx[k] = sample.fx, own.fy[k] = sample.fy;
    own.cell[k] = (y << tile.column_bits) | x;
    own.place[k] = takes_part ? 0 : -1;
    if (takes_part) {
      left = x < left ? x : left, right = x > right ? x : right;
      top = y < top ? y : top, bottom = y > bottom ? y : bottom;
    }
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
    const int warp_sum = shared.warp_sums[i];
    if (i < warp_id()) base += warp_sum;
    total += warp_sum;
  }
  for (int i = begin; i < end; ++i) {
    const uint32_t pair = shared.counters[i];
    const uint32_t low = static_cast<uint32_t>(base), high = low + (pair & 0xffffu);
    base = static_cast<int>(high + (pair >> 16));
    shared.counters[i] = low | (high << 16);
  }
  return total;
}

/// Counting sort of the block's samples by bucket; returns how many take part. On return the records are in place.
template <class Plan>
MSP_DEVICE int sort_samples(SortShared<Plan>& shared, const SortTile& tile, const SmallDivisor& points, int row_size,
                            TileSamples<Plan>& own) {
  const int t = static_cast<int>(threadIdx.x);
  const Buckets buckets = Buckets::of(shared.box, Plan::kCounters);
  const int words = (buckets.count + 1) / 2;
  for (int i = t; i < words; i += Plan::kThreads) shared.counters[i] = 0;
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (own.place[k] < 0) continue;
    const int bucket = buckets(own.cell[k], tile.column_bits), half = (bucket & 1) * 16;
    own.place[k] = static_cast<int>((atomic_add(&shared.counters[bucket >> 1], 1u << half) >> half) & 0xffffu);
  }
  MSP_SYNC_BLOCK();
  const int total = scan_counters(shared, words);
  MSP_SYNC_BLOCK();
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    if (own.place[k] < 0) continue;
    const int bucket = buckets(own.cell[k], tile.column_bits), half = (bucket & 1) * 16;
    own.place[k] += static_cast<int>((shared.counters[bucket >> 1] >> half) & 0xffffu);
  }
  MSP_SYNC_BLOCK();  // the records take the counters' memory
  MSP_UNROLL
  for (int k = 0; k < Plan::kPerThread; ++k) {
    const int i = t + k * Plan::kThreads, place = own.place[k];
    shared.places[i] = static_cast<int16_t>(place);
    if (place < 0) continue;
    shared.samples[place] = {own.fx[k], own.fy[k], own.weight[k],
                             4 * static_cast<uint32_t>(shared.order[points.quotient(i)] * row_size)};
    shared.cells[place] = own.cell[k];
  }
  return total;
}

/// The lane's channels of one row of `value` or of the output gradient.
template <class Plan, class T>
MSP_DEVICE void load_row(const T* row, int channels_left, float (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      values[c] = c * Plan::kGroup < channels_left ? to_float(row[c * Plan::kGroup]) : 0.f;
    }
  } else {
    load_vector(row, values);
  }
}

template <class Plan>
MSP_DEVICE void add_row(float* row, int channels_left, const float (&values)[Plan::kVector]) {
  if constexpr (Plan::kStrided) {
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      if (c * Plan::kGroup < channels_left) atomic_add(row + c * Plan::kGroup, values[c]);
    }
  } else {
    atomic_add_row(row, values);
  }
}

/// What a lane keeps while it walks: the corners of the current cell. Corners are numbered 2 * (lower row) + (right
/// column).
template <class Plan, class T>
struct CellWalk {
  const T* value;     // of the level and head
  float* grad_value;  // likewise
  int width, height, row_size, column_bits, channels_left;
  uint32_t lane_offset;     // 4 * the lane's first channel
  int cell = -2, mask = 0;  // mask: corners inside the level
  uint32_t offset = 0;      // 4 * element offset of corner 0, modulo 2^32
  float sum[4][Plan::kVector] = {}, corner[4][Plan::kVector] = {};

  MSP_DEVICE uint32_t place(int k) const {
    return offset + 4 * static_cast<uint32_t>((k & 2 ? width * row_size : 0) + (k & 1 ? row_size : 0));
  }
  MSP_DEVICE void flush(int k) {
    if (mask >> k & 1) add_row<Plan>(at_offset(grad_value, place(k)), channels_left, sum[k]);
  }
  MSP_DEVICE void load(int k) {
    if (mask >> k & 1) load_row<Plan>(at_offset(value, place(k)), channels_left, corner[k]);
  }
  /// Moves on. To the right neighbour: the right column becomes the left one.
  MSP_DEVICE void enter(int next) {
    const bool neighbour = next == cell + 1;
    if constexpr (Plan::kAddValue) {
      flush(0);
      flush(2);
      if (!neighbour) {
        flush(1);
        flush(3);
      }
    }
    const int x = next & ((1 << column_bits) - 1), y = next >> column_bits;  // right column and lower row
    mask = (x > 0 ? 5 : 0) | (x < width ? 10 : 0);
    mask &= (y > 0 ? 3 : 0) | (y < height ? 12 : 0);
    if (Plan::kStrided && channels_left <= 0) mask = 0;
    offset = 4 * static_cast<uint32_t>(((y - 1) * width + x - 1) * row_size) + lane_offset;
    cell = next;
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
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
  MSP_DEVICE void add(const SortedSample& sample, const float (&gradient)[Plan::kVector], float (&dots)[4]) {
    const float w11 = sample.fx * sample.fy, w01 = sample.fx - w11, w10 = sample.fy - w11, w00 = 1.f - sample.fx - w10;
    const float weights[4] = {w00 * sample.weight, w01 * sample.weight, w10 * sample.weight, w11 * sample.weight};
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) {
      MSP_UNROLL
      for (int k = 0; k < 4; ++k) {
        sum[k][c] = muspace::fma(weights[k], gradient[c], sum[k][c]);
        dots[k] = muspace::fma(corner[k][c], gradient[c], dots[k]);
      }
    }
  }
};

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

/// Each group walks its share of the sorted samples, adds to the gradient of `value` and leaves the inner products.
template <class Plan, class T, class Access>
MSP_DEVICE void walk_share(SortShared<Plan>& shared, const BackwardArguments<T, Access>& a, const SortTile& tile,
                           int total) {
  const int group = static_cast<int>(threadIdx.x) / Plan::kGroup,
            group_lane = static_cast<int>(threadIdx.x) % Plan::kGroup;
  const int share =
      ((total + Plan::kGroups - 1) / Plan::kGroups) | 1;  // odd: the groups of a warp read different banks
  const int begin = group * share < total ? group * share : total;
  const int end = begin + share < total ? begin + share : total;
  const int first_channel = Plan::kStrided ? group_lane : group_lane * Plan::kVector;
  const int row_size = a.extent.heads * a.extent.channels, head_channel = tile.head * a.extent.channels;
  const int64_t level_row = static_cast<int64_t>(tile.image) * a.extent.rows + tile.start;
  const T* gradients = a.grad_output + static_cast<int64_t>(tile.image) * a.extent.queries * row_size + head_channel;
  CellWalk<Plan, T> walk{a.value + level_row * row_size + head_channel,
                         a.grad_value + level_row * row_size + head_channel,
                         tile.width,
                         tile.height,
                         row_size,
                         tile.column_bits,
                         a.extent.channels - first_channel,
                         4 * static_cast<uint32_t>(first_channel)};
  MSP_NO_UNROLL
  for (int j = begin; j < begin + share; ++j) {
    const bool active = j < end;
    float dots[4] = {};
    if (active) {
      const SortedSample sample = shared.samples[j];
      const int cell = shared.cells[j];
      float gradient[Plan::kVector] = {};
      if (!Plan::kStrided || walk.channels_left > 0) {
        load_row<Plan>(at_offset(gradients, sample.grad_row + walk.lane_offset), walk.channels_left, gradient);
      }
      if (cell != walk.cell) walk.enter(cell);
      walk.add(sample, gradient, dots);
    }
    const float dot = transposed_sum<Plan::kGroup>(dots);
    MSP_SYNC_WARP();  // every lane of the group has read its record
    if (active && group_lane < 4) shared.dots[j].dot[group_lane] = dot;
  }
  if constexpr (Plan::kAddValue) {
    MSP_UNROLL
    for (int k = 0; k < 4; ++k) walk.flush(k);
  }
}

/// Gradients of locations and weights, in the order of the samples in memory.
template <class Plan, class T, class Access>
MSP_DEVICE void write_sample_gradients(const SortShared<Plan>& shared, const BackwardArguments<T, Access>& a,
                                       const SortTile& tile, bool sorted) {
  const Coordinates<Access> coordinates = a.coordinates.from(tile.first_sample);
  const CoordinateGradients<Access> gradients = a.grad_coordinates.from(tile.first_sample);
  MSP_UNROLL_BY(2)
  for (int i = static_cast<int>(threadIdx.x); i < tile.samples; i += Plan::kThreads) {
    const int query_place = a.points.quotient(i), order = shared.order[query_place], query = order < 0 ? ~order : order;
    const int number = tile.sample(a.extent, query, i - query_place * tile.points);
    const int place = sorted ? shared.places[i] : -1;
    SampleGradient<float> gradient{};
    if (place >= 0) {
      float xy[2], attention;
      coordinates.load(number, xy, attention);
      const Sample<float> sample = locate(xy[0], xy[1], tile.height, tile.width);
      const SampleDots d = shared.dots[place];
      gradient = sample_gradient({d.dot[0], d.dot[1], d.dot[2], d.dot[3]}, sample.fx, sample.fy, attention, tile.height,
                                 tile.width);
    }
    gradients.store(number, gradient);
  }
}

template <class Plan, class T, class Access>
MSP_DEVICE SortTile sort_tile(const SortShared<Plan>& shared, const BackwardArguments<T, Access>& a,
                              bool table_filled) {
  const int left = a.extent.queries - a.grid.tile() * a.tile_queries;
  SortTile tile;
  tile.image = a.grid.image();
  tile.head = a.levels_divisor.quotient(a.grid.row());
  tile.level_index = a.grid.row() - tile.head * a.extent.levels;
  tile.queries = left < a.tile_queries ? left : a.tile_queries;
  tile.points = a.extent.points;
  tile.samples = tile.queries * tile.points;
  tile.first_sample =
      static_cast<int64_t>(tile.image) * a.extent.queries * a.extent.heads * a.extent.levels * tile.points;
  const TableLevel level = table_filled ? shared.levels[tile.level_index] : table_level(a.levels, tile.level_index);
  tile.width = MSP_UNIFORM(level.width);
  tile.height = MSP_UNIFORM(level.height);
  tile.start = MSP_UNIFORM(level.start);
  tile.column_bits = 0;
  MSP_NO_UNROLL
  while (tile.width >> tile.column_bits) ++tile.column_bits;
  return tile;
}

template <class Plan, class T, class Access>
MSP_KERNEL(Plan::kThreads, Plan::kBlocks)
backward_block_sorted(const BackwardArguments<T, Access> a) {
  MSP_SHARED SortShared<Plan> shared;
  if (threadIdx.x < 4) shared.box[threadIdx.x] = threadIdx.x % 2 ? -1 : INT32_MAX;
  const bool strips = a.strip_log2 >= 0;
  if (strips) {
    fill_level_table(shared.levels, a.levels, a.extent.levels);
    MSP_SYNC_BLOCK();
  }
  const SortTile tile = sort_tile(shared, a, strips);
  fill_query_order(shared.order, tile.queries, a.grid.tile() * a.tile_queries, a.extent.queries, shared.levels,
                   a.extent.levels, a.strip_log2);
  MSP_SYNC_BLOCK();
  TileSamples<Plan> own;
  load_samples(shared, a, tile, own);
  MSP_SYNC_BLOCK();
  const bool sorted = shared.box[1] >= 0;  // any sample takes part
  if (sorted) {
    const int total = sort_samples(shared, tile, a.points, a.extent.heads * a.extent.channels, own);
    MSP_SYNC_BLOCK();
    walk_share(shared, a, tile, total);
    MSP_SYNC_BLOCK();
  }
  write_sample_gradients(shared, a, tile, sorted);
}

}  // namespace muspace::msda
