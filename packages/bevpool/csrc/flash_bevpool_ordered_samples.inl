// SPDX-License-Identifier: Apache-2.0
// The samples of flash_bevpool for the ordered route: (cell, camera, height) of a run of an image's cells.
#pragma once

#include "flash_bevpool_general.inl"
#include "flash_bevpool_ordered.inl"

namespace muspace::bevpool {

constexpr int kKeyThreads = 256;
constexpr int kKeyCells = kKeyThreads / kLanes * kWarpCells;  // of a block

/// A segment is the whole image; one chunk has one segment. A sample's id is ((cell - first_cell) * cameras + camera) *
/// z_cells + height.
template <class T>
struct FlashProblem {
  using Feature = T;
  static constexpr bool kDepth = true;
  static constexpr int kSampleGroup = 8;
  FlashArguments<T> a;
  int image, first_cell, cells;  // of the chunk
  const uint32_t* counts;        // kept samples of each cell of the chunk

  MSP_HD int64_t tests() const { return static_cast<int64_t>(a.cameras) * a.z_cells; }
  MSP_HD int64_t count() const { return cells * tests(); }
  MSP_HD int pixels() const { return static_cast<int>(a.image_pixels()); }
  MSP_HD int channels() const { return static_cast<int>(a.channels); }
  MSP_HD int64_t grad_row_size() const { return a.channels; }
  MSP_HD int64_t feats_row_size() const { return a.channels; }
  MSP_HD bool again() const { return first_cell > 0; }
  MSP_DEVICE const T* grad_output(int) const {
    return a.grad_output + (static_cast<int64_t>(image) * a.y_cells * a.x_cells + first_cell) * a.channels;
  }
  MSP_DEVICE float* grad_feats(int) const { return a.grad_feats + image * a.image_pixels() * a.channels; }
  MSP_DEVICE float* grad_depth(int) const { return a.grad_depth + 2 * image * a.image_pixels(); }
  MSP_DEVICE PixelPlace place(int pixel) const {
    const int row = pixel / a.width;
    return {a.width, true, pixel - row * a.width > 0, row % a.height > 0};
  }
  /// Weights and slopes of a sample that counts; the whole block calls it.
  MSP_DEVICE void sample(int, uint32_t id, bool active, CornerWeights<float>& weights, uint32_t& row,
                         DepthSlope<float>& slope) const {
    const uint32_t per_cell = static_cast<uint32_t>(tests());
    row = id / per_cell;
    const int cell = first_cell + static_cast<int>(row), y = cell / a.x_cells;
    KeptSample sample{};
    if (active) sample = test_alone(a, image, cell - y * a.x_cells, y, id - row * per_cell);
    const int64_t pixel =
        ((static_cast<int64_t>(image) * a.cameras + sample.camera) * a.height + sample.place.y0) * a.width +
        sample.place.x0;
    const bool right = sample.place.x0 + 1 < a.width, lower = sample.place.y0 + 1 < a.height;
    const CornerWeights<float> w = bilinear_weights(right ? sample.place.fx : 0.f, lower ? sample.place.fy : 0.f);
    float dot = 0.f;
    if (active) dot = corner_dot(w, pixel, right, lower, grad_output(0) + row * a.channels);
    dot = group_sum<kSampleGroup>(dot);
    if (!active) return;
    slope = depth_slope(a.geometry, sample.weight);
    slope.mean *= dot, slope.scale *= dot;
    const float share = sample.weight.weight * inverse_count<float>(counts[row]);
    MSP_UNROLL
    for (int k = 0; k < 4; ++k) weights.at[k] = share * w.at[k];
  }
  /// The lane's part of <gradient, interpolated feature>.
  MSP_DEVICE float corner_dot(const CornerWeights<float>& w, int64_t pixel, bool right, bool lower,
                              const T* gradient) const {
    const T* corner = a.image_feats + pixel * a.channels;
    const int64_t to_right = right ? a.channels : 0, to_lower = lower ? a.width * a.channels : 0;
    float dot = 0.f;
    MSP_UNROLL_BY(4)
    for (int64_t c = lane_id() % kSampleGroup; c < a.channels; c += kSampleGroup) {
      const float value = interpolate(w, to_float(corner[c]), to_float(corner[c + to_right]),
                                      to_float(corner[c + to_lower]), to_float(corner[c + to_right + to_lower]));
      dot = muspace::fma(value, to_float(gradient[c]), dot);
    }
    return dot;
  }
};

/// keys[id] = pixel + 1 for the samples that count; the others are 0 already. counts of the chunk's cells. Grid: blocks
/// of kKeyCells cells of the chunk.
template <class T>
MSP_KERNEL(kKeyThreads, 1)
flash_keys(const FlashProblem<T> problem, uint32_t* keys, uint32_t* counts) {
  MSP_SHARED CameraShared cameras;
  MSP_SHARED TestColumn columns[kKeyThreads];
  const FlashArguments<T>& a = problem.a;
  const int first = static_cast<int>(blockIdx.x) * kKeyCells + warp_id() * kWarpCells,
            own = first + lane_id() / kCellLanes;
  const int cell = problem.first_cell + own, y = cell / a.x_cells;
  const int64_t image_pixel = problem.image * a.image_pixels();
  WarpTests<FlashArguments<T>> tests(a, cameras, columns + warp_id() * kLanes);
  int count = 0;
  for (int first_camera = 0; first_camera < a.cameras; first_camera += kCameraChunk) {
    MSP_SYNC_BLOCK();
    load_cameras(cameras, a, problem.image, first_camera);
    MSP_SYNC_BLOCK();
    tests.begin(first_camera, own < problem.cells ? cell - y * a.x_cells : -1, y);
    MSP_SYNC_WARP();
    const int rounds = converged_max(tests.tests());
    for (int test = 0; test < rounds; test += kLanes) {
      const KeptSample sample = tests.test(image_pixel, test);
      const uint32_t kept = ballot(sample.kept);
      count += popcount(kept & low_bits(tests.tests_before(lane_id() / kCellLanes + 1, test))) -
               popcount(kept & low_bits(tests.tests_before(lane_id() / kCellLanes, test)));
      if (!sample.kept) continue;
      const int64_t id = (first + sample.cell) * problem.tests() +
                         static_cast<int64_t>(first_camera + sample.camera) * a.z_cells + sample.height;
      keys[id] = static_cast<uint32_t>(tests.pixel(sample)) + 1u;
    }
    MSP_SYNC_WARP();
  }
  if (own < problem.cells && lane_id() % kCellLanes == 0) counts[own] = static_cast<uint32_t>(count);
}

}  // namespace muspace::bevpool
