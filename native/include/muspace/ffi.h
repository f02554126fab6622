// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors that cross the FFI. Only bind.cc files include this; it pulls in the FFI headers.
// Python has checked in the caller's words already: the short sentences here guard direct calls of the library.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "muspace/call.h"
#include "muspace/status.h"
#if !defined(MSP_ARCHITECTURES)
#include "muspace/cpu.h"
#define MSP_ARCHITECTURES MSP_CPU_ARCHITECTURES
#endif

namespace muspace::ffi {

using tvm::ffi::TensorView;

#if defined(MSP_BACKEND_CPU)
constexpr const char* kBackend = "cpu";
constexpr int kDeviceType = kDLCPU;
#elif defined(MSP_BACKEND_EMU) && defined(MSP_EMU_ALIAS_MUSA)
constexpr const char* kBackend = "musa";
constexpr int kDeviceType = kDLExtDev;
#elif defined(MSP_BACKEND_EMU)
constexpr const char* kBackend = "emu";
constexpr int kDeviceType = kDLCPU;
#elif defined(MSP_BACKEND_CUDA)
constexpr const char* kBackend = "cuda";
constexpr int kDeviceType = kDLCUDA;
#elif defined(MSP_BACKEND_HIP)
constexpr const char* kBackend = "hip";
constexpr int kDeviceType = kDLROCM;
#elif defined(MSP_BACKEND_MUSA)
constexpr const char* kBackend = "musa";
constexpr int kDeviceType = kDLExtDev;
#endif

#if defined(MSP_BACKEND_MUSA) || defined(MSP_EMU_ALIAS_MUSA)
constexpr bool kHasFloat64 = false;
#else
constexpr bool kHasFloat64 = true;
#endif

// Whether the contents of tensors can be read here, on the host.
#if (defined(MSP_BACKEND_CPU) || defined(MSP_BACKEND_EMU)) && !defined(MSP_EMU_ALIAS_MUSA)
constexpr bool kHostMemory = true;
#else
constexpr bool kHostMemory = false;
#endif

inline std::string dtype_name(DLDataType dtype) {
  static const char* const kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  std::ostringstream text;
  if (dtype.code < 7) {
    text << kinds[dtype.code];
  } else {
    text << "code" << static_cast<int>(dtype.code) << "_";
  }
  text << static_cast<int>(dtype.bits);
  if (dtype.lanes != 1) text << "x" << dtype.lanes;
  return text.str();
}

inline bool is_dtype(DLDataType dtype, int code, int bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::ostringstream text;
  text << "[";
  bool first = true;
  for (int64_t size : sizes) {
    if (!first) text << ", ";
    text << size;
    first = false;
  }
  text << "]";
  return text.str();
}

inline std::vector<int64_t> sizes_of(const TensorView& tensor) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < tensor.ndim(); ++i) sizes.push_back(tensor.size(i));
  return sizes;
}

inline int64_t element_count(const TensorView& tensor) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim(); ++i) count *= tensor.size(i);
  return count;
}

inline int64_t byte_count(const TensorView& tensor) {
  return element_count(tensor) * ((tensor.dtype().bits * tensor.dtype().lanes + 7) / 8);
}

