// SPDX-License-Identifier: Apache-2.0
// The samples of flash_bevpool that count, found on the cpu for blocks of neighbouring cells. For one translation unit.
#pragma once
#include <algorithm>

#include "flash_bevpool.h"
#include "flash_bevpool_math.h"
#include "muspace/cpu.h"

namespace muspace::bevpool {
namespace {

constexpr int kBlock = 16;          // neighbouring cells of a grid row that are tested together
constexpr int kHeights = 16;        // heights tested before the channels are read

template <class T>
struct Problem {
  FlashInputs inputs;
  FlashGeometry<T> geometry;
  const T* features;      // [batch, cameras, height, width, channels]
  const T* depth_params;  // [batch, cameras, height, width, 2]
};

// Cells [x, x + cells) of grid row y of one batch item.
struct Block {
  int64_t batch, y, x;
  int cells;
};

int64_t blocks_of_row(const FlashInputs& in) { return (in.grid.x_cells + kBlock - 1) / kBlock; }

Block block_at(const FlashInputs& in, int64_t batch, int64_t index) {
  const int64_t x = index % blocks_of_row(in) * kBlock;
  return Block{batch, index / blocks_of_row(in), x, static_cast<int>(std::min<int64_t>(kBlock, in.grid.x_cells - x))};
}

// The pillars of a block in one camera.
template <class T>
struct Columns {
  T u[kBlock], v[kBlock], depth[kBlock];
  T u_slope, v_slope, depth_slope;

  MSP_CPU_INLINE Column<T> at(int cell) const {
    return Column<T>{u[cell], v[cell], depth[cell], u_slope, v_slope, depth_slope};
  }
};

template <class T>
MSP_CPU_INLINE Columns<T> project_block(const Problem<T>& problem, const Block& block, int64_t camera) {
  const FlashGeometry<T>& g = problem.geometry;
  const T* const matrix =
      static_cast<const T*>(problem.inputs.projections) + (block.batch * problem.inputs.cameras + camera) * 12;
  const T y = cell_centre(g.y_min, g.y_step, block.y);
  Columns<T> columns;
  for (int cell = 0; cell < kBlock; ++cell) {  // also past the grid's edge, where nothing is read
    const Column<T> column = project_column(matrix, cell_centre(g.x_min, g.x_step, block.x + cell), y);
    columns.u[cell] = column.u, columns.v[cell] = column.v, columns.depth[cell] = column.depth;
  }
  columns.u_slope = matrix[2], columns.v_slope = matrix[6], columns.depth_slope = matrix[10];
  return columns;
}

// False if no cell lies before the camera at any height in [z_low, z_high]: roundings keep the order of depths.
template <class T>
MSP_CPU_INLINE bool may_be_seen(const Columns<T>& columns, T z_low, T z_high) {
  int seen = 0;
  for (int cell = 0; cell < kBlock; ++cell) {
    seen |= muspace::fma(columns.depth_slope, z_low, columns.depth[cell]) > T(0);
    seen |= muspace::fma(columns.depth_slope, z_high, columns.depth[cell]) > T(0);
  }
  return seen != 0;
}

// The samples of all cells at one height.
template <class T>
struct Slice {
  T u[kBlock], v[kBlock], depth[kBlock];  // on the map
  int32_t hits[kBlock];                   // not 0: maybe inside, by map_sample()
};

// Returns whether there are hits.
template <class T>
MSP_CPU_INLINE bool project_slice(const FlashGeometry<T>& geometry, const Columns<T>& columns, T z, Slice<T>& slice) {
  const T epsilon = geometry.epsilon, u_scale = geometry.u_scale, v_scale = geometry.v_scale, width = geometry.width,
          height = geometry.height;
  int32_t any = 0;
  for (int cell = 0; cell < kBlock; ++cell) {
    const ImagePoint<T> point = project(columns.at(cell), z, epsilon);
    const T u = point.u * u_scale, v = point.v * v_scale;
    const int32_t hit = (point.depth > T(0)) & (u >= T(0)) & (u < width) & (v >= T(0)) & (v < height);
    slice.u[cell] = u, slice.v[cell] = v, slice.depth[cell] = point.depth;
    slice.hits[cell] = hit;
    any |= hit;
  }
  return any != 0;
}

// Samples of one camera, field by field. The first `used` indices of `kept` are those of the samples that count.
template <class T>
struct Samples {
  static constexpr int kCapacity = kBlock * kHeights;
  int count = 0, used = 0;
  int32_t cells[kCapacity];  // of the block
  int32_t x0[kCapacity], y0[kCapacity];
  T fx[kCapacity], fy[kCapacity];
  T depths[kCapacity], means[kCapacity], scales[kCapacity];
  T weights[kCapacity], z[kCapacity], inverse_scales[kCapacity];
  int32_t counts[kCapacity], kept[kCapacity];

