// SPDX-License-Identifier: Apache-2.0
// Storage <-> arithmetic conversions that agree bit for bit on every target, explicit fused multiply-add, bit casts.
// 16-bit stores round to nearest even, overflow to infinity and keep NaN a NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "muspace/target.h"

namespace muspace {

template <class To, class From>
MSP_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

/// a * b + c with one rounding. Builds switch contraction off, so this is the only place where products are fused.
MSP_HD float fma(float a, float b, float c) {
#if defined(MSP_DEVICE_TARGET)
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
MSP_HD double fma(double a, double b, double c) {
#if defined(MSP_DEVICE_TARGET)
  return ::fma(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

namespace portable {

MSP_HD std::uint16_t bfloat16_bits(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MSP_HD std::uint16_t half_bits(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                                                    // below 2^-14: subnormal or zero
    // Adding 0.5 puts the subnormal's unit (2^-24) at the last bit of the sum: the addition rounds to nearest even.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bit_cast<std::uint32_t>(sum) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

MSP_HD float half_value(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  const std::uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(magnitude));
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

}  // namespace portable

MSP_HD float to_float(float value) { return value; }
MSP_HD double to_float(double value) { return value; }
MSP_HD float to_float(bfloat16_t value) { return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
MSP_HD float to_float(half_t value) {
#if defined(MSP_DEVICE_TARGET) && defined(MSP_DEVICE_CODE)
  return half_bits_to_float(value.bits);
#else
  return portable::half_value(value.bits);
#endif
}

/// from_float<T>(x): x rounded to the storage type T.
template <class T>
struct Rounded;
template <>
struct Rounded<float> {
  static MSP_HD float from(float value) { return value; }
};
template <>
struct Rounded<double> {
  static MSP_HD double from(double value) { return value; }
};
template <>
struct Rounded<bfloat16_t> {
  static MSP_HD bfloat16_t from(float value) {
#if defined(MSP_NATIVE_BFLOAT16) && defined(MSP_DEVICE_CODE)
    return bfloat16_t{float_to_bfloat16_bits(value)};
#else
    return bfloat16_t{portable::bfloat16_bits(value)};
#endif
  }
};
template <>
struct Rounded<half_t> {
  static MSP_HD half_t from(float value) {
#if defined(MSP_DEVICE_TARGET) && defined(MSP_DEVICE_CODE)
    return half_t{float_to_half_bits(value)};
#else
    return half_t{portable::half_bits(value)};
#endif
  }
};
template <class T, class A>
MSP_HD T from_float(A value) {
  return Rounded<T>::from(value);
}

/// Type of the arithmetic done on a storage type: fp32, or fp64 for fp64.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

}  // namespace muspace
