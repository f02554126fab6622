// SPDX-License-Identifier: Apache-2.0
// Backward, route "general": a warp per (image, query, head), lanes over channels; every sample adds to the gradient of
// the features on its own. For any extent. Gradients of offsets and weights are summed in a fixed order.
#pragma once

#include "flash_bevpool_sca_tables.inl"

namespace muspace::bevpool {

constexpr int kScaGeneralThreads = 256;
constexpr int kScaGeneralWarps = kScaGeneralThreads / kLanes;

/// The query of a warp. Idle warps take part in the shuffles.
struct ScaWarp {
  int64_t image;
  int query, head;
  bool active;
};

/// Which of 32 cameras from `first` on hit the warp's query. The whole warp calls it.
template <class T, class Array>
MSP_DEVICE uint32_t find_hits(const ScaArguments<T, Array>& a, const ScaWarp& warp, int first) {
  const int camera = first + lane_id();
  const bool exists = warp.active && camera < a.cameras;
  return ballot(exists && camera_hits(a, pillar(a, a.matrix(warp.image, camera), warp.query)));
}

/// The four inner products of one sample of one camera, and its share of the gradient of the features. The whole block
/// calls it, with a sample that is not inside if there is nothing to add.
template <class T, class Array>
MSP_DEVICE void sample_dots(const ScaArguments<T, Array>& a, const ScaWarp& warp, const LevelSample<float>& sample,
                            const ScaLevel& level, int camera, float factor, float (&dots)[4]) {
  const int64_t row_size = a.row_size(), head_channel = int64_t{warp.head} * a.channels;
  const T* gradient = a.grad_output + (warp.image * a.queries() + warp.query) * row_size + head_channel;
  const CornerWeights<float> w = bilinear_weights(sample.fx, sample.fy);
  const int64_t row = (warp.image * a.cameras + camera) * a.rows + level.start +
                      static_cast<int64_t>(sample.y0) * level.width + sample.x0;
  for (int k = 0; k < 4; ++k) {
    dots[k] = 0.f;
    if (sample.inside && has_corner(sample, k, level.height, level.width)) {
      const int64_t element = (row + (k & 1 ? 1 : 0) + (k & 2 ? level.width : 0)) * row_size + head_channel;
      for (int c = lane_id(); c < a.channels; c += kLanes) {
        const float g = to_float(gradient[c]);
        dots[k] = muspace::fma(g, to_float(a.image_feats[element + c]), dots[k]);
        if (a.grad_feats) atomic_add(a.grad_feats + element + c, factor * w.at[k] * g);
      }
    }
    dots[k] = group_sum<kLanes>(dots[k]);
  }
}

/// Gradients of one sample, summed over the cameras that hit. The whole block calls it.
template <class T, class Array>
MSP_DEVICE PointGradient<float> sum_cameras(const ScaArguments<T, Array>& a, const ScaWarp& warp, int level_index,
                                            int point, const float (&offset)[2], float weight, float scale) {
  const ScaLevel level = a.levels[level_index];
  PointGradient<float> sum{0.f, 0.f, 0.f};
  for (int first = 0; first < a.cameras; first += kLanes) {
    uint32_t left = find_hits(a, warp, first);
    const int rounds = converged_max(popcount(left));
    for (int i = 0; i < rounds; ++i, left &= left - 1u) {
      const int camera = first + (left != 0 ? lowest_bit(left) : 0);
      LevelSample<float> sample{};
      if (left != 0) {
        const Column<float> column = pillar(a, a.matrix(warp.image, camera), warp.query);
        const Reference<float> reference = anchor_reference(a.geometry, column, a.z_anchors[point % a.anchors]);
        sample = locate_point(reference, offset[0], offset[1], level.height, level.width);
      }
      float dots[4];
      sample_dots(a, warp, sample, level, camera, weight * scale, dots);
      if (!sample.inside) continue;
      const PointGradient<float> part =
          point_gradient(dots[0], dots[1], dots[2], dots[3], sample.fx, sample.fy, weight, scale);
      sum.offset_x += part.offset_x, sum.offset_y += part.offset_y, sum.weight += part.weight;
    }
  }
  return sum;
}

/// Grid: any number of blocks.
template <class T, class Array>
MSP_KERNEL(kScaGeneralThreads, 1)
sca_backward_general(const ScaArguments<T, Array> a, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScaGeneralWarps;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kScaGeneralWarps; first < total; first += step) {
    ScaWarp warp;
    warp.active = first + warp_id() < total;
    const int64_t query_head = warp.active ? first + warp_id() : 0, image_query = query_head / a.heads;
    warp.head = static_cast<int>(query_head - image_query * a.heads);
    warp.image = image_query / a.queries();
    warp.query = static_cast<int>(image_query - warp.image * a.queries());
    int hits = 0;
    for (int camera = 0; camera < a.cameras; camera += kLanes) hits += popcount(find_hits(a, warp, camera));
    const float scale = camera_scale<float>(hits, a.average);
    for (int i = 0; i < a.samples_of_head(); ++i) {
      const int level = i / a.points, point = i - level * a.points;
      const int64_t number = query_head * a.samples_of_head() + i;
      float offset[2], weight;
      a.samples.load(number, offset, weight);
      const PointGradient<float> gradient = sum_cameras(a, warp, level, point, offset, weight, scale);
      if (!warp.active || lane_id() != 0) continue;
      if (!a.grad_weights.empty()) a.grad_weights.store(number, gradient.weight);
      if (a.grad_offsets.empty()) continue;
      a.grad_offsets.store(2 * number, gradient.offset_x);
      a.grad_offsets.store(2 * number + 1, gradient.offset_y);
    }
  }
}

}  // namespace muspace::bevpool
