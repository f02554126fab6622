// SPDX-License-Identifier: Apache-2.0
// Formulas of flash_bevpool, for host and device. They live only here. T is float, or double for double features.
//
// A sample is one (cell, camera, height): the centre (x, y, z) of a voxel goes through the camera's 3x4 matrix to
// (u', v', d). It lands on the feature map at U = u' / max(d, epsilon) * width / image_width, V likewise; pixel centres
// lie on integers. It counts when 0 < d < Inf, 0 <= U < width, 0 <= V < height, and its depth weight is finite and not
// below the threshold. NaN fails each of these tests.
#pragma once
#include <cmath>
#include <cstdint>

#include "flash_bevpool.h"
#include "muspace/numeric.h"
#include "muspace/target.h"

namespace muspace::bevpool {

// Sides up to this are exact in fp32, which the window test needs.
constexpr int64_t kMaxMapSide = int64_t{1} << 24;

MSP_HD bool is_finite(float value) { return (bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u; }
MSP_HD bool is_finite(double value) { return (bit_cast<uint64_t>(value) & 0x7ff0000000000000u) != 0x7ff0000000000000u; }

template <class T>
MSP_HD T magnitude(T value) {
  return value < T(0) ? -value : value;
}

// exp(x) for x <= 0, by the same operations on every target: it decides which samples count. Within 1 ulp; 0 where the
// result would not be a normal number, NaN for NaN.
MSP_HD float exp_negative(float x) {
  // selects and no branches: loops over samples on the cpu become vector code
  const bool vanishes = x < -87.f;
  const float bounded = vanishes ? -87.f : x;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: the sum has no bits behind the point
  const float shifted = muspace::fma(bounded, 1.44269504088896341f, kRound), n = shifted - kRound;
  const float r = muspace::fma(n, 2.12194440e-4f, muspace::fma(n, -0.693359375f, bounded));
  float p = 1.9875691500e-4f;
  p = muspace::fma(p, r, 1.3981999507e-3f);
  p = muspace::fma(p, r, 8.3334519073e-3f);
  p = muspace::fma(p, r, 4.1665795894e-2f);
  p = muspace::fma(p, r, 1.6666665459e-1f);
  p = muspace::fma(p, r, 5.0000001201e-1f);
  const float e = muspace::fma(p, r * r, r) + 1.f;
  // the lowest bits of `shifted` are n as an integer
  const float power = bit_cast<float>((bit_cast<uint32_t>(shifted) + 127u) << 23);
  return e * (vanishes ? 0.f : power);
}
MSP_HD double exp_negative(double x) { return ::exp(x); }

// Everything about the call that the formulas need, rounded once from fp64.
template <class T>
struct FlashGeometry {
  T x_min, y_min, z_min, x_step, y_step, z_step;
  T u_scale, v_scale;  // feature pixels per image pixel
  T width, height;     // of the feature map
  T epsilon, threshold;
  DepthDistribution distribution;
};

template <class T>
FlashGeometry<T> flash_geometry(const FlashInputs& inputs) {
  const BevGrid& g = inputs.grid;
  const auto step = [](double low, double high, int64_t cells) { return static_cast<T>((high - low) / cells); };
  FlashGeometry<T> geometry;
  geometry.x_min = static_cast<T>(g.x_min), geometry.x_step = step(g.x_min, g.x_max, g.x_cells);
  geometry.y_min = static_cast<T>(g.y_min), geometry.y_step = step(g.y_min, g.y_max, g.y_cells);
  geometry.z_min = static_cast<T>(g.z_min), geometry.z_step = step(g.z_min, g.z_max, g.z_cells);
  geometry.u_scale = static_cast<T>(inputs.width / inputs.image_width);
  geometry.v_scale = static_cast<T>(inputs.height / inputs.image_height);
  geometry.width = static_cast<T>(inputs.width), geometry.height = static_cast<T>(inputs.height);
  geometry.epsilon = static_cast<T>(inputs.epsilon), geometry.threshold = static_cast<T>(inputs.threshold);
  geometry.distribution = inputs.distribution;
  return geometry;
}

// Centre of cell `index` along one axis.
template <class T>
MSP_HD T cell_centre(T low, T step, int64_t index) {
  return muspace::fma(static_cast<T>(index) + T(0.5), step, low);
}

// The three products of a camera matrix with (x, y, z, 1) for all z of one (x, y): value + slope * z.
template <class T>
struct Column {
  T u, v, depth;                    // at z = 0
  T u_slope, v_slope, depth_slope;  // the matrix's third column
};

// `matrix` is row-major 3x4.
template <class T>
MSP_HD Column<T> project_column(const T* matrix, T x, T y) {
  Column<T> column;
  column.u = muspace::fma(matrix[1], y, muspace::fma(matrix[0], x, matrix[3]));
  column.v = muspace::fma(matrix[5], y, muspace::fma(matrix[4], x, matrix[7]));
  column.depth = muspace::fma(matrix[9], y, muspace::fma(matrix[8], x, matrix[11]));
  column.u_slope = matrix[2], column.v_slope = matrix[6], column.depth_slope = matrix[10];
  return column;
}

template <class T>
struct ImagePoint {
  T u, v;   // image pixels
  T depth;  // metres along the optical axis
};

template <class T>
MSP_HD ImagePoint<T> project(const Column<T>& column, T z, T epsilon) {
  ImagePoint<T> point;
  point.depth = muspace::fma(column.depth_slope, z, column.depth);
  const T inverse = T(1) / (point.depth > epsilon ? point.depth : epsilon);
  point.u = muspace::fma(column.u_slope, z, column.u) * inverse;
  point.v = muspace::fma(column.v_slope, z, column.v) * inverse;
  return point;
}

template <class T>
struct MapSample {
  T fx, fy;        // fractions, in [0, 1)
  T depth;         // of the voxel
  int32_t x0, y0;  // left column and upper row, inside the map
  bool inside;     // false: the sample does not count, and only `depth` has a meaning
};

// The sample at (u, v) of the map.
template <class T>
MSP_HD MapSample<T> map_sample(const FlashGeometry<T>& geometry, T u, T v, T depth) {
  MapSample<T> sample;
  sample.depth = depth;
  sample.inside =
      depth > T(0) && is_finite(depth) && u >= T(0) && u < geometry.width && v >= T(0) && v < geometry.height;
  sample.x0 = sample.inside ? static_cast<int32_t>(u) : 0;
  sample.y0 = sample.inside ? static_cast<int32_t>(v) : 0;
  sample.fx = sample.inside ? u - static_cast<T>(sample.x0) : T(0);
  sample.fy = sample.inside ? v - static_cast<T>(sample.y0) : T(0);
  return sample;
}

template <class T>
MSP_HD MapSample<T> locate_voxel(const FlashGeometry<T>& geometry, const Column<T>& column, T z) {
  const ImagePoint<T> point = project(column, z, geometry.epsilon);
  return map_sample(geometry, point.u * geometry.u_scale, point.v * geometry.v_scale, point.depth);
}

// Steps, in pixels of the map, from a sample's upper left corner to the right and to the lower ones: 0 in the last
// column or row, where the border is repeated.
template <class T>
MSP_HD int32_t right_step(const MapSample<T>& sample, int64_t width) {
  return sample.x0 + 1 < width ? 1 : 0;
}
template <class T>
MSP_HD int64_t lower_step(const MapSample<T>& sample, int64_t height, int64_t width) {
  return sample.y0 + 1 < height ? width : 0;
}

// Weights of the corners 2 * (lower row) + (right column).
template <class T>
struct CornerWeights {
  T at[4];
};

template <class T>
MSP_HD CornerWeights<T> bilinear_weights(T fx, T fy) {
  const T gx = T(1) - fx, gy = T(1) - fy;
  return {{gy * gx, gy * fx, fy * gx, fy * fx}};
}

template <class T>
MSP_HD T interpolate(const CornerWeights<T>& weights, T v0, T v1, T v2, T v3) {
  return muspace::fma(weights.at[3], v3,
                      muspace::fma(weights.at[2], v2, muspace::fma(weights.at[1], v1, weights.at[0] * v0)));
}

// How probable the voxel's depth is under the pixel's distribution, with the derivatives of log(weight).
template <class T>
struct DepthWeight {
  T weight;
  T z, inverse_scale;
  bool kept;  // false: the sample does not count
};

// `mean` and `scale` are interpolated between the four corners.
template <class T>
MSP_HD DepthWeight<T> depth_weight(const FlashGeometry<T>& geometry, T depth, T mean, T scale) {
  DepthWeight<T> result;
  result.inverse_scale = T(1) / (scale + geometry.epsilon);
  const T z = (depth - mean) * result.inverse_scale;
  const bool gaussian = geometry.distribution == DepthDistribution::gaussian;
  const T density = exp_negative(gaussian ? T(-0.5) * z * z : -magnitude(z));
  result.z = z;
  result.weight = (gaussian ? density : T(0.5) * density) * result.inverse_scale;
  const bool finite = is_finite(z), weighed = is_finite(result.weight), counts = result.weight >= geometry.threshold;
  result.kept = finite & weighed & counts;
  return result;
}

// d log(weight) / d mean and d log(weight) / d scale; 0 for the weight 0, whatever z is. |z| has the derivative 0 at 0.
template <class T>
struct DepthSlope {
  T mean, scale;
};

template <class T>
MSP_HD DepthSlope<T> depth_slope(const FlashGeometry<T>& geometry, const DepthWeight<T>& w) {
  const T size = magnitude(w.z), sign = w.z > T(0) ? T(1) : w.z < T(0) ? T(-1) : T(0);
  const bool gaussian = geometry.distribution == DepthDistribution::gaussian, vanishes = w.weight == T(0);
  DepthSlope<T> slope;
  slope.mean = vanishes ? T(0) : (gaussian ? w.z : sign) * w.inverse_scale;
  slope.scale = vanishes ? T(0) : (gaussian ? muspace::fma(w.z, w.z, T(-1)) : size - T(1)) * w.inverse_scale;
  return slope;
}

// The output is (sum of weight * feature over the samples that count) * inverse_count. With the gradient g of the
// output, a sample's share is weight * inverse_count =: share, and
//   d feature at corner k = share * corner_k * g
//   d mean at corner k    = share * corner_k * <g, feature> * slope.mean, d scale likewise
// where `feature` is the interpolated one. The count and the threshold are constants.
template <class T>
MSP_HD T inverse_count(int64_t count) {
  return count > 0 ? T(1) / static_cast<T>(count) : T(0);
}

}  // namespace muspace::bevpool
