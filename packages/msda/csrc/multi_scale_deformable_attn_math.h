// SPDX-License-Identifier: Apache-2.0
// Formulas of multi-scale deformable attention, for host and device. They live only here.
//
// A sample (x, y) of a level of height h and width w sits at X = x * w - 0.5, Y = y * h - 0.5. It counts when
// -1 < X < w and -1 < Y < h; NaN and Inf fail that test. T is float, or double for double values.
#pragma once
#include <cstdint>

#include "muspace/numeric.h"
#include "muspace/target.h"

namespace muspace::msda {

// Sides up to this are exact in fp32, which the window test needs; a longer level counts as one that does not fit.
constexpr int64_t kMaxSide = int64_t{1} << 24;

struct Level {
  int64_t start;          // first row of `value`
  int32_t height, width;  // 0 and 0 when the level does not fit into `value`
};

// Rows of one level as the user's table states it; unsigned, so that a nonsensical table wraps and does not trap.
MSP_HD int64_t stated_rows(const int64_t* spatial_shapes, int64_t level) {
  return static_cast<int64_t>(static_cast<uint64_t>(spatial_shapes[2 * level]) *
                              static_cast<uint64_t>(spatial_shapes[2 * level + 1]));
}

// A level that fits, or one of height 0: height > 0, width > 0, start >= 0 and start + height * width <= rows.
MSP_HD Level fitted_level(int64_t height, int64_t width, int64_t start, int64_t rows) {
  const bool sides = height > 0 && width > 0 && height <= kMaxSide && width <= kMaxSide;
  const bool fits = sides && start >= 0 && start <= rows && height * width <= rows - start;
  Level level;
  level.start = fits ? start : 0;
  level.height = fits ? static_cast<int32_t>(height) : 0;
  level.width = fits ? static_cast<int32_t>(width) : 0;
  return level;
}

// Level `index`; a null `level_start_index` means the exclusive cumulative sum of the stated rows.
MSP_HD Level read_level(const int64_t* spatial_shapes, const int64_t* level_start_index, int64_t index, int64_t rows) {
  int64_t start = 0;
  if (level_start_index != nullptr) {
    start = level_start_index[index];
  } else {
    uint64_t sum = 0;
    for (int64_t l = 0; l < index; ++l) sum += static_cast<uint64_t>(stated_rows(spatial_shapes, l));
    start = static_cast<int64_t>(sum);
  }
  return fitted_level(spatial_shapes[2 * index], spatial_shapes[2 * index + 1], start, rows);
}

// See multi_scale_deformable_attn.h; each library defines that function by this one.
inline bool host_levels_fill(const int64_t* spatial_shapes, const int64_t* level_start_index, int64_t levels, int64_t rows) {
  int64_t total = 0;
  for (int64_t l = 0; l < levels; ++l) {
    const int64_t height = spatial_shapes[2 * l], width = spatial_shapes[2 * l + 1];
    const int64_t start = level_start_index != nullptr ? level_start_index[l] : total;
    if (fitted_level(height, width, start, rows).height == 0) return false;
    total += height * width;
  }
  return total == rows;
}

template <class T>
struct Sample {
  T fx, fy;        // fractions, in [0, 1]
  int32_t x0, y0;  // left column in [-1, width - 1], upper row in [-1, height - 1]
  bool inside;     // false: the sample contributes nothing and receives no gradient; the other fields are 0
};

// floor without the library call: exact for |value| < 2^31.
template <class T>
MSP_HD int32_t floor_to_int(T value) {
#if defined(MSP_DEVICE_CODE)
  return static_cast<int32_t>(floor(value));  // one instruction
#else
  const int32_t truncated = static_cast<int32_t>(value);
  return truncated - static_cast<int32_t>(value < static_cast<T>(truncated));
#endif
}

template <class T>
MSP_HD Sample<T> locate(T x, T y, int32_t height, int32_t width) {
  const T column = muspace::fma(x, static_cast<T>(width), static_cast<T>(-0.5));
  const T row = muspace::fma(y, static_cast<T>(height), static_cast<T>(-0.5));
  Sample<T> sample;
  // a level that does not fit has height 0: -1 < row < 0 could hold there, hence the explicit test
  sample.inside =
      height > 0 && column > T(-1) && column < static_cast<T>(width) && row > T(-1) && row < static_cast<T>(height);
  sample.x0 = sample.inside ? floor_to_int(column) : 0;
  sample.y0 = sample.inside ? floor_to_int(row) : 0;
  sample.fx = sample.inside ? column - static_cast<T>(sample.x0) : T(0);
  sample.fy = sample.inside ? row - static_cast<T>(sample.y0) : T(0);
  return sample;
}

// Corners are numbered 2 * (lower row) + (right column): v00, v01, v10, v11.
template <class T>
struct Corners {
  T v00, v01, v10, v11;
};

// Which corners lie in the level. Meaningful only for a sample that is inside.
struct CornerMask {
  bool k00, k01, k10, k11;
};

template <class T>
MSP_HD CornerMask corner_mask(const Sample<T>& sample, int32_t height, int32_t width) {
  const bool left = sample.x0 >= 0, right = sample.x0 < width - 1;
  const bool upper = sample.y0 >= 0, lower = sample.y0 < height - 1;
  CornerMask mask;
  mask.k00 = upper && left;
  mask.k01 = upper && right;
  mask.k10 = lower && left;
  mask.k11 = lower && right;
  return mask;
}

// Bilinear corner weights, corners outside the level not yet removed.
template <class T>
MSP_HD Corners<T> corner_weights(T fx, T fy) {
  const T gx = T(1) - fx, gy = T(1) - fy;
  Corners<T> weights;
  weights.v00 = gy * gx;
  weights.v01 = gy * fx;
  weights.v10 = fy * gx;
  weights.v11 = fy * fx;
  return weights;
}

// The sampled value, or its inner product with the output gradient when `v` holds inner products per corner.
template <class T>
MSP_HD T interpolate(const Corners<T>& weights, const Corners<T>& v) {
  return muspace::fma(weights.v11, v.v11,
                      muspace::fma(weights.v10, v.v10, muspace::fma(weights.v01, v.v01, weights.v00 * v.v00)));
}

template <class T>
struct SampleGradient {
  T weight;  // attention weight
  T x, y;    // normalised location
};

// `dots` are the inner products over channels of the output gradient with the four corner values (0 for a corner
// outside the level). The gradient of `value` at corner k is attention * weights.k * grad_output.
template <class T>
MSP_HD SampleGradient<T> sample_gradient(const Corners<T>& dots, T fx, T fy, T attention, int32_t height,
                                         int32_t width) {
  const T gx = T(1) - fx, gy = T(1) - fy;
  SampleGradient<T> gradient;
  gradient.weight = interpolate(corner_weights(fx, fy), dots);
  gradient.x = attention * static_cast<T>(width) * muspace::fma(fy, dots.v11 - dots.v10, gy * (dots.v01 - dots.v00));
  gradient.y = attention * static_cast<T>(height) * muspace::fma(fx, dots.v11 - dots.v01, gx * (dots.v10 - dots.v00));
  return gradient;
}

}  // namespace muspace::msda
