// SPDX-License-Identifier: Apache-2.0
// Allow-list stub, see musa_runtime.h. Seen in torch_musa csrc/aten/musa/MUSADtype.muh and mate csrc/batch_gemm.mu.
#pragma once
#include "musa_runtime.h"

struct __mt_bfloat16 {
  unsigned short bits;
};
