// SPDX-License-Identifier: Apache-2.0
// What the launchers of a cpu library share: exceptions to status, the type of the sums, and zeros written by all threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

#include "muspace/call.h"
#include "muspace/cpu.h"
#include "muspace/parallel.h"

namespace muspace::cpu {

template <class Run>
Status guarded(const char* operation, const Run& run) {
  try {
    run();
    return success();
  } catch (const std::exception& error) {
    return failure(kRuntimeError, "%s on cpu: %s", operation, error.what());
  }
}

// Calls `run` with a zero of the type in which features of this storage are summed: double for f64, else float.
template <class Run>
void in_sum_type(Storage features, const Run& run) {
  if (features == Storage::f64) {
    run(double{});
  } else {
    run(float{});
  }
}

inline void fill_zero(void* data, int64_t bytes, int64_t threads) {
  constexpr int64_t kBlock = int64_t{1} << 21;
  prefer_huge_pages(data, bytes);
  parallel_for((bytes + kBlock - 1) / kBlock, threads, [&](int64_t block) {
    std::memset(static_cast<char*>(data) + block * kBlock, 0,
                static_cast<size_t>(std::min(kBlock, bytes - block * kBlock)));
  });
}

}  // namespace muspace::cpu
