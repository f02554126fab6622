// SPDX-License-Identifier: Apache-2.0
// What the kernels of flash_bevpool_sca share: levels, pillars, offsets and weights, the order of the queries.
#pragma once

#include "flash_bevpool_sca_math.h"
#include "flash_bevpool_tables.inl"

namespace muspace::bevpool {

constexpr int kMaxLevels = static_cast<int>(kMaxScaLevels);
constexpr int64_t kMaxGridYZ = 65535;
constexpr int kCameraGroup = 8;  // cameras whose hits are found together

struct ScaLevel {
  int height, width, start;
  Divisor stack;  // height + 1, for rows of cells counted through the cameras
};

/// Offsets and attention weights of the samples, numbered as they lie in memory:
/// (((b * Q + q) * heads + head) * levels + level) * points + point.
template <class Array>
struct SampleArrays {
  Array offsets, weights;
  float uniform;  // the weight of every sample if there are none
  MSP_DEVICE void load(int64_t sample, float (&offset)[2], float& weight) const {
    offset[0] = offset[1] = 0.f;
    if (!offsets.empty()) offsets.load_pair(sample, offset);
    weight = weights.empty() ? uniform : weights.load(sample);
  }
};

template <class T, class Array>
struct ScaArguments {
  const T* image_feats;
  const float* projections;
  const float* z_anchors;
  SampleArrays<Array> samples;
  T* output;             // forward
  const T* grad_output;  // backward
  float* grad_feats;     // null: only the gradients of offsets and weights are wanted
  AnyOutput grad_offsets, grad_weights;
  ScaGeometry<float> geometry;
  ScaLevel levels[kMaxLevels];
  int cameras, rows, heads, channels;  // channels of a head
  int level_count, points, anchors, x_cells, y_cells;
  int channel_blocks;  // of the grid
  bool average;
  uint32_t row_bytes;  // of the features

  MSP_HD int queries() const { return x_cells * y_cells; }
  MSP_HD int64_t row_size() const { return static_cast<int64_t>(heads) * channels; }
  MSP_HD int samples_of_head() const { return level_count * points; }  // of a query
  MSP_HD bool wants_sample_gradients() const { return grad_offsets.data != nullptr || grad_weights.data != nullptr; }
  MSP_DEVICE const float* matrix(int64_t image, int camera) const {
    return projections + (image * cameras + camera) * 12;
  }
};

/// Level of row `row` of the features; a level of height 0 if it belongs to none.
template <class T, class Array>
MSP_DEVICE ScaLevel level_of_row(const ScaArguments<T, Array>& a, int row) {
  ScaLevel found{0, 0, 0, {0, 0}};
  MSP_UNROLL
  for (int l = 0; l < kMaxLevels; ++l) {
    const ScaLevel level = a.levels[l];
    if (l < a.level_count && row >= level.start && row - level.start < level.width * level.height) found = level;
  }
  return found;
}

struct PillarCell {
  int x, y;
};

/// The `index`-th cell when the grid of cells is walked in strips of 2^strip_log2 rows, column by column within a
/// strip: neighbours in this order sample neighbouring pixels. A bijection on [0, queries).
MSP_DEVICE PillarCell strip_cell(int x_cells, int y_cells, int index, int strip_log2) {
  const unsigned strip_cells = static_cast<unsigned>(x_cells) << strip_log2;
  const unsigned strip = static_cast<unsigned>(index) / strip_cells,
                 within = static_cast<unsigned>(index) - strip * strip_cells;
  const unsigned top = strip << strip_log2, left = static_cast<unsigned>(y_cells) - top;
  const unsigned rows = left < (1u << strip_log2) ? left : 1u << strip_log2;
  const unsigned column = rows == (1u << strip_log2) ? within >> strip_log2 : within / rows;
  return {static_cast<int>(column), static_cast<int>(top + within - column * rows)};
}

/// The pillar's products for one camera.
template <class T, class Array>
MSP_DEVICE Column<float> pillar(const ScaArguments<T, Array>& a, const float* matrix, int query) {
  const int y = static_cast<int>(static_cast<unsigned>(query) / static_cast<unsigned>(a.x_cells));
  return project_pillar(a.geometry, matrix, query - y * a.x_cells, y);
}

/// Whether the camera sees any anchor of the pillar.
template <class T, class Array>
MSP_DEVICE bool camera_hits(const ScaArguments<T, Array>& a, const Column<float>& column) {
  bool seen = false;
  MSP_NO_UNROLL
  for (int k = 0; k < a.anchors && !seen; ++k) seen = anchor_reference(a.geometry, column, a.z_anchors[k]).seen;
  return seen;
}

/// Whether 32-bit numbers of pixels, queries and samples of a query reach everything.
inline bool sca_reaches(const ScaInputs& in) {
  const auto fits = [](int64_t a, int64_t b, int64_t limit) { return a <= limit / b; };
  const int64_t samples = in.levels * in.points;
  return in.levels <= kMaxScaLevels && fits(in.cameras, in.rows, kInt32Max / 8) &&
         fits(in.x_cells, in.y_cells, kInt32Max / 16) && in.points <= kInt32Max / 64 && samples <= kInt32Max / 8 &&
         in.channels <= 32768 && in.batch <= kMaxGridYZ && in.anchors <= kInt32Max / 8;
}

template <class T, class Array>
ScaArguments<T, Array> sca_arguments(const ScaInputs& in) {
  ScaArguments<T, Array> a{};
  a.image_feats = static_cast<const T*>(in.image_feats);
  a.projections = static_cast<const float*>(in.projections);
  a.z_anchors = static_cast<const float*>(in.z_anchors);
  a.samples = {Array::of(in.sampling_offsets, in.offset_type), Array::of(in.attention_weights, in.weight_type),
               1.f / static_cast<float>(in.levels * in.points)};
  a.geometry = sca_geometry<float>(in);
  for (int l = 0; l < static_cast<int>(in.levels); ++l) {
    a.levels[l] = {static_cast<int>(in.level_height[l]), static_cast<int>(in.level_width[l]),
                   static_cast<int>(in.level_start[l]),
                   Divisor::of(in.level_height[l] + 1, in.cameras * (in.level_height[l] + 1))};
  }
  a.cameras = static_cast<int>(in.cameras), a.rows = static_cast<int>(in.rows), a.heads = static_cast<int>(in.heads);
  a.channels = static_cast<int>(in.channels / in.heads), a.level_count = static_cast<int>(in.levels);
  a.points = static_cast<int>(in.points), a.anchors = static_cast<int>(in.anchors);
  a.x_cells = static_cast<int>(in.x_cells), a.y_cells = static_cast<int>(in.y_cells);
  a.channel_blocks = 1;
  a.average = in.average_hit_cameras;
  a.row_bytes = static_cast<uint32_t>(in.channels * static_cast<int64_t>(sizeof(T)));
  return a;
}

/// Whether pairs of fp32 offsets and fp32 weights can be loaded as such.
inline bool float32_samples(const ScaInputs& in) {
  return in.offset_type == Storage::f32 && in.weight_type == Storage::f32 && is_aligned(in.sampling_offsets, 8);
}

}  // namespace muspace::bevpool