inline void* data_of(const TensorView& tensor) {
  if (tensor.data_ptr() == nullptr) return nullptr;
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

inline void check_rank(const TensorView& tensor, const char* name, int rank) {
  if (tensor.ndim() == rank) return;
  TVM_FFI_THROW(ValueError) << name << ": expected " << rank << " dimensions, got shape "
                            << shape_text(sizes_of(tensor));
}

inline void check_shape(const TensorView& tensor, const char* name, const std::vector<int64_t>& expected) {
  const std::vector<int64_t> sizes = sizes_of(tensor);
  if (sizes == expected) return;
  TVM_FFI_THROW(ValueError) << name << ": expected shape " << shape_text(expected) << ", got " << shape_text(sizes);
}

// Contiguous, and with memory: a tensor whose storage was freed keeps its shape.
inline void check_dense(const TensorView& tensor, const char* name) {
  if (element_count(tensor) == 0) return;
  if (tensor.data_ptr() == nullptr) TVM_FFI_THROW(ValueError) << name << ": expected a tensor with memory, got none";
  if (tensor.ndim() == 0) return;
  const auto strides = tensor.strides();
  int64_t expected = 1;
  for (int i = tensor.ndim() - 1; i >= 0; --i) {
    const int64_t size = tensor.size(i);
    if (size != 1 && strides[i] != expected) {
      TVM_FFI_THROW(ValueError) << name << ": expected a contiguous tensor, got shape " << shape_text(sizes_of(tensor))
                                << " with strides " << shape_text(strides);
    }
    expected *= size;
  }
}

inline void check_dtype(const TensorView& tensor, const char* name, int code, int bits) {
  if (is_dtype(tensor.dtype(), code, bits)) return;
  TVM_FFI_THROW(TypeError) << name << ": expected "
                           << dtype_name(DLDataType{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1})
                           << ", got " << dtype_name(tensor.dtype());
}

// The device of the first tensor, which must be of this library's kind.
inline DLDevice check_device(const TensorView& first, const char* name) {
  const DLDevice device = first.device();
  if (static_cast<int>(device.device_type) != kDeviceType) {
    TVM_FFI_THROW(ValueError) << name << ": expected a tensor on a device of type " << kDeviceType << " (" << kBackend
                              << " library), got device type " << static_cast<int>(device.device_type);
  }
  return device;
}

inline void check_same_device(const TensorView& tensor, const char* name, DLDevice device) {
  const DLDevice here = tensor.device();
  if (here.device_type == device.device_type && here.device_id == device.device_id) return;
  TVM_FFI_THROW(ValueError) << name << ": expected device " << static_cast<int>(device.device_type) << ":"
                            << device.device_id << " like the first tensor, got " << static_cast<int>(here.device_type)
                            << ":" << here.device_id;
}

// Shape, dtype, device and density of a tensor whose dtype is prescribed.
inline void check_like(const TensorView& tensor, const char* name, DLDataType dtype,
                       const std::vector<int64_t>& shape, DLDevice device) {
  check_shape(tensor, name, shape);
  check_dtype(tensor, name, dtype.code, dtype.bits);
  check_same_device(tensor, name, device);
  check_dense(tensor, name);
}

inline Storage storage_of(const TensorView& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype();
  if (is_dtype(dtype, kDLFloat, 32)) return Storage::f32;
  if (is_dtype(dtype, kDLFloat, 16)) return Storage::f16;
  if (is_dtype(dtype, kDLBfloat, 16)) return Storage::bf16;
  if (kHasFloat64 && is_dtype(dtype, kDLFloat, 64)) return Storage::f64;
  TVM_FFI_THROW(TypeError) << name << ": expected float32, float16 or bfloat16"
                           << (kHasFloat64 ? " or float64" : "") << ", got " << dtype_name(dtype);
}

// Coordinates and weights are fp32, fp16 or bf16 each on its own; beside an fp64 `owner` they are fp64 or fp32.
inline Storage companion_storage(const TensorView& tensor, const char* name, Storage owner) {
  const Storage storage = storage_of(tensor, name);
  const bool half = storage == Storage::f16 || storage == Storage::bf16;
  if (owner == Storage::f64 ? half : storage == Storage::f64) {
    TVM_FFI_THROW(TypeError) << name << ": expected "
                             << (owner == Storage::f64 ? "float64 or float32 with a float64 first tensor"
                                                       : "float32, float16 or bfloat16 with such a first tensor")
                             << ", got " << dtype_name(tensor.dtype());
  }
  return storage;
}

constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};

// A launcher's status as the exception of the same kind.
inline void raise_unless_ok(const Status& status) {
  if (status.ok()) return;
  if (status.code == kValueError) TVM_FFI_THROW(ValueError) << status.text;
  if (status.code == kTypeError) TVM_FFI_THROW(TypeError) << status.text;
  TVM_FFI_THROW(RuntimeError) << status.text;
}

inline void fill_zero(const TensorView& tensor, const Place& place) {
  const int64_t bytes = byte_count(tensor);
  if (bytes > 0) raise_unless_ok(launch_fill_zero(data_of(tensor), bytes, place));
}

inline void check_route(int64_t route, int64_t count) {
  if (route >= 0 && route < count) return;
  TVM_FFI_THROW(ValueError) << "route: expected a code below " << count << ", got " << route;
}

inline tvm::ffi::String abi_text(const char* family) {
  std::ostringstream text;
  text << "muspace-abi=1;family=" << family << ";backend=" << kBackend << ";ffi=";
#if defined(TVM_FFI_VERSION_MAJOR)
  text << TVM_FFI_VERSION_MAJOR << "." << TVM_FFI_VERSION_MINOR << "." << TVM_FFI_VERSION_PATCH;
#else
  text << "unknown";
#endif
  text << ";arch=" << MSP_ARCHITECTURES;
  return tvm::ffi::String(text.str());
}

}  // namespace muspace::ffi

#if defined(MSP_SANITIZE)
// Test builds only: reads one element past a heap block, so that a test can see the sanitizer work.
namespace muspace::ffi {
inline int64_t sanitizer_probe(int64_t size) {
  std::vector<int> block(static_cast<size_t>(size), 1);
  const volatile int* data = block.data();
  return data[size];
}
}  // namespace muspace::ffi
#define MSP_EXPORT_SANITIZER_PROBE() TVM_FFI_DLL_EXPORT_TYPED_FUNC(sanitizer_probe, ::muspace::ffi::sanitizer_probe)
#else
#define MSP_EXPORT_SANITIZER_PROBE() static_assert(true, "no probe outside sanitizer builds")
#endif
