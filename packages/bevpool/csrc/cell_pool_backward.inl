// SPDX-License-Identifier: Apache-2.0
// Gradients of the sums per cell: kernels.
#pragma once

#include <type_traits>

#include "cell_pool_rows.inl"
#include "muspace/atomic.h"

namespace muspace::bevpool {

// ------------------------------------------------------------------------------------- gradient of the unweighted sum

constexpr int kGatherThreads = 256;

struct GatherArguments {
  const void* cells;  // channels last
  const int32_t* keys;
  void* rows;
  int64_t points;
  uint32_t cell_count;
  int channels;
  Storage cell_type, row_type;
};

/// Rows of the same type, a multiple of 16 bytes: copied as they lie in memory, `block_points` points a block.
template <int kVectors, int kFlight, int kThreads>
MSP_KERNEL(kThreads, 2048 / kThreads)
gather_vectors(const GatherArguments a, int vectors_given, int block_points) {
  const int vectors = kVectors > 0 ? kVectors : vectors_given, t = static_cast<int>(threadIdx.x);
  const int64_t first_point = static_cast<int64_t>(blockIdx.x) * block_points, left = a.points - first_point;
  const int count = static_cast<int>(left < block_points ? left : block_points) * vectors;
  const int32_t* keys = a.keys + first_point;
  const Words<16>* source = static_cast<const Words<16>*>(a.cells);
  Words<16>* target = static_cast<Words<16>*>(a.rows) + first_point * vectors;
  for (int first = t; first < count; first += kThreads * kFlight) {
    Words<16> loaded[kFlight];
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      const int i = first + u * kThreads, point = (i < count ? i : first) / vectors;
      const uint32_t cell = static_cast<uint32_t>(keys[point]);
      loaded[u] = Words<16>{};
      if (i < count && cell < a.cell_count) {
        loaded[u] = load_words<16>(source + (static_cast<int64_t>(cell) * vectors + (i - point * vectors)));
      }
    }
    MSP_UNROLL
    for (int u = 0; u < kFlight; ++u) {
      const int i = first + u * kThreads;
      if (i < count) store_words<16>(target + i, loaded[u]);
    }
  }
}

template <class Unused>
MSP_KERNEL(kGatherThreads, 1)
gather_elements(const GatherArguments a) {
  const int64_t count = a.points * a.channels;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kGatherThreads + static_cast<int>(threadIdx.x); i < count;
       i += static_cast<int64_t>(gridDim.x) * kGatherThreads) {
    const int64_t point = i / a.channels;
    const uint32_t cell = static_cast<uint32_t>(a.keys[point]);
    const bool known = cell < a.cell_count;
    const int64_t from = static_cast<int64_t>(cell) * a.channels + (i - point * a.channels);
    store_any(a.rows, a.row_type, i, known ? load_any(a.cells, a.cell_type, from) : 0.f);
  }
}

// --------------------------------------------------------------------------------------- gradients of the weighted sum

/// A warp owns a row: it holds the row and its gradient in registers, walks the points of the row and reads the
/// gradient of their cells once for both products.
struct OwnerArguments {
  const void* cells;  // gradient of the output, channels last
  const void* rows;   // channels last
  void* grad_rows;    // likewise, type of the rows
  const void* weights;
  float* grad_weights;
  const int32_t* keys;         // frustum order, if not null
  const int32_t *starts, *order;  // of the plan by rows
  const PlanEntry* entries;
  int64_t depth_bins, pixels;
  uint32_t cell_count, weight_count;
  int rows_count, channels;
  Storage cell_type, row_type, weight_type;
  WeightRoute route;
  bool depth_warp;  // the products come from this walk, not from a kernel of their own
};

/// kVector elements a load, kGroup lanes of kSteps loads: the channels of a pass. kFlight gradient rows at a time.
template <int kVector_, int kGroup_, int kSteps_, int kFlight_, int kThreads_, int kBlocks_>
struct OwnerShape {
  static constexpr int kVector = kVector_, kGroup = kGroup_, kSteps = kSteps_, kFlight = kFlight_;
  static constexpr int kThreads = kThreads_, kBlocks = kBlocks_, kWarps = kThreads / kLanes;
  static constexpr int kGroups = kLanes / kGroup, kWidth = kVector * kGroup * kSteps, kOwn = kVector * kSteps;
  static constexpr bool kTree = (kGroup & (kGroup - 1)) == 0;  // products of a row are added by shuffles
  static constexpr int kPitch = kTree ? 1 : kGroup + 1;
};

