// SPDX-License-Identifier: Apache-2.0
// Allow-list stub of the MUSA runtime for compile checks without an SDK: declarations of the names this project may
// use, each with a place in public code where it was seen. A name that is not listed does not compile, which is the
// point. Repositories, all of the MooreThreads organisation: torch_musa, mate, muThrust, muAlg, tutorial_on_musa,
// tensorflow_musa_extension. The signatures are those of the callers seen there; nothing here was taken from, or compared
// with, an SDK.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__clang__) || !defined(__CUDA__)
#error "the stub is for clang in CUDA mode: clang -x cuda -nocudainc -nocudalib"
#endif

// Qualifiers: torch_musa csrc/aten/musa/MUSADeviceUtils.muh, Bucketize.mu; mate csrc/moe_fused_gate.mu
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
// torch_musa csrc/extension/common/multi_tensor_apply.muh (one argument)
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads)))

// Vectors: torch_musa csrc/aten/musa/MUSADtype.muh (uint2, uint4); dim3: AdaptiveAveragePooling3d.mu, mate
// attention_combine.mu
struct uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  __host__ __device__ constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
      : x(x_), y(y_), z(z_) {}
  __host__ __device__ dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  __host__ __device__ operator uint3() const { return uint3{x, y, z}; }
};
// muAlg test/test_device_scan.cu, the CUB port
__host__ __device__ inline uint2 make_uint2(unsigned int x, unsigned int y) { return uint2{x, y}; }
__host__ __device__ inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return uint4{x, y, z, w};
}

#include <__clang_cuda_builtin_vars.h>  // threadIdx, blockIdx, blockDim, gridDim, warpSize

// torch_musa csrc/aten/ops/musa/Bucketize.mu; mate include/mate/attention/flash_mla/mpxx_get_mla_metadata.hpp
__device__ void __syncthreads();
__device__ void __syncwarp(unsigned int mask = 0xffffffffu);

// __shfl_sync, __shfl_xor_sync: torch_musa MUSADeviceUtils.muh, mate csrc/moe_fused_gate.mu
// __shfl_up_sync: mate include/mate/gemm/deep_gemm/mp31_fp8_paged_mqa_logits.hpp
#define MSP_STUB_SHUFFLE(type)                                                               \
  __device__ type __shfl_sync(unsigned int mask, type value, int lane, int width = 32);      \
  __device__ type __shfl_xor_sync(unsigned int mask, type value, int lanes, int width = 32); \
  __device__ type __shfl_up_sync(unsigned int mask, type value, unsigned int delta, int width = 32);
MSP_STUB_SHUFFLE(int)
MSP_STUB_SHUFFLE(unsigned int)
MSP_STUB_SHUFFLE(float)
#undef MSP_STUB_SHUFFLE

// torch_musa csrc/aten/musa/MUSAAtomic.muh
__device__ int atomicAdd(int* address, int value);
__device__ unsigned int atomicAdd(unsigned int* address, unsigned int value);
__device__ float atomicAdd(float* address, float value);
__device__ int atomicCAS(int* address, int compare, int value);
__device__ unsigned int atomicCAS(unsigned int* address, unsigned int compare, unsigned int value);

// __popc: muThrust thrust/system/musa/detail/set_operations.h; fmaf: torch_musa csrc/extension/FusedAdam.mu
__device__ int __popc(unsigned int bits);
__device__ inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// floor of a float: tutorial_on_musa pytorch/cv/maskrcnn/maskrcnn_benchmark/csrc/musa/ROIPool.mu
__device__ inline float floor(float value) { return __builtin_floorf(value); }

extern "C" {
// The compiler lowers a[i] = b copies and memcpy itself; named because <cstring> declares it for the host only.
__device__ void* memcpy(void* target, const void* source, std::size_t bytes);

typedef struct MUstream_st* musaStream_t;                              // torch_musa csrc/aten/musa/MUSAGraph.cpp
typedef enum { musaSuccess = 0, musaErrorUnknown = 999 } musaError_t;  // Arange.mu, unimplemented_functions.cpp
musaError_t musaGetDevice(int* device);                                // torch_musa csrc/aten/mudnn/Handle.cpp
musaError_t musaSetDevice(int device);                                 // torch_musa csrc/aten/ops/musa/SummaryOps.mu
musaError_t musaGetLastError(void);  // torch_musa csrc/aten/ops/Copy.cpp, mate csrc/deepgemm_attention.mu
const char* musaGetErrorString(musaError_t error);  // torch_musa csrc/core/MUSAException.cpp
musaError_t musaMemsetAsync(void* data, int value, std::size_t bytes, musaStream_t stream);  // Reduce.muh

// What clang turns kernel<<<...>>>(...) into, in its older and newer way. Not MUSA interfaces.
musaError_t cudaConfigureCall(dim3 grid, dim3 block, std::size_t shared = 0, musaStream_t stream = nullptr);
musaError_t cudaSetupArgument(const void* argument, std::size_t size, std::size_t offset);
musaError_t cudaLaunch(const void* kernel);
unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared = 0, musaStream_t stream = nullptr);
musaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             musaStream_t stream);
}
