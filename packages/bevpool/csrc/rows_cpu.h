// SPDX-License-Identifier: Apache-2.0
// Rows of channels on the cpu: conversion between storage and arithmetic types, transposition, prefetch. Everything
// here is inlined into the instruction-set clones that call it.
#pragma once
#include <algorithm>
#include <cstring>

#include "muspace/call.h"
#include "muspace/cpu.h"

// After the parameters of a lambda that an instruction-set clone calls.
#define MSP_CPU_LAMBDA __attribute__((always_inline))

namespace muspace::cpu {

// target[c * target_pitch + r] = source[r * source_pitch + c] for four rows and columns.
MSP_CPU_INLINE void transpose_four(const float* source, int64_t source_pitch, float* target, int64_t target_pitch) {
  const Quad r0 = read_vector<Quad>(source), r1 = read_vector<Quad>(source + source_pitch),
                  r2 = read_vector<Quad>(source + 2 * source_pitch),
                  r3 = read_vector<Quad>(source + 3 * source_pitch);
  const Quad a = MSP_CPU_SHUFFLE(r0, 0, 1, r1, 0, 1), b = MSP_CPU_SHUFFLE(r0, 2, 3, r1, 2, 3),
                  c = MSP_CPU_SHUFFLE(r2, 0, 1, r3, 0, 1), d = MSP_CPU_SHUFFLE(r2, 2, 3, r3, 2, 3);
  const Quad columns[4] = {MSP_CPU_SHUFFLE(a, 0, 2, c, 0, 2), MSP_CPU_SHUFFLE(a, 1, 3, c, 1, 3),
                                MSP_CPU_SHUFFLE(b, 0, 2, d, 0, 2), MSP_CPU_SHUFFLE(b, 1, 3, d, 1, 3)};
  for (int k = 0; k < 4; ++k) std::memcpy(target + k * target_pitch, &columns[k], sizeof(Quad));
}
MSP_CPU_INLINE void transpose_four(const double* source, int64_t source_pitch, double* target, int64_t target_pitch) {
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) target[c * target_pitch + r] = source[r * source_pitch + c];
  }
}

}  // namespace muspace::cpu

namespace muspace::bevpool {

MSP_CPU_INLINE void prefetch(const void* data, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(data) + line);
}

// One number of a tensor of any storage type, as T.
template <class T>
MSP_CPU_INLINE T read_number(const void* data, Storage type, int64_t index) {
  switch (type) {
    case Storage::f32:
      return static_cast<T>(static_cast<const float*>(data)[index]);
    case Storage::f16:
      return static_cast<T>(cpu::load(static_cast<const half_t*>(data) + index));
    case Storage::bf16:
      return static_cast<T>(cpu::load(static_cast<const bfloat16_t*>(data) + index));
    case Storage::f64:
      return static_cast<T>(static_cast<const double*>(data)[index]);
  }
  return T(0);
}

template <class V, class T>
MSP_CPU_INLINE void widen(const V* source, int64_t count, T* target) {
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<T>(cpu::load(source + i));
}

template <class T>
MSP_CPU_INLINE void widen(const void* data, Storage type, int64_t offset, int64_t count, T* target) {
  switch (type) {
    case Storage::f32:
      return widen(static_cast<const float*>(data) + offset, count, target);
    case Storage::f16:
      return widen(static_cast<const half_t*>(data) + offset, count, target);
    case Storage::bf16:
      return widen(static_cast<const bfloat16_t*>(data) + offset, count, target);
    case Storage::f64:
      return widen(static_cast<const double*>(data) + offset, count, target);
  }
}

template <class T>
MSP_CPU_INLINE void narrow(const T* source, int64_t count, void* data, Storage type, int64_t offset) {
  switch (type) {
    case Storage::f32: {
      float* const target = static_cast<float*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(source[i]);
      return;
    }
    case Storage::f16: {
      half_t* const target = static_cast<half_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) cpu::store(target + i, static_cast<float>(source[i]));
      return;
    }
    case Storage::bf16: {
      bfloat16_t* const target = static_cast<bfloat16_t*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) cpu::store(target + i, static_cast<float>(source[i]));
      return;
    }
    case Storage::f64: {
      double* const target = static_cast<double*>(data) + offset;
      for (int64_t i = 0; i < count; ++i) target[i] = static_cast<double>(source[i]);
      return;
    }
  }
}

// target[c * target_pitch + r] = source[r * source_pitch + c]
template <class T>
MSP_CPU_INLINE void transpose(const T* source, int64_t source_pitch, int64_t rows, int64_t columns, T* target,
                              int64_t target_pitch) {
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      cpu::transpose_four(source + r * source_pitch + c, source_pitch, target + c * target_pitch + r, target_pitch);
    }
    for (; r < rows; ++r) {
      for (int k = 0; k < 4; ++k) target[(c + k) * target_pitch + r] = source[r * source_pitch + c + k];
    }
  }
  for (; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) target[c * target_pitch + r] = source[r * source_pitch + c];
  }
}

// Where `count` channels-first pixels begin: channel c of pixel i at data[offset + c * pitch + i].
struct PixelRun {
  int64_t offset, pitch, count;
};

// rows[i * channels + c], T, of the pixels of a run; `tile` has room for channels * count.
template <class T>
MSP_CPU_INLINE void read_pixels(const void* data, Storage type, const PixelRun& run, int64_t channels, T* tile,
                                T* rows) {
  if (size_of(type) == static_cast<int64_t>(sizeof(T))) {
    transpose(static_cast<const T*>(data) + run.offset, run.pitch, channels, run.count, rows, channels);
    return;
  }
  for (int64_t c = 0; c < channels; ++c) widen(data, type, run.offset + c * run.pitch, run.count, tile + c * run.count);
  transpose(tile, run.count, channels, run.count, rows, channels);
}

template <class T>
MSP_CPU_INLINE void write_pixels(const T* rows, int64_t channels, T* tile, void* data, Storage type,
                                 const PixelRun& run) {
  if (size_of(type) == static_cast<int64_t>(sizeof(T))) {
    transpose(rows, channels, run.count, channels, static_cast<T*>(data) + run.offset, run.pitch);
    return;
  }
  transpose(rows, channels, run.count, channels, tile, run.count);
  for (int64_t c = 0; c < channels; ++c) {
    narrow(tile + c * run.count, run.count, data, type, run.offset + c * run.pitch);
  }
}

}  // namespace muspace::bevpool
