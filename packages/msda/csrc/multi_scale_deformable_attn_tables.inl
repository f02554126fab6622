// SPDX-License-Identifier: Apache-2.0
// What the kernels of multi_scale_deformable_attn share: level table, query order, access to locations and weights.
#pragma once

#include <type_traits>

#include "multi_scale_deformable_attn.h"
#include "multi_scale_deformable_attn_math.h"
#include "muspace/atomic.h"
#include "muspace/numeric.h"
#include "muspace/target.h"
#include "muspace/vec.h"
#include "muspace/warp.h"

namespace muspace::msda {

constexpr int kMaxTableLevels = 8;  // levels that fit the table in shared memory; more take the general route

struct alignas(16) TableLevel {
  int32_t width, height, start, unused;
};

/// The level arrays of the caller, in device memory: they are read inside the kernels, never by the host.
struct LevelSource {
  const int64_t* spatial_shapes;
  const int64_t* level_start_index;
  int64_t rows;
};

MSP_DEVICE TableLevel table_level(const LevelSource& source, int index) {
  int64_t start = 0;
  if (source.level_start_index) {
    start = source.level_start_index[index];
  } else {
    uint64_t rows_above = 0;
    MSP_NO_UNROLL
    for (int l = 0; l < index; ++l) rows_above += static_cast<uint64_t>(stated_rows(source.spatial_shapes, l));
    start = static_cast<int64_t>(rows_above);
  }
  const Level level =
      fitted_level(source.spatial_shapes[2 * index], source.spatial_shapes[2 * index + 1], start, source.rows);
  TableLevel entry;
  entry.width = level.width;
  entry.height = level.height;
  entry.start = static_cast<int32_t>(level.start);
  entry.unused = 0;
  return entry;
}

/// Every thread of the block calls it; a barrier has to follow. A block has more threads than the table has entries.
MSP_DEVICE void fill_level_table(TableLevel* table, const LevelSource& source, int levels) {
  const int l = static_cast<int>(threadIdx.x);
  if (l < levels) table[l] = table_level(source, l);
}

/// Self-attention over the levels' own pixels: the queries are the pixels of the levels, one level after the other.
MSP_DEVICE bool queries_are_pixels(const TableLevel* table, int levels, int queries) {
  int64_t pixels = 0;
  MSP_NO_UNROLL
  for (int l = 0; l < levels; ++l) pixels += static_cast<int64_t>(table[l].width) * table[l].height;
  return pixels == queries;
}

/// The `index`-th query when the pixels of each level are walked in strips of 2^strip_log2 rows, column by column
/// within a strip. A bijection on [0, queries), so the grid depends on the number of queries alone. Neighbours in this
/// order sample neighbouring pixels in both directions, which is what the first cache level is large enough for.
MSP_DEVICE int strip_query(const TableLevel* table, int levels, int index, int strip_log2) {
  int first = 0, l = 0;
  MSP_NO_UNROLL
  for (; l + 1 < levels; ++l) {
    const int pixels = table[l].width * table[l].height;
    if (index < first + pixels) break;
    first += pixels;
  }
  const unsigned width = static_cast<unsigned>(table[l].width), height = static_cast<unsigned>(table[l].height);
  const unsigned strip_pixels = width << strip_log2, offset = static_cast<unsigned>(index - first);
  const unsigned strip = offset / strip_pixels, within = offset - strip * strip_pixels, top = strip << strip_log2;
  const unsigned rows = height - top < (1u << strip_log2) ? height - top : 1u << strip_log2;
  const unsigned column = rows == (1u << strip_log2) ? within >> strip_log2 : within / rows;
  return first + static_cast<int>((top + within - column * rows) * width + column);
}

/// order[i] = query at position first + i, or -1 past the end: strips of 2^strip_log2 rows if the queries are the
/// pixels of the levels, their natural order otherwise.
MSP_DEVICE void fill_query_order(int* order, int count, int first, int queries, const TableLevel* table, int levels,
                                 int strip_log2) {
  const bool strips = strip_log2 >= 0 && queries_are_pixels(table, levels, queries);
  MSP_NO_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int index = first + i;
    int query = index < queries ? index : -1;
    if (strips && query >= 0) query = strip_query(table, levels, index, strip_log2);
    order[i] = query;
  }
}

