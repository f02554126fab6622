// SPDX-License-Identifier: Apache-2.0
// What the kernels of flash_bevpool and flash_bevpool_sca share: access to arrays of a type known when run, channels of
// a row, divisions by numbers known when launched.
#pragma once

#include <type_traits>

#include "flash_bevpool_math.h"
#include "muspace/atomic.h"
#include "muspace/numeric.h"
#include "muspace/target.h"
#include "muspace/vec.h"
#include "muspace/warp.h"

namespace muspace::bevpool {

constexpr int64_t kInt32Max = INT32_MAX;

// Offsets and attention weights of type fp32, known when compiled; any other type, and depth parameters, when run.
struct Float32Array {
  const float* data;
  static Float32Array of(const void* data, Storage) { return {static_cast<const float*>(data)}; }
  MSP_DEVICE bool empty() const { return data == nullptr; }
  MSP_DEVICE float load(int64_t index) const {
    float value[1];
    load_vector(data + index, value);
    return value[0];
  }
  MSP_DEVICE void load_pair(int64_t pair, float (&values)[2]) const { load_vector(data + 2 * pair, values); }
};

struct AnyArray {
  const void* data;
  Storage type;
  bool float_pairs;  // fp32, aligned to pairs
  static AnyArray of(const void* data, Storage type) {
    return {data, type, type == Storage::f32 && reinterpret_cast<uintptr_t>(data) % 8 == 0};
  }
  MSP_DEVICE bool empty() const { return data == nullptr; }
  MSP_DEVICE float load(int64_t index) const {
    if (type == Storage::f32) return static_cast<const float*>(data)[index];
    if (type == Storage::f16) return to_float(static_cast<const half_t*>(data)[index]);
    return to_float(static_cast<const bfloat16_t*>(data)[index]);
  }
  MSP_DEVICE void load_pair(int64_t pair, float (&values)[2]) const {
    if (float_pairs) return load_vector(static_cast<const float*>(data) + 2 * pair, values);
    values[0] = load(2 * pair), values[1] = load(2 * pair + 1);
  }
  template <int kCount>
  MSP_DEVICE void load_pairs(const int64_t (&pairs)[kCount], float (&values)[kCount][2]) const {
    if (float_pairs) {
      MSP_UNROLL
      for (int i = 0; i < kCount; ++i) load_vector(static_cast<const float*>(data) + 2 * pairs[i], values[i]);
    } else {
      for (int i = 0; i < kCount; ++i) load_pair(pairs[i], values[i]);
    }
  }
};

struct AnyOutput {
  void* data;
  Storage type;
  MSP_DEVICE bool empty() const { return data == nullptr; }
  MSP_DEVICE void store(int64_t index, float value) const {
    if (type == Storage::f32) {
      static_cast<float*>(data)[index] = value;
    } else if (type == Storage::f16) {
      static_cast<half_t*>(data)[index] = from_float<half_t>(value);
    } else {
      static_cast<bfloat16_t*>(data)[index] = from_float<bfloat16_t>(value);
    }
  }
};

/// Division of non-negative numbers below `limit` by `divisor`.
struct Divisor {
  uint32_t divisor, factor;  // factor 0: no shorter way
  static Divisor of(int64_t divisor, int64_t limit) {
    const bool is_short = divisor > 0 && limit <= INT32_MAX / divisor;
    return {static_cast<uint32_t>(divisor), is_short ? static_cast<uint32_t>((int64_t{1} << 31) / divisor + 1) : 0u};
  }
  MSP_DEVICE int quotient(int dividend) const {
    const uint32_t number = static_cast<uint32_t>(dividend);
    if (factor == 0) return static_cast<int>(number / divisor);
    return static_cast<int>((static_cast<uint64_t>(number) * factor) >> 31);
  }
};

/// Row `row` of rows of `row_bytes` bytes, by one widening multiplication.
template <class T>
MSP_DEVICE T* row_at(T* base, uint32_t row, uint32_t row_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + static_cast<uint64_t>(row) * row_bytes);
}

/// The four corner rows of a record: place = 4 * row of the upper left corner, + 1 if there is a corner to the right, +
/// 2 if there are lower ones, `width` rows on. Corners that do not exist repeat others.
template <class T>
struct CornerRows {
  const T* at[4];
  MSP_DEVICE CornerRows(const T* base, uint32_t place, uint32_t width, uint32_t row_bytes) {
    const uint32_t row = place >> 2, right = place & 1u ? row_bytes : 0u;
    at[0] = row_at(base, row, row_bytes);
    at[2] = row_at(base, row + (place & 2u ? width : 0u), row_bytes);
    at[1] = row_at(at[0], 1u, right);
    at[3] = row_at(at[2], 1u, right);
  }
};