  MSP_CPU_INLINE MapSample<T> place_of(int s) const {
    return MapSample<T>{fx[s], fy[s], depths[s], x0[s], y0[s], true};
  }
  MSP_CPU_INLINE DepthWeight<T> depth_weight_of(int s) const {
    return DepthWeight<T>{weights[s], z[s], inverse_scales[s], true};
  }
};

// Adds the samples of a slice that lie inside the camera's map; `params` are its depth parameters.
template <class T>
MSP_CPU_INLINE void add_slice(const Problem<T>& problem, const Slice<T>& slice, int cells, const T* params,
                              Samples<T>& samples) {
  const int64_t width = problem.inputs.width, height = problem.inputs.height;
  for (int cell = 0; cell < cells; ++cell) {
    if (slice.hits[cell] == 0) continue;
    const MapSample<T> place = map_sample(problem.geometry, slice.u[cell], slice.v[cell], slice.depth[cell]);
    if (!place.inside) continue;
    const CornerWeights<T> weights = bilinear_weights(place.fx, place.fy);
    const T* const upper = params + 2 * (place.y0 * width + place.x0);
    const T* const lower = upper + 2 * lower_step(place, height, width);
    const int right = 2 * right_step(place, width), s = samples.count++;
    samples.cells[s] = cell;
    samples.x0[s] = place.x0, samples.y0[s] = place.y0;
    samples.fx[s] = place.fx, samples.fy[s] = place.fy;
    samples.depths[s] = place.depth;
    samples.means[s] = interpolate(weights, upper[0], upper[right], lower[0], lower[right]);
    samples.scales[s] = interpolate(weights, upper[1], upper[right + 1], lower[1], lower[right + 1]);
  }
}

template <DepthDistribution kDistribution, class T>
MSP_CPU_INLINE void weigh_samples(const FlashGeometry<T>& given, Samples<T>& samples) {
  FlashGeometry<T> geometry = given;
  geometry.distribution = kDistribution;  // known to the compiler: the loop has no branch
  for (int s = 0; s < samples.count; ++s) {
    const DepthWeight<T> weight = depth_weight(geometry, samples.depths[s], samples.means[s], samples.scales[s]);
    samples.weights[s] = weight.weight;
    samples.z[s] = weight.z;
    samples.inverse_scales[s] = weight.inverse_scale;
    samples.counts[s] = weight.kept;
  }
}

// A function of its own: inlined into the loops around it, the loop above is no longer vector code.
#define MSP_FLASH_CPU_INSTANCE(T)                                                        \
  MSP_CPU_CLONES void weigh(const FlashGeometry<T>& geometry, Samples<T>& samples) {     \
    if (geometry.distribution == DepthDistribution::gaussian) {                          \
      weigh_samples<DepthDistribution::gaussian>(geometry, samples);                     \
    } else {                                                                             \
      weigh_samples<DepthDistribution::laplace>(geometry, samples);                      \
    }                                                                                    \
  }
MSP_FLASH_CPU_INSTANCE(float)
MSP_FLASH_CPU_INSTANCE(double)
#undef MSP_FLASH_CPU_INSTANCE

template <class T>
MSP_CPU_INLINE void keep_samples(const FlashGeometry<T>& geometry, Samples<T>& samples) {
  weigh(geometry, samples);
  samples.used = 0;
  for (int s = 0; s < samples.count; ++s) {
    samples.kept[samples.used] = s;
    samples.used += samples.counts[s];
  }
}

// Calls visit(camera, samples) with the samples of the block that count, by camera, height and cell.
template <class T, class Visit>
MSP_CPU_INLINE void visit_samples(const Problem<T>& problem, const Block& block, const Visit& visit) {
  const FlashInputs& in = problem.inputs;
  const FlashGeometry<T>& g = problem.geometry;
  Samples<T> samples;
  Slice<T> slice;
  const T z_low = cell_centre(g.z_min, g.z_step, 0), z_high = cell_centre(g.z_min, g.z_step, in.grid.z_cells - 1);
  for (int64_t camera = 0; camera < in.cameras; ++camera) {
    const Columns<T> columns = project_block(problem, block, camera);
    if (!may_be_seen(columns, z_low, z_high)) continue;
    const T* const params = problem.depth_params + (block.batch * in.cameras + camera) * in.height * in.width * 2;
    for (int64_t first = 0; first < in.grid.z_cells; first += kHeights) {
      samples.count = 0;
      for (int64_t k = first; k < std::min(in.grid.z_cells, first + kHeights); ++k) {
        if (!project_slice(g, columns, cell_centre(g.z_min, g.z_step, k), slice)) continue;
        add_slice(problem, slice, block.cells, params, samples);
      }
      keep_samples(g, samples);
      if (samples.used > 0) visit(camera, samples);
    }
  }
}

}  // namespace
}  // namespace muspace::bevpool