// Locations and weights are fp32 (known when compiled), or each of its own type, known when run. Indices are 32-bit
// after shifting the pointer to an image, 64-bit otherwise.
struct Float32Access {
  using scalar = float;
  static Float32Access of(Storage) { return {}; }
  template <class Void>
  MSP_DEVICE Void* shift(Void* data, int64_t count) const {
    return reinterpret_cast<Void*>(reinterpret_cast<std::uintptr_t>(data) + count * 4);
  }
  MSP_DEVICE float load(const void* data, int index) const {
    float value[1];
    load_vector(static_cast<const float*>(data) + index, value);
    return value[0];
  }
  MSP_DEVICE void load_pair(const void* data, int index, float (&pair)[2]) const {
    load_vector(static_cast<const float*>(data) + 2 * index, pair);
  }
  MSP_DEVICE void store(void* data, int index, float value) const { static_cast<float*>(data)[index] = value; }
  MSP_DEVICE void store_pair(void* data, int index, float x, float y) const {
    const float pair[2] = {x, y};
    store_vector(static_cast<float*>(data) + 2 * index, pair);
  }
};

template <bool kDouble>
struct AnyAccess {
  using scalar = std::conditional_t<kDouble, double, float>;
  Storage storage;
  static AnyAccess of(Storage storage) { return {storage}; }
  template <class Use>
  MSP_DEVICE void with_type(Use use) const {
    if constexpr (kDouble) {
      if (storage == Storage::f64) return use(double{});
      return use(float{});
    } else {
      if (storage == Storage::f32) return use(float{});
      if (storage == Storage::f16) return use(half_t{});
      return use(bfloat16_t{});
    }
  }
  template <class Void>
  MSP_DEVICE Void* shift(Void* data, int64_t count) const {
    const int64_t size = storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2;
    return reinterpret_cast<Void*>(reinterpret_cast<std::uintptr_t>(data) + count * size);
  }
  template <class Index>
  MSP_DEVICE scalar load(const void* data, Index index) const {
    scalar result = 0;
    with_type([&](auto type) { result = to_float(static_cast<const decltype(type)*>(data)[index]); });
    return result;
  }
  template <class Index>
  MSP_DEVICE void load_pair(const void* data, Index index, scalar (&pair)[2]) const {
    with_type([&](auto type) {
      const auto* source = static_cast<const decltype(type)*>(data) + 2 * index;
      pair[0] = to_float(source[0]);
      pair[1] = to_float(source[1]);
    });
  }
  template <class Index>
  MSP_DEVICE void store(void* data, Index index, scalar value) const {
    with_type([&](auto type) { static_cast<decltype(type)*>(data)[index] = from_float<decltype(type)>(value); });
  }
  template <class Index>
  MSP_DEVICE void store_pair(void* data, Index index, scalar x, scalar y) const {
    store(data, 2 * index, x);
    store(data, 2 * index + 1, y);
  }
};

/// Locations and weights of samples, numbered as they lie in memory: ((b * Q + q) * H + head) * L * P + l * P + p.
template <class Access>
struct Coordinates {
  const void* locations;
  const void* weights;
  Access location_access, weight_access;

  /// The view that begins at sample `first`.
  MSP_DEVICE Coordinates from(int64_t first) const {
    return {location_access.shift(locations, 2 * first), weight_access.shift(weights, first), location_access,
            weight_access};
  }
  template <class Index>
  MSP_DEVICE void load(Index sample, typename Access::scalar (&xy)[2], typename Access::scalar& weight) const {
    location_access.load_pair(locations, sample, xy);
    weight = weight_access.load(weights, sample);
  }
};

/// Where the gradients of locations and weights go, in the layout and types of `Coordinates`.
template <class Access>
struct CoordinateGradients {
  void* locations;
  void* weights;
  Access location_access, weight_access;

