// SPDX-License-Identifier: Apache-2.0
// How a launcher reports failure: plain data, because device translation units include no FFI header and throw nothing.
#pragma once
#include <cstdarg>
#include <cstdio>

namespace muspace {

enum StatusCode : int { kOk = 0, kRuntimeError = 1, kValueError = 2, kTypeError = 3 };

struct Status {
  int code;
  char text[200];
  bool ok() const { return code == kOk; }
};

inline Status success() {
  Status status;
  status.code = kOk;
  status.text[0] = '\0';
  return status;
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline Status
failure(StatusCode code, const char* format, ...) {
  Status status;
  status.code = code;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.text, sizeof(status.text), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace muspace