struct alignas(8) OwnerRecord {
  int32_t cell;
  float weight;
};

template <class Shape>
struct OwnerShared {
  OwnerRecord records[Shape::kWarps][kLanes];
  float products[Shape::kWarps][kLanes * Shape::kPitch];
};

/// A point of the row, held by a lane.
struct OwnedPoint {
  int32_t cell;    // negative: none
  int32_t target;  // of its product; negative: none
  float weight;
};

/// Point `number` of row `row`; `first` is the row's first entry in the plan, or its pixel's place in an image.
MSP_DEVICE OwnedPoint owned_point(const OwnerArguments& a, int32_t first, int number, int count) {
  OwnedPoint point{-1, -1, 0.f};
  if (number >= count) return point;
  uint32_t cell, weight;
  if (a.keys) {
    point.target = first + number * static_cast<int32_t>(a.pixels);
    weight = static_cast<uint32_t>(point.target);
    cell = static_cast<uint32_t>(a.keys[weight]);
  } else {
    const Words<8> words = load_words<8>(a.entries + first + number);
    cell = words.word[0];
    weight = words.word[1];
    point.target = a.route == WeightRoute::per_point ? a.order[first + number] : static_cast<int32_t>(weight);
    if (weight >= a.weight_count) {
      point.target = -1;
      return point;
    }
  }
  if (cell >= a.cell_count) return point;
  point.cell = static_cast<int32_t>(cell);
  point.weight = load_any(a.weights, a.weight_type, weight);
  return point;
}

MSP_DEVICE void store_product(const OwnerArguments& a, int32_t target, float product, bool add) {
  if (a.route == WeightRoute::atomic) {
    atomic_add(a.grad_weights + target, product);
  } else {
    a.grad_weights[target] = add ? a.grad_weights[target] + product : product;
  }
}

/// kVector elements of a row; of AnyType one, whose type is known only at run time.
template <class T, int kVector>
struct OwnerVector {
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  RawVector<T, kVector> raw;
  MSP_DEVICE void clear() { raw = zero_vector<T, kVector>(); }
  MSP_DEVICE void load(const char* address, Storage) { raw = load_words<sizeof(raw)>(address); }
  MSP_DEVICE float at(int i) const { return element<T, kVector>(raw, i); }
};
struct AnyType {};
template <>
struct OwnerVector<AnyType, 1> {
  float value;
  MSP_DEVICE void clear() { value = 0.f; }
  MSP_DEVICE void load(const char* address, Storage type) { value = load_any(address, type, 0); }
  MSP_DEVICE float at(int) const { return value; }
};

/// Bytes of an element of what a shape of T loads.
template <class T>
MSP_DEVICE int owner_bytes(Storage type) {
  if constexpr (std::is_same_v<T, AnyType>) {
    return type == Storage::f32 ? 4 : 2;
  } else {
    return static_cast<int>(sizeof(T));
  }
}

/// What a lane of the walk holds: its channels of the row and of the row's gradient.
template <class Shape>
struct OwnerLane {
  const char* cells;  // its first channel of the first cell
  int stride;         // bytes from cell to cell
  int channels_left;  // from its first channel on; not positive: it has none
  float row[Shape::kOwn], sum[Shape::kOwn];
};