  MSP_DEVICE CoordinateGradients from(int64_t first) const {
    return {location_access.shift(locations, 2 * first), weight_access.shift(weights, first), location_access,
            weight_access};
  }
  template <class Index, class A>
  MSP_DEVICE void store(Index sample, const SampleGradient<A>& gradient) const {
    weight_access.store(weights, sample, gradient.weight);
    location_access.store_pair(locations, sample, gradient.x, gradient.y);
  }
};

template <class Access>
Coordinates<Access> coordinates_of(const Inputs& inputs) {
  return {inputs.sampling_locations, inputs.attention_weights, Access::of(inputs.location_type),
          Access::of(inputs.weight_type)};
}

template <class Access>
CoordinateGradients<Access> coordinate_gradients_of(const Inputs& inputs, const Gradients& gradients) {
  return {gradients.sampling_locations, gradients.attention_weights, Access::of(inputs.location_type),
          Access::of(inputs.weight_type)};
}

/// Division of small numbers by the number of points: exact for dividend * divisor < 2^31.
struct SmallDivisor {
  uint32_t divisor, factor;
  static SmallDivisor of(int64_t divisor) {
    return {static_cast<uint32_t>(divisor), static_cast<uint32_t>((int64_t{1} << 31) / divisor + 1)};
  }
  MSP_DEVICE int quotient(int dividend) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * factor) >> 31);
  }
};

/// Grid of a kernel whose blocks are (image, row of the grid, tile of queries): tiles are neighbours in launch order,
/// or rows are. `rows` are heads, or (head, level) pairs. Coordinates come straight from the block index, so they stay
/// scalar.
struct BlockGrid {
  int rows, tiles, images;
  bool rows_first;
  dim3 dimensions() const {
    return rows_first ? dim3(static_cast<unsigned>(rows), static_cast<unsigned>(tiles), static_cast<unsigned>(images))
                      : dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(rows), static_cast<unsigned>(images));
  }
  MSP_DEVICE int row() const { return static_cast<int>(rows_first ? blockIdx.x : blockIdx.y); }
  MSP_DEVICE int tile() const { return static_cast<int>(rows_first ? blockIdx.y : blockIdx.x); }
  MSP_DEVICE int image() const { return static_cast<int>(blockIdx.z); }
};

/// 32-bit extents; the launchers route larger problems to the general kernels.
struct Extent32 {
  int batch, rows, heads, channels, queries, levels, points;
  static Extent32 of(const Extent& e) {
    return {static_cast<int>(e.batch),    static_cast<int>(e.rows),    static_cast<int>(e.heads),
            static_cast<int>(e.channels), static_cast<int>(e.queries), static_cast<int>(e.levels),
            static_cast<int>(e.points)};
  }
};

/// Element at a distance of kUnit (4, or the size of an element) times its index, given as 32 unsigned bits: one
/// addition to a scalar base pointer.
template <int kUnit = 4, class T>
MSP_DEVICE T* at_offset(T* base, uint32_t unit_times_index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  if constexpr (sizeof(T) > kUnit) return base + unit_times_index / kUnit;
  constexpr uint32_t kDivisor = sizeof(T) < kUnit ? kUnit / sizeof(T) : 1;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + unit_times_index / kDivisor);
}

constexpr int64_t kInt32Max = INT32_MAX;
constexpr int64_t kMaxGridYZ = 65535;

/// Whether the 32-bit offsets of the fused and block_sorted kernels reach everything within an image.
inline bool offsets_fit(const Extent& e) {
  const int64_t row = e.heads * e.channels, samples = e.levels * e.points;
  return row <= kInt32Max / 2 && e.rows <= kInt32Max / 2 / row && e.queries <= kInt32Max / 2 / row &&
         samples <= kInt32Max / 2 && e.queries * e.heads <= kInt32Max / 2 / samples && e.batch <= kMaxGridYZ &&
         e.heads * e.levels <= 32767;
}

inline bool float32_coordinates(const Inputs& inputs) {
  return inputs.location_type == Storage::f32 && inputs.weight_type == Storage::f32;
}

inline LevelSource levels_of(const Inputs& inputs) {
  return {inputs.spatial_shapes, inputs.level_start_index, inputs.extent.rows};
}

}  // namespace muspace::msda
