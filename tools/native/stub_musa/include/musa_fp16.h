// SPDX-License-Identifier: Apache-2.0
// Allow-list stub, see musa_runtime.h. Seen in torch_musa csrc/aten/musa/MUSADtype.muh and mate csrc/batch_gemm.mu.
#pragma once
#include "musa_runtime.h"

struct __half {
  unsigned short bits;
};
// tensorflow_musa_extension musa_ext/kernels/array/musa_scatter_nd_kernel.mu
__device__ float __half2float(__half value);
__device__ __half __float2half(float value);