/// How a group of kGroup lanes holds a row: kVector neighbouring channels a lane, kCount times, kGroup * kVector apart.
/// kVector 1 takes rows of any length and alignment; others need channels % kVector == 0 and aligned rows, and kExact
/// also channels % kChannels == 0.
template <int kGroup_, int kVector_, int kCount_, bool kExact_ = false>
struct RowPlan {
  static constexpr bool kExact = kExact_;
  static constexpr int kGroup = kGroup_, kVector = kVector_, kCount = kCount_;
  static constexpr int kStep = kGroup * kVector, kChannels = kStep * kCount, kPerLane = kVector * kCount;
  static_assert(kLanes % kGroup == 0, "groups tile a warp");
};

/// values = the lane's channels of a row that begins at `row` (the lane's own first channel); 0 past the end.
template <class Plan, class T>
MSP_DEVICE void load_row(const T* row, int channels_left, float (&values)[Plan::kPerLane]) {
  MSP_UNROLL
  for (int j = 0; j < Plan::kCount; ++j) {
    float part[Plan::kVector];
    if constexpr (Plan::kExact) {
      load_vector(row + j * Plan::kStep, part);
    } else {
      for (int c = 0; c < Plan::kVector; ++c) part[c] = 0.f;
      if (j * Plan::kStep < channels_left) load_vector(row + j * Plan::kStep, part);
    }
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) values[j * Plan::kVector + c] = part[c];
  }
}

template <class Plan, class T>
MSP_DEVICE void store_row(T* row, int channels_left, const float (&values)[Plan::kPerLane]) {
  MSP_UNROLL
  for (int j = 0; j < Plan::kCount; ++j) {
    float part[Plan::kVector];
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) part[c] = values[j * Plan::kVector + c];
    if (Plan::kExact || j * Plan::kStep < channels_left) store_vector(row + j * Plan::kStep, part);
  }
}

template <class Plan>
MSP_DEVICE void add_row(float* row, int channels_left, const float (&values)[Plan::kPerLane]) {
  MSP_UNROLL
  for (int j = 0; j < Plan::kCount; ++j) {
    float part[Plan::kVector];
    MSP_UNROLL
    for (int c = 0; c < Plan::kVector; ++c) part[c] = values[j * Plan::kVector + c];
    if (Plan::kExact || j * Plan::kStep < channels_left) atomic_add_row(row + j * Plan::kStep, part);
  }
}

/// sum += corner rows by their weights, which are those of the upper and the lower pixel row and the fraction between
/// two columns.
template <class Plan, class T>
MSP_DEVICE void add_corners(const CornerRows<T>& rows, float fx, float upper, float lower, int channels_left,
                            float (&sum)[Plan::kPerLane]) {
  float v00[Plan::kPerLane], v01[Plan::kPerLane], v10[Plan::kPerLane], v11[Plan::kPerLane];
  load_row<Plan>(rows.at[0], channels_left, v00);
  load_row<Plan>(rows.at[1], channels_left, v01);
  load_row<Plan>(rows.at[2], channels_left, v10);
  load_row<Plan>(rows.at[3], channels_left, v11);
  const float w01 = fx * upper, w00 = upper - w01, w11 = fx * lower, w10 = lower - w11;
  MSP_UNROLL
  for (int c = 0; c < Plan::kPerLane; ++c) {
    sum[c] = muspace::fma(w00, v00[c], sum[c]);
    sum[c] = muspace::fma(w01, v01[c], sum[c]);
    sum[c] = muspace::fma(w10, v10[c], sum[c]);
    sum[c] = muspace::fma(w11, v11[c], sum[c]);
  }
}

/// The same value in every lane of the group.
template <int kGroup>
MSP_DEVICE float group_sum(float value) {
  MSP_UNROLL
  for (int mask = 1; mask < kGroup; mask <<= 1) value += shuffle_xor(value, mask);
  return value;
}

/// Bits below `count`, for count in [0, 32].
MSP_DEVICE uint32_t low_bits(int count) { return count >= 32 ? ~0u : (1u << count) - 1u; }
MSP_DEVICE int clamp_lanes(int count) { return count < 0 ? 0 : count > kLanes ? kLanes : count; }
/// Index of the lowest set bit.
MSP_DEVICE int lowest_bit(uint32_t bits) { return popcount((bits & (0u - bits)) - 1u); }

inline bool is_aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

/// Enough blocks to fill any device; kernels stride over the rest.
inline unsigned striding_blocks(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 65535 ? blocks : 65535);
}

}  // namespace muspace::bevpool
