// SPDX-License-Identifier: Apache-2.0
// The whole vendor difference: runtime prefix, qualifiers, launch, barriers, shuffles, 16-bit conversions, cached
// loads. Kernels and launchers use the names below only. The build defines exactly one of MSP_BACKEND_CPU, _EMU, _CUDA,
// _HIP and _MUSA.
//
//   MSP_HD, MSP_DEVICE            inline function for host and device / device only
//   MSP_KERNEL(threads, blocks)   kernel qualifier: the largest block, and how many a multiprocessor shall hold
//   MSP_SHARED                    static shared memory (plain data only)
//   MSP_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)   an instance with commas is bound to a variable first
//   MSP_SYNC_BLOCK(), MSP_SYNC_WARP()
//   stream_t, stream_at(), DeviceGuard, zero_fill(), launch_error()   (runtime.h)
//   MSP_SHUFFLE(value, lane), MSP_SHUFFLE_UP(value, delta), MSP_SHUFFLE_XOR(value, mask): within groups of 32 lanes,
//   4-byte values; all threads of the block must reach them. Use warp.h, which adds ballot and reductions.
//   MSP_LOAD_CACHED(pointer), MSP_STORE_STREAMING(pointer, value)
//   MSP_UNIFORM(value)            a 4-byte value that is equal in the whole block, for a scalar register where there
//   are any MSP_UNROLL, MSP_NO_UNROLL, MSP_UNROLL_BY(count)   before a loop
//
// On MSP_BACKEND_CPU only MSP_HD and MSP_DEVICE exist; MSP_BACKEND_EMU takes everything from emu.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace muspace {

/// 16-bit storage. Arithmetic is always done in fp32; numeric.h converts.
struct alignas(2) half_t {
  std::uint16_t bits;
};
struct alignas(2) bfloat16_t {
  std::uint16_t bits;
};

}  // namespace muspace

#if defined(MSP_BACKEND_CUDA)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MSP_RT(name) cuda##name
#elif defined(MSP_BACKEND_HIP)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#define MSP_RT(name) hip##name
#elif defined(MSP_BACKEND_MUSA)
#include <musa_fp16.h>
#include <musa_runtime.h>
#define MSP_RT(name) musa##name
#elif !defined(MSP_BACKEND_CPU) && !defined(MSP_BACKEND_EMU)
#error "define one of MSP_BACKEND_CPU, MSP_BACKEND_EMU, MSP_BACKEND_CUDA, MSP_BACKEND_HIP, MSP_BACKEND_MUSA"
#endif

#if defined(MSP_RT)
#define MSP_DEVICE_TARGET 1
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__) || defined(__MUSA_ARCH__)
#define MSP_DEVICE_CODE 1  // this pass compiles device code (a pass compiles host or device code, never both)
#endif
#define MSP_UNROLL _Pragma("unroll")
#define MSP_NO_UNROLL _Pragma("unroll 1")
#define MSP_UNROLL_BY(count) _Pragma(MSP_TEXT(unroll count))
#define MSP_TEXT(text) #text
#define MSP_HD __host__ __device__ __forceinline__
#define MSP_DEVICE __device__ __forceinline__
#define MSP_SHARED __shared__
#define MSP_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define MSP_SYNC_BLOCK() __syncthreads()

namespace muspace {

using stream_t = MSP_RT(Stream_t);

#if defined(MSP_BACKEND_HIP)
// gfx9 waves run in lock step: only the compiler has to be kept from moving memory accesses over the barrier.
#define MSP_SYNC_WARP()                                    \
  do {                                                     \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"); \
    __builtin_amdgcn_wave_barrier();                       \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"); \
  } while (0)
#define MSP_SHUFFLE_XOR(value, mask) __shfl_xor(value, mask, 32)
#define MSP_SHUFFLE_UP(value, delta) __shfl_up(value, delta, 32)
#define MSP_SHUFFLE(value, lane) __shfl(value, lane, 32)
#define MSP_UNIFORM(value) __builtin_amdgcn_readfirstlane(value)
#else
#define MSP_SYNC_WARP() __syncwarp()
#define MSP_SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask, 32)
#define MSP_SHUFFLE_UP(value, delta) __shfl_up_sync(0xffffffffu, value, delta, 32)
#define MSP_SHUFFLE(value, lane) __shfl_sync(0xffffffffu, value, lane, 32)
#endif

// Loads of read-only data may stay in the first cache level; streaming stores are not read again soon.
#if defined(MSP_BACKEND_CUDA)
#define MSP_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define MSP_UNIFORM(value) __shfl_sync(0xffffffffu, value, 0)
#define MSP_LOAD_CACHED(pointer) __ldg(pointer)
#define MSP_STORE_STREAMING(pointer, value) __stcs(pointer, value)
#else
#define MSP_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads)
#if defined(MSP_BACKEND_MUSA)
#define MSP_UNIFORM(value) (value)
#endif
#define MSP_LOAD_CACHED(pointer) (*(pointer))
#define MSP_STORE_STREAMING(pointer, value) (*(pointer) = (value))
#endif

// Reductions of a warp in one instruction; fp32 vector atomics in global memory.
#if defined(MSP_BACKEND_CUDA) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define MSP_WARP_REDUCE 1
#if __CUDA_ARCH__ >= 900 && !defined(MSP_NO_VECTOR_ATOMICS)
#define MSP_VECTOR_ATOMICS 1
#endif
#endif

// 16-bit floats by the target's own conversions. bf16 has portable code in numeric.h, which only CUDA overrides.
MSP_DEVICE float half_bits_to_float(std::uint16_t bits) {
  __half value;
  memcpy(&value, &bits, sizeof(bits));
  return __half2float(value);
}
MSP_DEVICE std::uint16_t float_to_half_bits(float value) {
  const __half rounded = __float2half(value);
  std::uint16_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}
#if defined(MSP_BACKEND_CUDA)
#define MSP_NATIVE_BFLOAT16 1
MSP_DEVICE std::uint16_t float_to_bfloat16_bits(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
#endif

}  // namespace muspace

#include "muspace/runtime.h"

#elif defined(MSP_BACKEND_EMU)
#include "muspace/emu.h"
#define MSP_UNIFORM(value) (value)
#define MSP_UNROLL
#define MSP_NO_UNROLL
#define MSP_UNROLL_BY(count)
#else
#define MSP_HD inline __attribute__((always_inline))
#define MSP_DEVICE inline __attribute__((always_inline))
#endif
