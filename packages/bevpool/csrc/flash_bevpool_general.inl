// SPDX-License-Identifier: Apache-2.0
// Backward, route "general": a warp per cell, every sample adds to the gradients on its own. For any extent.
#pragma once

#include "flash_bevpool_tests.inl"

namespace muspace::bevpool {

constexpr int kGeneralThreads = 256;
constexpr int kGeneralWarps = kGeneralThreads / kLanes;

/// Tests (camera, height) pair `number` of a cell, without sharing anything with other lanes.
template <class Arguments>
MSP_DEVICE KeptSample test_alone(const Arguments& a, int64_t image, int64_t x, int64_t y, int64_t number) {
  KeptSample sample{};
  if (number >= static_cast<int64_t>(a.cameras) * a.z_cells) return sample;
  const int64_t camera = number / a.z_cells, z = number - camera * a.z_cells;
  const FlashGeometry<float>& g = a.geometry;
  const Column<float> column = project_column(a.projections + (image * a.cameras + camera) * 12,
                                              cell_centre(g.x_min, g.x_step, x), cell_centre(g.y_min, g.y_step, y));
  sample.camera = static_cast<int>(camera);
  sample.place = locate_voxel(g, column, cell_centre(g.z_min, g.z_step, z));
  if (!sample.place.inside) return sample;
  const int64_t pixel = ((image * a.cameras + camera) * a.height + sample.place.y0) * a.width + sample.place.x0;
  sample.weight = weigh_sample(a, sample.place, pixel);
  sample.kept = sample.weight.kept;
  return sample;
}

/// Adds one sample's gradients; the warp agrees on all arguments. The whole block calls it, with share 0 if there is
/// nothing to add.
template <class T>
MSP_DEVICE void add_sample(const FlashArguments<T>& a, int64_t pixel, int64_t right, int64_t lower, float fx, float fy,
                           float share, const DepthSlope<float>& slope, const T* gradient) {
  const CornerWeights<float> w = bilinear_weights(fx, fy);
  const int64_t corner[4] = {pixel, pixel + right, pixel + lower, pixel + lower + right};
  float dot = 0.f;
  if (share != 0.f) {
    for (int64_t c = lane_id(); c < a.channels; c += kLanes) {
      const float g = to_float(gradient[c]);
      float value[4];
      for (int k = 0; k < 4; ++k) {
        value[k] = to_float(a.image_feats[corner[k] * a.channels + c]);
        atomic_add(a.grad_feats + corner[k] * a.channels + c, share * w.at[k] * g);
      }
      dot = muspace::fma(interpolate(w, value[0], value[1], value[2], value[3]), g, dot);
    }
  }
  dot = group_sum<kLanes>(dot);
  if (share == 0.f || lane_id() >= 8) return;
  const int k = lane_id() >> 1;
  const float weight = k == 0 ? w.at[0] : k == 1 ? w.at[1] : k == 2 ? w.at[2] : w.at[3];
  const int64_t at = k == 0 ? corner[0] : k == 1 ? corner[1] : k == 2 ? corner[2] : corner[3];
  const float derivative = lane_id() & 1 ? slope.scale : slope.mean;
  atomic_add(a.grad_depth + 2 * at + (lane_id() & 1), dot * share * weight * derivative);
}

/// Grid: any number of blocks, a warp per cell.
template <class T>
MSP_KERNEL(kGeneralThreads, 1)
flash_backward_general(const FlashArguments<T> a, int64_t cells) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGeneralWarps;
  const int64_t tests = static_cast<int64_t>(a.cameras) * a.z_cells;
  for (int64_t first_cell = static_cast<int64_t>(blockIdx.x) * kGeneralWarps; first_cell < cells; first_cell += step) {
    const int64_t cell = first_cell + warp_id();
    const bool active = cell < cells;  // an idle warp takes part in the shuffles
    const int64_t row = cell / a.x_cells, x = cell - row * a.x_cells, image = row / a.y_cells,
                  y = row - image * a.y_cells;
    int count = 0;
    for (int64_t first = 0; first < tests; first += kLanes) {
      KeptSample sample{};
      if (active) sample = test_alone(a, image, x, y, first + lane_id());
      count += popcount(ballot(sample.kept));
    }
    const float scale = inverse_count<float>(count);
    for (int64_t first = 0; first < tests; first += kLanes) {
      KeptSample sample{};
      if (active) sample = test_alone(a, image, x, y, first + lane_id());
      const DepthSlope<float> slope = depth_slope(a.geometry, sample.weight);
      uint32_t kept = ballot(sample.kept);
      const int rounds = converged_max(popcount(kept));
      for (int i = 0; i < rounds; ++i, kept &= kept - 1u) {
        const int lane = kept != 0 ? lowest_bit(kept) : 0;
        const int x0 = shuffle(sample.place.x0, lane), y0 = shuffle(sample.place.y0, lane);
        const int camera = shuffle(sample.camera, lane);
        const float share = shuffle(sample.weight.weight, lane) * scale, fx = shuffle(sample.place.fx, lane);
        const float fy = shuffle(sample.place.fy, lane);
        const DepthSlope<float> slopes{shuffle(slope.mean, lane), shuffle(slope.scale, lane)};
        const int64_t pixel = ((image * a.cameras + camera) * a.height + y0) * a.width + x0;
        add_sample(a, pixel, x0 + 1 < a.width ? 1 : 0, y0 + 1 < a.height ? a.width : 0, fx, fy, kept != 0 ? share : 0.f,
                   slopes, a.grad_output + cell * a.channels);
      }
    }
  }
}

}  // namespace muspace::bevpool
