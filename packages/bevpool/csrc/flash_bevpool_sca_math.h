// SPDX-License-Identifier: Apache-2.0
// Formulas of flash_bevpool_sca, for host and device. They live only here. T is float, or double for double features.
//
// A query is a pillar: the centre of cell (x, y) at every z anchor goes through each camera's matrix. A camera *hits*
// when it sees any anchor: depth > epsilon and 0 < u / image_width < 1 and 0 < v / image_height < 1, NaN and Inf never.
// All anchors of a camera that hits take part, seen or not. Point k hangs on anchor k % anchors; on a level of height h
// and width w it lies at X = u / image_width * w + (offset - 0.5), Y likewise, and counts when -1 < X < w and -1 < Y <
// h.
#pragma once
#include <cstdint>

#include "flash_bevpool_math.h"
#include "flash_bevpool_sca.h"

namespace muspace::bevpool {

// Everything about the call that the formulas need, rounded once from fp64.
template <class T>
struct ScaGeometry {
  T x_min, y_min, x_step, y_step;
  T inverse_width, inverse_height;  // of the image
  T epsilon;
};

template <class T>
ScaGeometry<T> sca_geometry(const ScaInputs& inputs) {
  ScaGeometry<T> geometry;
  geometry.x_min = static_cast<T>(inputs.x_min), geometry.y_min = static_cast<T>(inputs.y_min);
  geometry.x_step = static_cast<T>((inputs.x_max - inputs.x_min) / inputs.x_cells);
  geometry.y_step = static_cast<T>((inputs.y_max - inputs.y_min) / inputs.y_cells);
  geometry.inverse_width = static_cast<T>(1.0 / inputs.image_width);
  geometry.inverse_height = static_cast<T>(1.0 / inputs.image_height);
  geometry.epsilon = static_cast<T>(inputs.epsilon);
  return geometry;
}

// The camera's products for the pillar of query = y * x_cells + x.
template <class T>
MSP_HD Column<T> project_pillar(const ScaGeometry<T>& geometry, const T* matrix, int64_t x, int64_t y) {
  return project_column(matrix, cell_centre(geometry.x_min, geometry.x_step, x),
                        cell_centre(geometry.y_min, geometry.y_step, y));
}

template <class T>
struct Reference {
  T x, y;     // in units of the image, its left upper corner is (0, 0)
  bool seen;  // the camera hits if it sees any anchor
};

template <class T>
MSP_HD Reference<T> anchor_reference(const ScaGeometry<T>& geometry, const Column<T>& column, T z) {
  const ImagePoint<T> point = project(column, z, geometry.epsilon);
  Reference<T> reference;
  reference.x = point.u * geometry.inverse_width;
  reference.y = point.v * geometry.inverse_height;
  reference.seen = point.depth > geometry.epsilon && is_finite(point.depth) && reference.x > T(0) &&
                   reference.x < T(1) && reference.y > T(0) && reference.y < T(1);
  return reference;
}

template <class T>
struct LevelSample {
  T fx, fy;        // fractions, in [0, 1]
  int32_t x0, y0;  // left column in [-1, width - 1], upper row in [-1, height - 1]
  bool inside;     // false: the sample contributes nothing and receives no gradient; the other fields are 0
};

template <class T>
MSP_HD int32_t floor_of(T value) {  // exact for |value| < 2^31
  const int32_t truncated = static_cast<int32_t>(value);
  return truncated - static_cast<int32_t>(value < static_cast<T>(truncated));
}

// (offset_x, offset_y) in pixels of the level. A level of height or width 0 has no samples inside.
template <class T>
MSP_HD LevelSample<T> locate_point(const Reference<T>& reference, T offset_x, T offset_y, int32_t height,
                                   int32_t width) {
  const T column = muspace::fma(reference.x, static_cast<T>(width), offset_x - T(0.5));
  const T row = muspace::fma(reference.y, static_cast<T>(height), offset_y - T(0.5));
  LevelSample<T> sample;
  sample.inside = height > 0 && width > 0 && column > T(-1) && column < static_cast<T>(width) && row > T(-1) &&
                  row < static_cast<T>(height);
  sample.x0 = sample.inside ? floor_of(column) : 0;
  sample.y0 = sample.inside ? floor_of(row) : 0;
  sample.fx = sample.inside ? column - static_cast<T>(sample.x0) : T(0);
  sample.fy = sample.inside ? row - static_cast<T>(sample.y0) : T(0);
  return sample;
}

// Whether corner 2 * (lower row) + (right column) of a sample that is inside lies in the level. Corners outside are
// neither read nor multiplied by zero.
template <class T>
MSP_HD bool has_corner(const LevelSample<T>& sample, int corner, int32_t height, int32_t width) {
  const bool column = corner & 1 ? sample.x0 < width - 1 : sample.x0 >= 0;
  const bool row = corner & 2 ? sample.y0 < height - 1 : sample.y0 >= 0;
  return column && row;
}

// What every hit camera's sum is multiplied by.
template <class T>
MSP_HD T camera_scale(int64_t hits, bool average_hit_cameras) {
  return average_hit_cameras && hits > 1 ? T(1) / static_cast<T>(hits) : T(1);
}

// Gradients of one sample of one hit camera; those of the cameras are added. `dots` are the inner products of the
// output gradient with the corner features (0 for a corner outside), `attention` is the point's weight, `scale` is
// camera_scale(). The gradient of the feature at corner k is scale * attention * corner_k * g. Where X is an integer
// the derivative is the one to the right.
template <class T>
struct PointGradient {
  T offset_x, offset_y, weight;
};

template <class T>
MSP_HD PointGradient<T> point_gradient(T d0, T d1, T d2, T d3, T fx, T fy, T attention, T scale) {
  const T gx = T(1) - fx, gy = T(1) - fy, factor = attention * scale;
  PointGradient<T> gradient;
  gradient.weight = scale * interpolate(bilinear_weights(fx, fy), d0, d1, d2, d3);
  gradient.offset_x = factor * muspace::fma(fy, d3 - d2, gy * (d1 - d0));
  gradient.offset_y = factor * muspace::fma(fx, d3 - d1, gx * (d2 - d0));
  return gradient;
}

}  // namespace muspace::bevpool
