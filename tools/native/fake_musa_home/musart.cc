// SPDX-License-Identifier: Apache-2.0
// The runtime library of the stand-in MUSA home: everything links and loads, every call says that there is no device.
#include <cstddef>

namespace {
constexpr int kError = 999;
}

extern "C" {
int musaGetDevice(int*) { return kError; }
int musaSetDevice(int) { return kError; }
int musaGetLastError() { return kError; }
const char* musaGetErrorString(int) { return "stand-in MUSA runtime: no device"; }
int musaMemsetAsync(void*, int, std::size_t, void*) { return kError; }
// What clang makes of a launch; the arguments are not looked at.
int cudaConfigureCall() { return kError; }
int cudaSetupArgument() { return kError; }
int cudaLaunch() { return kError; }
unsigned __cudaPushCallConfiguration() { return 1; }  // non-zero: the kernel's stub is not called
int __cudaPopCallConfiguration() { return kError; }
int cudaLaunchKernel() { return kError; }
}