/// Adds kFlight * kGroups records from `first` on; the lanes' parts of the products go to `products`.
template <class Shape, class T>
MSP_DEVICE void walk_records(const OwnerArguments& a, const OwnerRecord* records, float* products, int first, int count,
                             int group, int lane, OwnerLane<Shape>& own) {
  OwnerVector<T, Shape::kVector> gradient[Shape::kFlight][Shape::kSteps];
  float weight[Shape::kFlight];
  MSP_UNROLL
  for (int u = 0; u < Shape::kFlight; ++u) {
    const int i = first + u * Shape::kGroups + group;
    const bool exists = i < count && group < Shape::kGroups;
    const OwnerRecord record = records[exists ? i : 0];
    weight[u] = exists ? record.weight : 0.f;
    const char* place = own.cells + static_cast<int64_t>(record.cell) * own.stride;
    const int distance = Shape::kGroup * Shape::kVector * owner_bytes<T>(a.cell_type);
    MSP_UNROLL
    for (int j = 0; j < Shape::kSteps; ++j) {
      gradient[u][j].clear();
      if (exists && j * Shape::kGroup * Shape::kVector < own.channels_left) {
        gradient[u][j].load(place + j * distance, a.cell_type);
      }
    }
  }
  MSP_UNROLL
  for (int u = 0; u < Shape::kFlight; ++u) {
    const int i = first + u * Shape::kGroups + group;
    float product = 0.f;
    MSP_UNROLL
    for (int j = 0; j < Shape::kSteps; ++j) {
      MSP_UNROLL
      for (int e = 0; e < Shape::kVector; ++e) {
        const float value = gradient[u][j].at(e);
        own.sum[j * Shape::kVector + e] = muspace::fma(weight[u], value, own.sum[j * Shape::kVector + e]);
        product = muspace::fma(own.row[j * Shape::kVector + e], value, product);
      }
    }
    if constexpr (Shape::kTree) {
      MSP_UNROLL
      for (int mask = 1; mask < Shape::kGroup; mask <<= 1) product += shuffle_xor(product, mask);
      if (lane == 0 && i < count) products[i] = product;
    } else {
      if (group < Shape::kGroups && i < count) products[i * Shape::kPitch + lane] = product;
    }
  }
}

/// Adds the sums of the groups of lanes; every lane ends with the total of its channels.
template <class Shape>
MSP_DEVICE void add_groups(float (&sum)[Shape::kOwn], int lane) {
  MSP_UNROLL
  for (int e = 0; e < Shape::kOwn; ++e) {
    if constexpr (Shape::kTree) {
      MSP_UNROLL
      for (int mask = Shape::kGroup; mask < kLanes; mask <<= 1) sum[e] += shuffle_xor(sum[e], mask);
    } else {
      const float own = sum[e];
      float total = shuffle(own, lane);
      MSP_UNROLL
      for (int group = 1; group < Shape::kGroups; ++group) total += shuffle(own, lane + group * Shape::kGroup);
      sum[e] = total;
    }
  }
}

template <class Shape, class T>
MSP_DEVICE void load_row(const OwnerArguments& a, int32_t row, int channel, OwnerLane<Shape>& own) {
  own.channels_left = a.channels - channel;
  own.stride = a.channels * owner_bytes<T>(a.cell_type);
  own.cells = static_cast<const char*>(a.cells) + (own.channels_left > 0 ? channel : 0) * owner_bytes<T>(a.cell_type);
  const int64_t place = (static_cast<int64_t>(row) * a.channels + channel) * owner_bytes<T>(a.row_type);
  MSP_UNROLL
  for (int j = 0; j < Shape::kSteps; ++j) {
    constexpr int kDistance = Shape::kGroup * Shape::kVector;
    OwnerVector<T, Shape::kVector> vector;
    vector.clear();
    if (row < a.rows_count && j * kDistance < own.channels_left) {
      vector.load(static_cast<const char*>(a.rows) + place + j * kDistance * owner_bytes<T>(a.row_type), a.row_type);
    }
    MSP_UNROLL
    for (int e = 0; e < Shape::kVector; ++e) {
      own.row[j * Shape::kVector + e] = vector.at(e);
      own.sum[j * Shape::kVector + e] = 0.f;
    }
  }
}

template <class Shape, class T>
MSP_DEVICE void store_row_gradient(const OwnerArguments& a, int32_t row, int channel, const OwnerLane<Shape>& own) {
  const int64_t place = static_cast<int64_t>(row) * a.channels + channel;
  MSP_UNROLL
  for (int j = 0; j < Shape::kSteps; ++j) {
    constexpr int kDistance = Shape::kGroup * Shape::kVector;
    if (j * kDistance >= a.channels - channel) continue;
    if constexpr (std::is_same_v<T, AnyType>) {
      store_any(a.grad_rows, a.row_type, place + j * kDistance, own.sum[j]);
    } else {
      store_sums<T, Shape::kVector>(static_cast<T*>(a.grad_rows) + place + j * kDistance, own.sum + j * Shape::kVector);
    }
  }
}

