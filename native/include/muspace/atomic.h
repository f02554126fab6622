// SPDX-License-Identifier: Apache-2.0
// Atomics on shared and global memory. fp32 rows are added by 16-byte vector atomics where the target has them.
#pragma once

#include <cstdint>

#include "muspace/target.h"

namespace muspace {

#if defined(MSP_DEVICE_TARGET)
template <class T>
MSP_DEVICE T atomic_add(T* address, T value) {
  return atomicAdd(address, value);
}
/// Stores `value` if `expected` is there; returns what was there.
template <class T>
MSP_DEVICE T atomic_compare_swap(T* address, T expected, T value) {
  return atomicCAS(address, expected, value);
}
#if defined(MSP_BACKEND_MUSA)
// No public MUSA code uses an integer minimum or maximum; compare-and-swap is proven.
MSP_DEVICE int atomic_min(int* address, int value) {
  int old = *address;
  for (int seen; old > value; old = seen) {
    seen = atomicCAS(address, old, value);
    if (seen == old) break;
  }
  return old;
}
MSP_DEVICE int atomic_max(int* address, int value) {
  int old = *address;
  for (int seen; old < value; old = seen) {
    seen = atomicCAS(address, old, value);
    if (seen == old) break;
  }
  return old;
}
#else
MSP_DEVICE int atomic_min(int* address, int value) { return atomicMin(address, value); }
MSP_DEVICE int atomic_max(int* address, int value) { return atomicMax(address, value); }
#endif
#else
/// Emulated blocks may run on several threads of the host.
template <class T, class Combine>
MSP_DEVICE T atomic_update(T* address, Combine combine) {
  T expected, desired;
  __atomic_load(address, &expected, __ATOMIC_RELAXED);
  do {
    desired = combine(expected);
  } while (!__atomic_compare_exchange(address, &expected, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return expected;
}
template <class T>
MSP_DEVICE T atomic_add(T* address, T value) {
  return atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
MSP_DEVICE T atomic_compare_swap(T* address, T expected, T value) {
  __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
MSP_DEVICE int atomic_min(int* address, int value) {
  return atomic_update(address, [=](int old) { return old < value ? old : value; });
}
MSP_DEVICE int atomic_max(int* address, int value) {
  return atomic_update(address, [=](int old) { return old > value ? old : value; });
}
#endif

MSP_DEVICE void atomic_or(int* address, int bits) {
  int old = *address;
  for (int seen; (old | bits) != old; old = seen) {
    seen = atomic_compare_swap(address, old, old | bits);
    if (seen == old) break;
  }
}

/// address[i] += values[i] in global memory, i < kCount; 16-byte aligned when kCount is a multiple of 4.
template <int kCount>
MSP_DEVICE void atomic_add_row(float* address, const float (&values)[kCount]) {
#if defined(MSP_VECTOR_ATOMICS)
  constexpr int kVectors = kCount % 4 == 0 ? kCount / 4 : 0;
#else
  constexpr int kVectors = 0;
#endif
  MSP_UNROLL
  for (int i = 0; i < 4 * kVectors; i += 4) {
#if defined(MSP_VECTOR_ATOMICS)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address + i), "f"(values[i]),
                 "f"(values[i + 1]), "f"(values[i + 2]), "f"(values[i + 3])
                 : "memory");
#endif
  }
  MSP_UNROLL
  for (int i = 4 * kVectors; i < kCount; ++i) atomic_add(address + i, values[i]);
}

}  // namespace muspace
