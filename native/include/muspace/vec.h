// SPDX-License-Identifier: Apache-2.0
// Vector access to global memory: kCount consecutive storage elements by one load or store, converted to arithmetic
// type.
#pragma once

#include <cstdint>

#include "muspace/numeric.h"
#include "muspace/target.h"

namespace muspace {

/// Plain words of one 2-, 4-, 8- or 16-byte access.
template <int kBytes>
struct alignas(kBytes) Words {
  std::uint32_t word[kBytes / 4];
};
template <>
struct alignas(2) Words<2> {
  std::uint16_t word[1];
};

template <int kBytes>
MSP_DEVICE Words<kBytes> load_words(const void* address) {
  Words<kBytes> words;
#if defined(MSP_DEVICE_TARGET)
  if constexpr (kBytes == 16) {
    const uint4 loaded = MSP_LOAD_CACHED(static_cast<const uint4*>(address));
    words.word[0] = loaded.x, words.word[1] = loaded.y, words.word[2] = loaded.z, words.word[3] = loaded.w;
  } else if constexpr (kBytes == 8) {
    const uint2 loaded = MSP_LOAD_CACHED(static_cast<const uint2*>(address));
    words.word[0] = loaded.x, words.word[1] = loaded.y;
  } else if constexpr (kBytes == 4) {
    words.word[0] = MSP_LOAD_CACHED(static_cast<const unsigned int*>(address));
  } else {
    words.word[0] = MSP_LOAD_CACHED(static_cast<const unsigned short*>(address));
  }
#else
  words = *static_cast<const Words<kBytes>*>(address);
#endif
  return words;
}

template <int kBytes>
MSP_DEVICE void store_words(void* address, const Words<kBytes>& words) {
#if defined(MSP_DEVICE_TARGET)
  if constexpr (kBytes == 16) {
    MSP_STORE_STREAMING(static_cast<uint4*>(address),
                        make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
  } else if constexpr (kBytes == 8) {
    MSP_STORE_STREAMING(static_cast<uint2*>(address), make_uint2(words.word[0], words.word[1]));
  } else if constexpr (kBytes == 4) {
    MSP_STORE_STREAMING(static_cast<unsigned int*>(address), words.word[0]);
  } else {
    MSP_STORE_STREAMING(static_cast<unsigned short*>(address), words.word[0]);
  }
#else
  *static_cast<Words<kBytes>*>(address) = words;
#endif
}

/// values[i] = source[i]; the address is aligned to the whole vector.
template <class T, int kCount>
MSP_DEVICE void load_vector(const T* source, arithmetic_t<T> (&values)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (sizeof(T) == 8) {
    MSP_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = source[i];
  } else {
    const Words<kBytes> words = load_words<kBytes>(source);
    MSP_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] = bit_cast<float>(words.word[i]);
      } else {
        T element;
        element.bits = static_cast<std::uint16_t>(words.word[i / 2] >> (i % 2 * 16));
        values[i] = to_float(element);
      }
    }
  }
}

/// target[i] = values[i] rounded to T; not read again soon.
template <class T, int kCount>
MSP_DEVICE void store_vector(T* target, const arithmetic_t<T> (&values)[kCount]) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  if constexpr (sizeof(T) == 8) {
    MSP_UNROLL
    for (int i = 0; i < kCount; ++i) target[i] = values[i];
  } else {
    Words<kBytes> words;
    if constexpr (sizeof(T) == 4) {
      MSP_UNROLL
      for (int i = 0; i < kCount; ++i) words.word[i] = bit_cast<std::uint32_t>(values[i]);
    } else if constexpr (kCount == 1) {
      words.word[0] = from_float<T>(values[0]).bits;
    } else {
      MSP_UNROLL
      for (int i = 0; i < kCount / 2; ++i) {
        const std::uint32_t low = from_float<T>(values[2 * i]).bits, high = from_float<T>(values[2 * i + 1]).bits;
        words.word[i] = low | (high << 16);
      }
    }
    store_words<kBytes>(target, words);
  }
}

}  // namespace muspace
