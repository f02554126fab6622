// SPDX-License-Identifier: Apache-2.0
// What the CPU loops of every family share: instruction-set clones and 16-bit loads that vectorise.
//
// MSP_CPU_CLONES before a static, non-template function compiles it for the baseline and for x86-64-v3 and picks one
// when the library is loaded. Everything it calls must be MSP_CPU_INLINE or MSP_HD, or it keeps the baseline's
// instructions.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

#include "muspace/numeric.h"
#include "muspace/target.h"

#define MSP_CPU_INLINE inline __attribute__((always_inline))

// Resolvers run before a sanitizer is initialised, and other architectures and compilers lack the attribute or need
// none.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MSP_SANITIZE)
#if __GNUC__ >= 12
#define MSP_CPU_CLONES __attribute__((target_clones("default", "arch=x86-64-v3")))
#define MSP_CPU_ARCHITECTURES "x86-64,x86-64-v3"
#else  // older compilers cannot ask a processor for the level
#define MSP_CPU_CLONES __attribute__((target_clones("default", "avx2")))
#define MSP_CPU_ARCHITECTURES "x86-64,avx2"
#endif
#else
#define MSP_CPU_CLONES
#if defined(__x86_64__)
#define MSP_CPU_ARCHITECTURES "x86-64"
#elif defined(__aarch64__)
#define MSP_CPU_ARCHITECTURES "aarch64"
#else
#define MSP_CPU_ARCHITECTURES "host"
#endif
#endif

namespace muspace::cpu {

// Asks for 2 MiB pages behind a large buffer about to be written for the first time. An allocator hands out fresh 4 KiB
// pages for large tensors at every call, and faulting them in costs more than the sums of a sparse backward.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kPage = std::uintptr_t{1} << 21;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data), end = begin + static_cast<std::uintptr_t>(bytes);
  const std::uintptr_t first = (begin + kPage - 1) & ~(kPage - 1), last = end & ~(kPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint: refusal is no fault
#endif
}

MSP_CPU_INLINE float load(const float* pointer) { return *pointer; }
MSP_CPU_INLINE double load(const double* pointer) { return *pointer; }
MSP_CPU_INLINE float load(const bfloat16_t* pointer) {
  return bit_cast<float>(static_cast<std::uint32_t>(pointer->bits) << 16);
}

// The 16-bit conversions below give the bits of numeric.h, selecting by masks because a branch would keep the loops
// around them from vectorising.
MSP_CPU_INLINE std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

MSP_CPU_INLINE float load(const half_t* pointer) {
  const std::uint32_t bits = pointer->bits;
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const std::uint32_t normal = magnitude + select(magnitude >= 0x0f800000u, 0x70000000u, 0x38000000u);
  const float subnormal = bit_cast<float>(magnitude + 0x38800000u) - bit_cast<float>(0x38800000u);
  const std::uint32_t value = select(magnitude < 0x00800000u, bit_cast<std::uint32_t>(subnormal), normal);
  return bit_cast<float>(value | ((bits & 0x8000u) << 16));
}

MSP_CPU_INLINE void store(float* pointer, float value) { *pointer = value; }
MSP_CPU_INLINE void store(double* pointer, double value) { *pointer = value; }
MSP_CPU_INLINE void store(bfloat16_t* pointer, float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  pointer->bits =
      static_cast<std::uint16_t>(select((bits & 0x7fffffffu) > 0x7f800000u, bits | 0x00400000u, rounded) >> 16);
}
MSP_CPU_INLINE void store(half_t* pointer, float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const std::uint32_t subnormal = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t special = select(magnitude > 0x7f800000u, 0x7e00u | ((magnitude >> 13) & 0x3ffu), 0x7c00u);
  const std::uint32_t finite = select(magnitude < 0x38800000u, subnormal, normal);
  pointer->bits =
      static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | select(magnitude >= 0x477ff000u, special, finite));
}

