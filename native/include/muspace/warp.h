// SPDX-License-Identifier: Apache-2.0
// Operations of a group of 32 lanes: the warp of a 32-wide target, a half or quarter of a wider one.
// Blocks are one-dimensional and a multiple of 32 threads; every thread of the block reaches every call.
#pragma once

#include <cstdint>

#include "muspace/atomic.h"
#include "muspace/target.h"

namespace muspace {

constexpr int kLanes = 32;

MSP_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
MSP_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / kLanes; }

template <class T>
MSP_DEVICE T shuffle(T value, int lane) {
  return MSP_SHUFFLE(value, lane);
}
template <class T>
MSP_DEVICE T shuffle_up(T value, int delta) {
  return MSP_SHUFFLE_UP(value, delta);
}
template <class T>
MSP_DEVICE T shuffle_xor(T value, int mask) {
  return MSP_SHUFFLE_XOR(value, mask);
}

MSP_DEVICE int popcount(std::uint32_t bits) {
#if defined(MSP_DEVICE_TARGET)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

/// Bit i is the predicate of lane i.
MSP_DEVICE std::uint32_t ballot(bool predicate) {
#if defined(MSP_BACKEND_CUDA)
  return __ballot_sync(0xffffffffu, predicate);
#elif defined(MSP_BACKEND_HIP)
  const int upper_half = static_cast<int>(threadIdx.x) & (warpSize - 1) & kLanes;
  return static_cast<std::uint32_t>(__ballot(predicate) >> upper_half);
#else
  std::uint32_t bits = predicate ? 1u << lane_id() : 0u;
  MSP_UNROLL
  for (int mask = 1; mask < kLanes; mask <<= 1) bits |= shuffle_xor(bits, mask);
  return bits;
#endif
}

MSP_DEVICE bool any(bool predicate) { return ballot(predicate) != 0; }

MSP_DEVICE int warp_min(int value) {
#if defined(MSP_WARP_REDUCE)
  return __reduce_min_sync(0xffffffffu, value);
#else
  MSP_UNROLL
  for (int mask = kLanes / 2; mask > 0; mask >>= 1) {
    const int other = shuffle_xor(value, mask);
    value = other < value ? other : value;
  }
  return value;
#endif
}

MSP_DEVICE int warp_max(int value) {
#if defined(MSP_WARP_REDUCE)
  return __reduce_max_sync(0xffffffffu, value);
#else
  MSP_UNROLL
  for (int mask = kLanes / 2; mask > 0; mask >>= 1) {
    const int other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
#endif
}

/// The largest value among all threads that have to reach warp operations together, or more: a loop of that length may
/// hold some. On targets whose warps may be wider than 32 lanes it is the largest of the block.
MSP_DEVICE int converged_max(int value) {
#if defined(MSP_BACKEND_CUDA)
  return warp_max(value);
#else
  MSP_SHARED int largest;
  MSP_SYNC_BLOCK();
  if (threadIdx.x == 0) largest = value;
  MSP_SYNC_BLOCK();
  const int warp_largest = warp_max(value);
  if (lane_id() == 0) atomic_max(&largest, warp_largest);
  MSP_SYNC_BLOCK();
  return largest;
#endif
}

/// Sum over the lanes up to and including this one.
template <class T>
MSP_DEVICE T warp_inclusive_sum(T value) {
  MSP_UNROLL
  for (int delta = 1; delta < kLanes; delta <<= 1) {
    const T lower = shuffle_up(value, delta);
    if (lane_id() >= delta) value += lower;
  }
  return value;
}

}  // namespace muspace
