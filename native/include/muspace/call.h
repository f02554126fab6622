// SPDX-License-Identifier: Apache-2.0
// What every launcher's signature is made of: the storage type of a tensor, and where to run.
#pragma once
#include <cstdint>

#include "muspace/status.h"

namespace muspace {

enum class Storage : int { f32 = 0, f16 = 1, bf16 = 2, f64 = 3 };

constexpr int64_t size_of(Storage storage) { return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2; }

// `ctx` is the raw stream on cuda, hip and musa, the thread count on cpu, and unused on emu.
struct Place {
  int device;
  int64_t ctx;
};

// Zero-fills `bytes` on the place (a memset on the stream); one per library, beside its kernels.
Status launch_fill_zero(void* data, int64_t bytes, const Place& place);

}  // namespace muspace
