// SPDX-License-Identifier: Apache-2.0
// Checks that the bindings of the family share.
#pragma once
#include <cstdint>

#include "muspace/ffi.h"

namespace muspace::bevpool {

using ffi::check_like;
using ffi::kInt32;
using ffi::raise_unless_ok;
using ffi::TensorView;

/// Of what is numbered by int32.
inline void check_count(int64_t count, const char* name) {
  if (count >= 0 && count < int64_t{1} << 31) return;
  TVM_FFI_THROW(ValueError) << name << ": expected a number below 2^31, got " << count;
}

/// Number of elements of the axes from `first` to before `last`; each product is a number of something.
inline int64_t count_of(const TensorView& tensor, int64_t first, int64_t last, const char* name) {
  int64_t count = 1;
  for (int64_t axis = first; axis < last; ++axis) {
    check_count(tensor.size(axis), name);
    check_count(count *= tensor.size(axis), name);
  }
  return count;
}

/// Of any shape, one element for each of `count`.
inline void check_flat(const TensorView& tensor, const char* name, int64_t count, DLDevice device) {
  if (count_of(tensor, 0, tensor.ndim(), name) != count) {
    TVM_FFI_THROW(ValueError) << name << ": expected " << count << " elements, got shape "
                              << ffi::shape_text(ffi::sizes_of(tensor));
  }
  ffi::check_same_device(tensor, name, device);
  ffi::check_dense(tensor, name);
}

/// An empty tensor means that the caller has none.
inline bool is_absent(const TensorView& tensor) { return tensor.ndim() == 1 && tensor.size(0) == 0; }

inline int32_t* int32_data(const TensorView& tensor) { return static_cast<int32_t*>(ffi::data_of(tensor)); }

/// The storage type of rows and cells; fp64 is for the cpu.
inline Storage row_storage(const TensorView& tensor, const char* name) {
  const Storage storage = ffi::storage_of(tensor, name);
#if !defined(MSP_BACKEND_CPU)
  if (storage == Storage::f64) {
    TVM_FFI_THROW(TypeError) << name << ": expected float32, float16 or bfloat16 on " << ffi::kBackend
                             << ", got float64 (cpu only)";
  }
#endif
  return storage;
}

/// Of geometry, and of gradients that are sums: fp32, fp64 beside fp64 features.
inline DLDataType sum_dtype(Storage features) {
  return DLDataType{kDLFloat, static_cast<uint8_t>(features == Storage::f64 ? 64 : 32), 1};
}

/// Plans and workspaces are read by 16-byte words.
inline void check_buffer(const TensorView& buffer, const char* name, int64_t bytes, DLDevice device) {
  ffi::check_same_device(buffer, name, device);
  ffi::check_dense(buffer, name);
  const int64_t given = ffi::byte_count(buffer);
  if (given < bytes) TVM_FFI_THROW(ValueError) << name << ": expected at least " << bytes << " bytes, got " << given;
  if (bytes > 0 && reinterpret_cast<uintptr_t>(ffi::data_of(buffer)) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << name << ": expected memory aligned to 16 bytes";
  }
}

}  // namespace muspace::bevpool
