// SPDX-License-Identifier: Apache-2.0
// The samples of flash_bevpool_sca for the ordered route. A segment is one camera and head of an image; a sample's id
// is (query * levels + level) * points + point.
#pragma once

#include "flash_bevpool_ordered.inl"
#include "flash_bevpool_sca_tables.inl"

namespace muspace::bevpool {

constexpr int kScaKeyThreads = 256;

template <class T, class Array>
struct ScaProblem {
  using Feature = T;
  static constexpr bool kDepth = false;
  static constexpr int kSampleGroup = 1;
  ScaArguments<T, Array> a;
  const uint32_t* hits;  // [images, queries, words]: a bit per camera
  int words;
  int64_t first_segment;  // of the chunk

  MSP_HD int64_t count() const { return static_cast<int64_t>(a.queries()) * a.samples_of_head(); }
  MSP_HD int pixels() const { return a.rows; }
  MSP_HD int channels() const { return a.channels; }
  MSP_HD int64_t grad_row_size() const { return a.row_size(); }
  MSP_HD int64_t feats_row_size() const { return a.row_size(); }
  MSP_HD bool again() const { return false; }
  /// image * cameras + camera of a segment; `head` receives the head.
  MSP_DEVICE int64_t image_camera(int segment, int& head) const {
    const int64_t all = first_segment + segment, found = all / a.heads;
    head = static_cast<int>(all - found * a.heads);
    return found;
  }
  MSP_DEVICE const T* grad_output(int segment) const {
    int head;
    const int64_t image = image_camera(segment, head) / a.cameras;
    return a.grad_output + image * a.queries() * a.row_size() + int64_t{head} * a.channels;
  }
  MSP_DEVICE float* grad_feats(int segment) const {
    int head;
    const int64_t camera = image_camera(segment, head);
    return a.grad_feats + camera * a.rows * a.row_size() + int64_t{head} * a.channels;
  }
  MSP_DEVICE float* grad_depth(int) const { return nullptr; }
  MSP_DEVICE PixelPlace place(int pixel) const {
    const ScaLevel level = level_of_row(a, pixel);
    if (level.height == 0) return {0, false, false, false};
    const int within = pixel - level.start;
    return {level.width, true, within % level.width > 0, within >= level.width};
  }
  /// Locates a sample of a camera that hits; false if it does not count.
  MSP_DEVICE bool locate(int segment, uint32_t id, CornerWeights<float>& weights, uint32_t& row,
                         uint32_t& pixel) const {
    const uint32_t of_head = static_cast<uint32_t>(a.samples_of_head());
    row = id / of_head;
    const int number = static_cast<int>(id - row * of_head), l = number / a.points, point = number - l * a.points;
    int head;
    const int64_t camera = image_camera(segment, head), image = camera / a.cameras;
    const int of_image = static_cast<int>(camera - image * a.cameras);
    const uint32_t* mask = hits + (image * a.queries() + row) * words;
    if ((mask[of_image / 32] >> (of_image % 32) & 1u) == 0) return false;
    int seen = 0;
    for (int w = 0; w < words; ++w) seen += popcount(mask[w]);
    const ScaLevel level = a.levels[l];
    float offset[2], attention;
    a.samples.load(((image * a.queries() + row) * a.heads + head) * of_head + number, offset, attention);
    const Column<float> column = pillar(a, a.projections + camera * 12, static_cast<int>(row));
    const Reference<float> reference = anchor_reference(a.geometry, column, a.z_anchors[point % a.anchors]);
    const LevelSample<float> sample = locate_point(reference, offset[0], offset[1], level.height, level.width);
    if (!sample.inside) return false;
    attention *= camera_scale<float>(seen, a.average);
    const bool left = sample.x0 >= 0, upper = sample.y0 >= 0;
    const float at_left = left ? 1.f - sample.fx : sample.fx, at_right = sample.fx;
    const float at_upper = attention * (upper ? 1.f - sample.fy : sample.fy), at_lower = attention * sample.fy;
    weights.at[0] = at_upper * at_left;
    weights.at[1] = left ? at_upper * at_right : 0.f;
    weights.at[2] = upper ? at_lower * at_left : 0.f;
    weights.at[3] = left && upper ? at_lower * at_right : 0.f;
    pixel = static_cast<uint32_t>(level.start + (upper ? sample.y0 : 0) * level.width + (left ? sample.x0 : 0));
    return true;
  }
  MSP_DEVICE void sample(int segment, uint32_t id, bool active, CornerWeights<float>& weights, uint32_t& row,
                         DepthSlope<float>&) const {
    uint32_t pixel;
    if (active) locate(segment, id, weights, row, pixel);
  }
};

/// A thread per query and word of 32 cameras. Grid: any number of blocks.
template <class T, class Array>
MSP_KERNEL(kScaKeyThreads, 1)
sca_hits(const ScaArguments<T, Array> a, uint32_t* hits, int words, int64_t total) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kScaKeyThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kScaKeyThreads + threadIdx.x; i < total; i += step) {
    const int64_t image_query = i / words, image = image_query / a.queries();
    const int first = static_cast<int>(i - image_query * words) * 32,
              query = static_cast<int>(image_query - image * a.queries());
    uint32_t mask = 0;
    for (int camera = first; camera < first + 32 && camera < a.cameras; ++camera) {
      if (camera_hits(a, pillar(a, a.matrix(image, camera), query))) mask |= 1u << (camera - first);
    }
    hits[i] = mask;
  }
}

/// keys[segment, id] = pixel + 1 for the samples that count, 0 for the others. Grid: samples of a segment, segments.
template <class T, class Array>
MSP_KERNEL(kScaKeyThreads, 1)
sca_keys(const ScaProblem<T, Array> problem, uint32_t* keys) {
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kScaKeyThreads + threadIdx.x;
  if (id >= problem.count()) return;
  CornerWeights<float> weights;
  uint32_t row, pixel = 0;
  const bool counts = problem.locate(static_cast<int>(blockIdx.y), static_cast<uint32_t>(id), weights, row, pixel);
  keys[static_cast<int64_t>(blockIdx.y) * problem.count() + id] = counts ? pixel + 1u : 0u;
}

}  // namespace muspace::bevpool
