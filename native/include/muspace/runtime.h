// SPDX-License-Identifier: Apache-2.0
// The few calls of a device runtime that launchers need. Only target.h includes this; emu.h has the same names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muspace {

inline stream_t stream_at(std::int64_t handle) {
  return reinterpret_cast<stream_t>(static_cast<std::intptr_t>(handle));
}

/// Makes `device` current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (MSP_RT(GetDevice)(&previous_) == MSP_RT(Success) && previous_ != device) {
      changed_ = MSP_RT(SetDevice)(device) == MSP_RT(Success);
    }
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(MSP_RT(SetDevice)(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// nullptr, or what the runtime says about the last launch.
inline const char* launch_error() {
  const auto code = MSP_RT(GetLastError)();
  return code == MSP_RT(Success) ? nullptr : MSP_RT(GetErrorString)(code);
}

/// Sets `bytes` bytes to zero on the stream; nullptr or the runtime's sentence.
inline const char* zero_fill(void* pointer, std::size_t bytes, stream_t stream) {
  if (bytes == 0) return nullptr;
  const auto code = MSP_RT(MemsetAsync)(pointer, 0, bytes, stream);
  return code == MSP_RT(Success) ? nullptr : MSP_RT(GetErrorString)(code);
}

}  // namespace muspace