/// One pass over the points of a row, for the channels from `first_channel` on.
template <class Shape, class T>
MSP_DEVICE void own_row(OwnerShared<Shape>& shared, const OwnerArguments& a, int32_t row, int32_t first, int count,
                        int first_channel) {
  const int lane = lane_id(), group = lane / Shape::kGroup, within = lane - group * Shape::kGroup;
  OwnerRecord* records = shared.records[warp_id()];
  float* products = shared.products[warp_id()];
  OwnerLane<Shape> own;
  load_row<Shape, T>(a, row, first_channel + within * Shape::kVector, own);
  const int most = converged_max(count);
  OwnedPoint next = owned_point(a, first, lane, count);
  MSP_NO_UNROLL
  for (int base = 0; base < most; base += kLanes) {
    const OwnedPoint point = next;
    next = owned_point(a, first, base + kLanes + lane, count);
    const uint32_t with_cell = ballot(point.cell >= 0);
    const int place = popcount(with_cell & ((1u << lane) - 1u)), points = popcount(with_cell);
    if (point.cell >= 0) records[place] = OwnerRecord{point.cell, point.weight};
    MSP_SYNC_WARP();
    const int longest = converged_max(points);
    MSP_NO_UNROLL
    for (int i = 0; i < longest; i += Shape::kGroups * Shape::kFlight) {
      walk_records<Shape, T>(a, records, products, i, points, group, within, own);
    }
    MSP_SYNC_WARP();
    if (point.target >= 0 && a.depth_warp) {
      float product = 0.f;
      if (point.cell >= 0) {
        MSP_UNROLL
        for (int k = 0; k < (Shape::kTree ? 1 : Shape::kGroup); ++k) product += products[place * Shape::kPitch + k];
      }
      store_product(a, point.target, product, first_channel > 0);
    }
    MSP_SYNC_WARP();
  }
  add_groups<Shape>(own.sum, within);
  if (row >= a.rows_count || group != 0) return;
  store_row_gradient<Shape, T>(a, row, first_channel + within * Shape::kVector, own);
}

template <class Shape, class T>
MSP_KERNEL(Shape::kThreads, Shape::kBlocks)
own_rows(const OwnerArguments a) {
  MSP_SHARED OwnerShared<Shape> shared;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * Shape::kWarps + warp_id();
  const int32_t row = number < a.rows_count ? static_cast<int32_t>(number) : a.rows_count;
  int32_t first = 0;
  int count = 0;
  if (row < a.rows_count) {
    if (a.keys) {
      const int32_t pixels = static_cast<int32_t>(a.pixels), image = row / pixels;
      count = static_cast<int>(a.depth_bins);
      first = image * count * pixels + (row - image * pixels);
    } else {
      first = a.starts[row];
      count = a.starts[row + 1] - first;
    }
  }
  for (int first_channel = 0; first_channel < a.channels; first_channel += Shape::kWidth) {
    own_row<Shape, T>(shared, a, row, first, count, first_channel);
  }
}

// --------------------------------------------------------------------------------------------- products point by point

constexpr int kPointThreads = 256;

/// The row whose entries hold place `entry`: the last one that begins there or before.
MSP_DEVICE int32_t row_of_entry(const OwnerArguments& a, int32_t entry) {
  int32_t low = 0, high = a.rows_count;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (a.starts[middle] <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// One thread a point forms the whole product of a gradient row and the row.
template <class Unused>
MSP_KERNEL(kPointThreads, 1)
point_products(const OwnerArguments a, int64_t points) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPointThreads + static_cast<int>(threadIdx.x);
  if (i >= points || (!a.keys && i >= a.starts[a.rows_count])) return;
  const int32_t number = static_cast<int32_t>(i);
  int32_t row, first = number;
  if (a.keys) {
    const int32_t pixels = static_cast<int32_t>(a.pixels), depth_bins = static_cast<int32_t>(a.depth_bins);
    row = number / pixels / depth_bins * pixels + number % pixels;
  } else {
    row = row_of_entry(a, number);
  }
  const OwnedPoint point = owned_point(a, first, 0, 1);
  if (point.target < 0) return;
  float product = 0.f;
  for (int c = 0; point.cell >= 0 && c < a.channels; ++c) {
    product = muspace::fma(load_any(a.cells, a.cell_type, static_cast<int64_t>(point.cell) * a.channels + c),
                           load_any(a.rows, a.row_type, static_cast<int64_t>(row) * a.channels + c), product);
  }
  store_product(a, point.target, product, false);
}

}  // namespace muspace::bevpool