// Lanes<float> is 8 floats, Lanes<double> 4 doubles: one register of x86-64-v3, two of the baseline. Written with the
// compilers' vector types and not left to auto-vectorisation, so that sums over channels have one order on every
// machine.
template <class T>
struct LanesOf;
template <>
struct LanesOf<float> {
  typedef float type __attribute__((vector_size(32)));
};
template <>
struct LanesOf<double> {
  typedef double type __attribute__((vector_size(32)));
};
template <class T>
using Lanes = typename LanesOf<T>::type;
template <class T>
constexpr int kLanes = 32 / sizeof(T);

typedef std::uint32_t Words __attribute__((vector_size(32)));
typedef std::int32_t SignedWords __attribute__((vector_size(32)));
typedef std::uint16_t Halves __attribute__((vector_size(16)));
typedef float Quad __attribute__((vector_size(16)));

template <class Vector>
MSP_CPU_INLINE Vector read_vector(const void* data) {
  Vector vector;
  __builtin_memcpy(&vector, data, sizeof(vector));
  return vector;
}

MSP_CPU_INLINE Lanes<float> load_lanes(const float* data) { return read_vector<Lanes<float>>(data); }
MSP_CPU_INLINE Lanes<double> load_lanes(const double* data) { return read_vector<Lanes<double>>(data); }
MSP_CPU_INLINE Lanes<float> load_lanes(const bfloat16_t* data) {
  return (Lanes<float>)(__builtin_convertvector(read_vector<Halves>(data), Words) << 16);
}
MSP_CPU_INLINE Lanes<float> load_lanes(const half_t* data) {
  const SignedWords bits = __builtin_convertvector(read_vector<Halves>(data), SignedWords);
  const SignedWords magnitude = (bits & 0x7fff) << 13;  // below 2^28: signed comparisons, which are single instructions
  // exact, subnormal halves included, unless the thread takes subnormal inputs as zero
  const SignedWords value = (SignedWords)((Lanes<float>)magnitude * 0x1p112f) | ((magnitude > 0x0f7fffff) & 0x7f800000);
  return (Lanes<float>)(value | ((bits & 0x8000) << 16));
}

template <class T>
MSP_CPU_INLINE void store_lanes(T* data, Lanes<T> lanes) {
  __builtin_memcpy(data, &lanes, sizeof(lanes));
}

// Lanes i, j of `a` followed by lanes k, l of `b`.
#if defined(__clang__)
#define MSP_CPU_SHUFFLE(a, i, j, b, k, l) __builtin_shufflevector(a, b, i, j, 4 + k, 4 + l)
#else
typedef std::int32_t QuadMask __attribute__((vector_size(16)));
#define MSP_CPU_SHUFFLE(a, i, j, b, k, l) __builtin_shuffle(a, b, QuadMask{i, j, 4 + k, 4 + l})
#endif

// The four sums over lanes, each in the order of a halving tree.
MSP_CPU_INLINE void sum_lanes(const Lanes<float>* lanes, float* sums) {
  Quad half[4];
  for (int k = 0; k < 4; ++k) {
    const char* const bytes = reinterpret_cast<const char*>(lanes + k);
    half[k] = read_vector<Quad>(bytes) + read_vector<Quad>(bytes + sizeof(Quad));
  }
  // of each pair of quads: lanes 0 + 2 and 1 + 3
  const Quad a = MSP_CPU_SHUFFLE(half[0], 0, 1, half[1], 0, 1) + MSP_CPU_SHUFFLE(half[0], 2, 3, half[1], 2, 3);
  const Quad b = MSP_CPU_SHUFFLE(half[2], 0, 1, half[3], 0, 1) + MSP_CPU_SHUFFLE(half[2], 2, 3, half[3], 2, 3);
  const Quad total = MSP_CPU_SHUFFLE(a, 0, 2, b, 0, 2) + MSP_CPU_SHUFFLE(a, 1, 3, b, 1, 3);
  __builtin_memcpy(sums, &total, sizeof(total));
}
MSP_CPU_INLINE void sum_lanes(const Lanes<double>* lanes, double* sums) {
  for (int k = 0; k < 4; ++k) sums[k] = (lanes[k][0] + lanes[k][2]) + (lanes[k][1] + lanes[k][3]);
}

}  // namespace muspace::cpu
