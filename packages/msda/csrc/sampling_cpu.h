// SPDX-License-Identifier: Apache-2.0
// What the CPU loops of both operators share: numbers of any storage type, corner rows, and their weighted sums over
// channels. Everything is inlined into functions under MSP_CPU_CLONES.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "multi_scale_deformable_attn_math.h"
#include "muspace/call.h"
#include "muspace/cpu.h"

namespace muspace::msda {

// `count` numbers of a location or weight tensor, as T: in place, or converted into `buffer`.
template <class T>
MSP_CPU_INLINE const T* read_numbers(const void* data, Storage storage, int64_t offset, int count, T* buffer) {
  switch (storage) {
    case Storage::f32: {
      const float* numbers = static_cast<const float*>(data) + offset;
      if constexpr (sizeof(T) == sizeof(float)) return numbers;
      for (int i = 0; i < count; ++i) buffer[i] = static_cast<T>(numbers[i]);
      return buffer;
    }
    case Storage::f64: {
      const double* numbers = static_cast<const double*>(data) + offset;
      if constexpr (sizeof(T) == sizeof(double)) return numbers;
      for (int i = 0; i < count; ++i) buffer[i] = static_cast<T>(numbers[i]);
      return buffer;
    }
    case Storage::f16:
      for (int i = 0; i < count; ++i) buffer[i] = cpu::load(static_cast<const half_t*>(data) + offset + i);
      return buffer;
    case Storage::bf16:
      break;
  }
  for (int i = 0; i < count; ++i) buffer[i] = cpu::load(static_cast<const bfloat16_t*>(data) + offset + i);
  return buffer;
}

template <class T>
MSP_CPU_INLINE void write_number(void* data, Storage storage, int64_t index, T value) {
  switch (storage) {
    case Storage::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case Storage::f64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      return;
    case Storage::f16:
      cpu::store(static_cast<half_t*>(data) + index, static_cast<float>(value));
      return;
    case Storage::bf16:
      cpu::store(static_cast<bfloat16_t*>(data) + index, static_cast<float>(value));
      return;
  }
}

MSP_CPU_INLINE void prefetch(const void* data, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const char*>(data) + line);
}

// A sample ready for its channels: corner rows (or the zero row) and attention times corner weight.
template <class V, class T>
struct Gather {
  const V* rows[4];
  T weights[4];
};

// The rows of the four corners of `sample`; `base` is the first row of the level.
template <class V, class T>
MSP_CPU_INLINE void corner_rows(const Sample<T>& sample, const Level& level, const V* base, int64_t pitch,
                                const V* zeros, const V** rows) {
  const CornerMask mask = corner_mask(sample, level.height, level.width);
  const int64_t upper = static_cast<int64_t>(sample.y0) * level.width + sample.x0, lower = upper + level.width;
  rows[0] = mask.k00 ? base + upper * pitch : zeros;
  rows[1] = mask.k01 ? base + (upper + 1) * pitch : zeros;
  rows[2] = mask.k10 ? base + lower * pitch : zeros;
  rows[3] = mask.k11 ? base + (lower + 1) * pitch : zeros;
}

// sums[c] += the weighted corner rows, for N vectors of channels from `first`, kept in registers over all samples.
template <int N, class V, class T>
MSP_CPU_INLINE void gather_vectors(const Gather<V, T>* gathers, int count, int64_t first, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  cpu::Lanes<T> sum[N];
  for (int n = 0; n < N; ++n) sum[n] = cpu::load_lanes(sums + first + n * kWidth);
  for (int s = 0; s < count; ++s) {
    const T w0 = gathers[s].weights[0], w1 = gathers[s].weights[1], w2 = gathers[s].weights[2],
            w3 = gathers[s].weights[3];
    const V *r0 = gathers[s].rows[0] + first, *r1 = gathers[s].rows[1] + first, *r2 = gathers[s].rows[2] + first,
            *r3 = gathers[s].rows[3] + first;
    for (int n = 0; n < N; ++n) {
      const int c = n * kWidth;
      sum[n] += (w0 * cpu::load_lanes(r0 + c) + w1 * cpu::load_lanes(r1 + c)) +
                (w2 * cpu::load_lanes(r2 + c) + w3 * cpu::load_lanes(r3 + c));
    }
  }
  for (int n = 0; n < N; ++n) cpu::store_lanes(sums + first + n * kWidth, sum[n]);
}

// The channels [first, last) that fill no vector.
template <class V, class T>
MSP_CPU_INLINE void gather_rest(const Gather<V, T>* gathers, int count, int64_t first, int64_t last, T* sums) {
  for (int s = 0; s < count; ++s) {
    const Gather<V, T>& gather = gathers[s];
    for (int64_t c = first; c < last; ++c) {
      sums[c] +=
          (gather.weights[0] * cpu::load(gather.rows[0] + c) + gather.weights[1] * cpu::load(gather.rows[1] + c)) +
          (gather.weights[2] * cpu::load(gather.rows[2] + c) + gather.weights[3] * cpu::load(gather.rows[3] + c));
    }
  }
}

// sums += the gathered samples, over the channels [first, last).
template <class V, class T>
MSP_CPU_INLINE void gather_row(const Gather<V, T>* gathers, int count, int64_t first, int64_t last, T* sums) {
  constexpr int kWidth = cpu::kLanes<T>;
  int64_t c = first;
  for (; c + 4 * kWidth <= last; c += 4 * kWidth) gather_vectors<4>(gathers, count, c, sums);
  for (; c + kWidth <= last; c += kWidth) gather_vectors<1>(gathers, count, c, sums);
  if (c < last) gather_rest(gathers, count, c, last, sums);
}

// Where the additions of one sample go: rows of the gradient, or scrap rows for corners outside the level or the band.
template <class T>
struct Scatter {
  T* rows[4];
  T weights[4];
};

// Levels that share rows of value cannot be worked on side by side.
inline bool levels_overlap(const std::vector<Level>& levels) {
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const Level& level : levels) {
    if (level.height > 0) spans.emplace_back(level.start, level.start + int64_t{level.height} * level.width);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return true;
  }
  return false;
}

}  // namespace muspace::msda
