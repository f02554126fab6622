// SPDX-License-Identifier: Apache-2.0
// Checks of the SIMT emulation: exchange of values, barriers, errors, and (with an argument) faults a sanitizer must
// see.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "muspace/target.h"

using namespace muspace;

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  const char* error = launch_error();
  std::fprintf(stderr, "emu_check: %s (%s)\n", what, error ? error : "no error");
  ++failures;
}

void expect_error(const char* part) {
  const char* error = launch_error();
  expect(error != nullptr && std::strstr(error, part) != nullptr, part);
}

int linear_thread() { return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }

MSP_KERNEL(256, 1) shuffles(int* out) {
  const int lane = linear_thread() % 32;
  int sum = lane;
  for (int mask = 1; mask < 32; mask <<= 1) sum += MSP_SHUFFLE_XOR(sum, mask);
  const int up = MSP_SHUFFLE_UP(lane, 3), broadcast = MSP_SHUFFLE(lane * 10, 5);
  const double wide = MSP_SHUFFLE(lane + 0.25, 7);
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      (sum == 496) + 2 * (up == (lane < 3 ? lane : lane - 3)) + 4 * (broadcast == 50) + 8 * (wide == 7.25);
}

// Every thread reads what its mirror image wrote before the barrier, many times over.
MSP_KERNEL(1024, 1) mirror(int* out, int rounds) {
  MSP_SHARED int values[1024];
  const int count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z), t = linear_thread();
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    values[t] = t + round;
    MSP_SYNC_BLOCK();
    sum += values[count - 1 - t] - (count - 1 - t + round);
    MSP_SYNC_BLOCK();
  }
  out[static_cast<int>(blockIdx.x) * count + t] = sum + 1;
}

// Lanes leave right after the exchange; the others must still get their values.
MSP_KERNEL(64, 1) leave_early(int* out) {
  const int lane = linear_thread() % 32, got = MSP_SHUFFLE_XOR(lane, 1);
  out[threadIdx.x] = got == (lane ^ 1);
  if (lane % 2 == 0) return;
  MSP_SYNC_BLOCK();
  out[threadIdx.x] += 1;
}

MSP_KERNEL(64, 1) plain(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] += 1; }

MSP_KERNEL(64, 1) dynamic_is_nan(int* out, int count) {
  MSP_DYNAMIC_SHARED(float, values);
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    out[i] = std::isnan(values[i]);
    values[i] = 1.f;
  }
}

MSP_KERNEL(128, 1) barrier_against_shuffle(int* out) {
  if (threadIdx.x % 2 == 0) MSP_SYNC_BLOCK();
  out[threadIdx.x] = MSP_SHUFFLE(1, 0);
  if (threadIdx.x % 2 == 1) MSP_SYNC_BLOCK();
}

MSP_KERNEL(128, 1) divergent(int* out) {
  if (threadIdx.x % 2 == 0) {
    MSP_SYNC_WARP();
  } else {
    out[threadIdx.x] = MSP_SHUFFLE(1, 0);
  }
}

MSP_KERNEL(64, 1) past_shared(int* out, int index) {
  MSP_SHARED int values[64];
  values[threadIdx.x] = 1;
  MSP_SYNC_BLOCK();
  out[threadIdx.x] = values[index];
}

MSP_KERNEL(64, 1) past_global(int* out, int index) {
  MSP_SYNC_BLOCK();
  out[static_cast<int>(threadIdx.x) + index] = 1;
}

bool all_equal(const std::vector<int>& values, int wanted) {
  for (const int value : values) {
    if (value != wanted) return false;
  }
  return launch_error() == nullptr;
}

void check_results() {
  const stream_t stream = stream_at(0);
  std::vector<int> out(3 * 256);
  MSP_LAUNCH(shuffles, dim3(3), dim3(256), 0, stream, out.data());
  expect(all_equal(out, 15), "shuffles");
  for (const dim3 block : {dim3(1), dim3(96), dim3(1000), dim3(1024), dim3(8, 4, 3)}) {
    std::vector<int> mirrored(2 * std::size_t{block.x} * block.y * block.z);
    MSP_LAUNCH(mirror, dim3(2), block, 0, stream, mirrored.data(), 20);
    expect(all_equal(mirrored, 1), "block barriers");
  }
  std::vector<int> left(64);
  MSP_LAUNCH(leave_early, dim3(1), dim3(64), 0, stream, left.data());
  bool right = launch_error() == nullptr;
  for (std::size_t i = 0; i < left.size(); ++i) right = right && left[i] == (i % 2 == 0 ? 1 : 2);
  expect(right, "threads that leave early");
  std::vector<int> ones(64 * 35);
  MSP_LAUNCH(plain, dim3(7, 5), dim3(64), 0, stream, ones.data());
  expect(ones[0] == 5 && ones[64 * 7 - 1] == 5 && ones[64 * 7] == 0, "a kernel without synchronisation");
  for (int round = 0; round < 2; ++round) {
    std::vector<int> nans(100);
    MSP_LAUNCH(dynamic_is_nan, dim3(1), dim3(64), 400, stream, nans.data(), 100);
    expect(all_equal(nans, 1), "dynamic shared memory starts as NaN");
  }
}

void check_errors() {
  const stream_t stream = stream_at(0);
  std::vector<int> out(2048);
  MSP_LAUNCH(plain, dim3(1), dim3(1025), 0, stream, out.data());
  expect_error("invalid launch");
  MSP_LAUNCH(plain, dim3(0), dim3(32), 0, stream, out.data());
  expect_error("invalid launch");
  MSP_LAUNCH(plain, dim3(1, 65536), dim3(32), 0, stream, out.data());
  expect_error("invalid launch");
  MSP_LAUNCH(plain, dim3(1), dim3(32), 48 * 1024 + 1, stream, out.data());
  expect_error("48 KiB");
  MSP_LAUNCH(barrier_against_shuffle, dim3(1), dim3(128), 0, stream, out.data());
  expect_error("deadlock");
  MSP_LAUNCH(divergent, dim3(1), dim3(128), 0, stream, out.data());
  expect_error("while others of its warp");
  setenv("MUSPACE_EMU_BUDGET", "100", 1);
  MSP_LAUNCH(plain, dim3(2), dim3(64), 0, stream, out.data());
  expect_error("above MUSPACE_EMU_BUDGET=100");
  MSP_LAUNCH(mirror, dim3(1), dim3(64), 0, stream, out.data(), 20);
  expect_error("more steps than MUSPACE_EMU_BUDGET=100");
  unsetenv("MUSPACE_EMU_BUDGET");
  check_results();  // the machine works on after every error
}

int plant_fault(const std::string& kind) {
  const stream_t stream = stream_at(0);
  std::vector<int> out(64);
  const int index = std::atoi(kind == "shared" ? "64" : "1");
  if (kind == "shared") MSP_LAUNCH(past_shared, dim3(1), dim3(64), 0, stream, out.data(), index);
  if (kind == "global") MSP_LAUNCH(past_global, dim3(1), dim3(64), 0, stream, out.data(), index);
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return plant_fault(arguments[1]);
  check_results();
  check_errors();
  return failures == 0 ? 0 : 1;
}
