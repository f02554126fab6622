// SPDX-License-Identifier: Apache-2.0
// Which samples of a cell count: a warp tests the (camera, height) pairs of four cells. Cameras that cannot see any
// height of a cell go first; what is left is tested 32 at a time, in the order cell, camera, height.
#pragma once

#include "flash_bevpool_tables.inl"

namespace muspace::bevpool {

constexpr int kCameraChunk = 8;                    // cameras that are looked at together
constexpr int kWarpCells = kLanes / kCameraChunk;  // cells of a warp
constexpr int kCellLanes = kLanes / kWarpCells;

template <class T>
struct FlashArguments {
  const T* image_feats;
  AnyArray depth;  // pairs (mean, scale)
  const float* projections;
  T* output;             // forward
  const T* grad_output;  // backward
  float *grad_feats, *grad_depth;
  FlashGeometry<float> geometry;
  float right_edge, lower_edge;  // width and height of the image
  float x_most, y_most, z_most;  // largest absolute coordinate of a cell's centre, about
  int64_t channels;
  int cameras, height, width, x_cells, y_cells, z_cells;
  int x_tiles, y_tiles;
  Divisor heights;   // z_cells
  Divisor map_rows;  // height, for rows counted through the cameras

  uint32_t row_bytes;  // of the features

  MSP_HD int64_t image_pixels() const { return static_cast<int64_t>(cameras) * height * width; }
};

/// How far from 0 the camera's products have to be before their sign is sure.
struct CameraMargin {
  float u, v, depth;
};

struct CameraShared {
  float matrix[kCameraChunk][12];
  CameraMargin margin[kCameraChunk];
};

/// Cameras first .. first + kCameraChunk of the image; barriers before and after are the caller's.
template <class Arguments>
MSP_DEVICE void load_cameras(CameraShared& shared, const Arguments& a, int image, int first) {
  const int t = static_cast<int>(threadIdx.x),
            count = a.cameras - first < kCameraChunk ? a.cameras - first : kCameraChunk;
  const float* matrices = a.projections + (static_cast<int64_t>(image) * a.cameras + first) * 12;
  for (int i = t; i < count * 12; i += static_cast<int>(blockDim.x)) shared.matrix[i / 12][i % 12] = matrices[i];
  if (t >= count) return;
  const float* m = matrices + 12 * t;
  const auto most = [&](int row) {
    return magnitude(m[4 * row]) * a.x_most + magnitude(m[4 * row + 1]) * a.y_most +
           magnitude(m[4 * row + 2]) * a.z_most + magnitude(m[4 * row + 3]);
  };
  constexpr float kRounding = 1e-5f;  // of sums of four products, with plenty to spare
  const float u = most(0), v = most(1), depth = most(2);
  shared.margin[t].u = kRounding * (u + a.right_edge * depth) + a.right_edge * a.geometry.epsilon;
  shared.margin[t].v = kRounding * (v + a.lower_edge * depth) + a.lower_edge * a.geometry.epsilon;
  shared.margin[t].depth = kRounding * depth;
}

/// False only if no height of the column can be inside: all products are linear in z, so what fails one bound clearly
/// at the lowest and at the highest voxel fails it between them.
template <class Arguments>
MSP_DEVICE bool may_see(const Arguments& a, const Column<float>& column, const CameraMargin& margin) {
  const auto& g = a.geometry;
  const float low = cell_centre(g.z_min, g.z_step, 0), high = cell_centre(g.z_min, g.z_step, a.z_cells - 1);
  const auto at = [&](float value, float slope, float z) { return muspace::fma(slope, z, value); };
  const float u0 = at(column.u, column.u_slope, low), u1 = at(column.u, column.u_slope, high);
  const float v0 = at(column.v, column.v_slope, low), v1 = at(column.v, column.v_slope, high);
  const float d0 = at(column.depth, column.depth_slope, low), d1 = at(column.depth, column.depth_slope, high);
  const bool behind = d0 < -margin.depth && d1 < -margin.depth;
  const bool left = u0 < -margin.u && u1 < -margin.u, above = v0 < -margin.v && v1 < -margin.v;
  const bool right = u0 - a.right_edge * d0 > margin.u && u1 - a.right_edge * d1 > margin.u;
  const bool below = v0 - a.lower_edge * d0 > margin.v && v1 - a.lower_edge * d1 > margin.v;
  return !(behind || left || above || right || below);
}

/// The depth weight of a sample whose upper left pixel, counted through all images, is `pixel`.
template <class Arguments>
MSP_DEVICE DepthWeight<float> weigh_sample(const Arguments& a, const MapSample<float>& sample, int64_t pixel) {
  const int64_t right = right_step(sample, a.width), lower = lower_step(sample, a.height, a.width);
  const int64_t pixels[4] = {pixel, pixel + right, pixel + lower, pixel + lower + right};
  float corner[4][2];
  a.depth.load_pairs(pixels, corner);
  const CornerWeights<float> w = bilinear_weights(sample.fx, sample.fy);
  return depth_weight(a.geometry, sample.depth, interpolate(w, corner[0][0], corner[1][0], corner[2][0], corner[3][0]),
                      interpolate(w, corner[0][1], corner[1][1], corner[2][1], corner[3][1]));
}

/// A column that is tested: of which lane's (cell, camera) pair, and its products.
struct alignas(16) TestColumn {
  float u, v, depth;
  int lane;
};

/// A sample that counts.
struct KeptSample {
  MapSample<float> place;
  DepthWeight<float> weight;
  int camera, cell;  // of the chunk, of the warp
  int height;
  bool kept;
};

/// The tests of one warp. `columns` is the warp's own shared memory, kLanes entries.
template <class Arguments>
class WarpTests {
 public:
  MSP_DEVICE WarpTests(const Arguments& a, const CameraShared& cameras, TestColumn* columns)
      : a_(a), cameras_(cameras), columns_(columns) {}

  /// Finds the columns to test. Lane cell * kCameraChunk + camera looks at cell (x, y) of the warp; x < 0: there is no
  /// such cell. A warp barrier has to follow.
  MSP_DEVICE void begin(int first_camera, int x, int y) {
    const int camera = lane_id() % kCameraChunk;
    const auto& g = a_.geometry;
    first_camera_ = first_camera;
    bool sees = x >= 0 && first_camera + camera < a_.cameras;
    Column<float> column{};
    if (sees) {
      column =
          project_column(cameras_.matrix[camera], cell_centre(g.x_min, g.x_step, x), cell_centre(g.y_min, g.y_step, y));
      sees = may_see(a_, column, cameras_.margin[camera]);
    }
    pairs_ = ballot(sees);
    if (sees) {
      columns_[popcount(pairs_ & low_bits(lane_id()))] = {column.u, column.v, column.depth, lane_id()};
    }
  }
  MSP_DEVICE int tests() const { return popcount(pairs_) * a_.z_cells; }
  /// Tests of this round, from test `first`, that belong to cells before `cell`.
  MSP_DEVICE int tests_before(int cell, int first) const {
    return clamp_lanes(popcount(pairs_ & low_bits(cell * kCameraChunk)) * a_.z_cells - first);
  }
  /// Test first + lane.
  MSP_DEVICE KeptSample test(int64_t image_pixel, int first) const {
    const int number = first + lane_id();
    KeptSample sample{};
    if (number >= tests()) return sample;
    const int pair = a_.heights.quotient(number);
    const TestColumn column = columns_[pair];
    const auto& g = a_.geometry;
    sample.camera = column.lane % kCameraChunk, sample.cell = column.lane / kCameraChunk;
    const float* matrix = cameras_.matrix[sample.camera];
    const Column<float> products{column.u, column.v, column.depth, matrix[2], matrix[6], matrix[10]};
    sample.height = number - pair * a_.z_cells;
    sample.place = locate_voxel(g, products, cell_centre(g.z_min, g.z_step, sample.height));
    if (sample.place.inside) {
      sample.weight = weigh_sample(a_, sample.place, image_pixel + pixel(sample));
      sample.kept = sample.weight.kept;
    }
    return sample;
  }
  /// The sample's upper row and upper left pixel, counted through the cameras.
  MSP_DEVICE int row(const KeptSample& sample) const {
    return (first_camera_ + sample.camera) * a_.height + sample.place.y0;
  }
  MSP_DEVICE int pixel(const KeptSample& sample) const { return row(sample) * a_.width + sample.place.x0; }

 private:
  const Arguments& a_;
  const CameraShared& cameras_;
  TestColumn* columns_;
  uint32_t pairs_ = 0;
  int first_camera_ = 0;
};

/// Tile of cells of a block, from a one-dimensional grid of tiles of all images.
struct CellTile {
  int image, x, y;  // first cell
  template <class Arguments>
  MSP_DEVICE static CellTile of(const Arguments& a, int tile_width, int tile_height) {
    const unsigned tile = blockIdx.x, row = tile / static_cast<unsigned>(a.x_tiles);
    const unsigned image = row / static_cast<unsigned>(a.y_tiles);
    return {static_cast<int>(image), static_cast<int>(tile - row * static_cast<unsigned>(a.x_tiles)) * tile_width,
            static_cast<int>(row - image * static_cast<unsigned>(a.y_tiles)) * tile_height};
  }
};

/// Whether the 32-bit numbers of tests, pixels and tiles reach everything.
inline bool flash_reaches(const FlashInputs& in) {
  const BevGrid& g = in.grid;
  const auto fits = [](int64_t a, int64_t b, int64_t limit) { return a <= limit / b; };
  return fits(in.height, in.width, kInt32Max / 8) && fits(in.cameras, in.height * in.width, kInt32Max / 8) &&
         g.z_cells <= kInt32Max / 64 && in.cameras <= kInt32Max / 64 && fits(g.x_cells, g.y_cells, kInt32Max / 8) &&
         fits(in.batch, g.x_cells * g.y_cells, kInt32Max) && in.channels <= int64_t{1} << 20;
}

template <class T>
FlashArguments<T> flash_arguments(const FlashInputs& in, int tile_width, int tile_height) {
  const BevGrid& g = in.grid;
  const auto most = [](double low, double high) {
    const double size = low < 0 ? -low : low, other = high < 0 ? -high : high;
    return static_cast<float>(size > other ? size : other);
  };
  FlashArguments<T> a{};
  a.image_feats = static_cast<const T*>(in.image_feats);
  a.depth = AnyArray::of(in.depth_params, in.depth_type);
  a.projections = static_cast<const float*>(in.projections);
  a.geometry = flash_geometry<float>(in);
  a.right_edge = static_cast<float>(in.image_width), a.lower_edge = static_cast<float>(in.image_height);
  a.x_most = most(g.x_min, g.x_max), a.y_most = most(g.y_min, g.y_max), a.z_most = most(g.z_min, g.z_max);
  a.channels = in.channels, a.row_bytes = static_cast<uint32_t>(in.channels * static_cast<int64_t>(sizeof(T)));
  a.cameras = static_cast<int>(in.cameras), a.height = static_cast<int>(in.height),
  a.width = static_cast<int>(in.width);
  a.x_cells = static_cast<int>(g.x_cells), a.y_cells = static_cast<int>(g.y_cells),
  a.z_cells = static_cast<int>(g.z_cells);
  a.x_tiles = (a.x_cells + tile_width - 1) / tile_width, a.y_tiles = (a.y_cells + tile_height - 1) / tile_height;
  a.heights = Divisor::of(in.grid.z_cells, (kLanes + 1) * in.grid.z_cells);
  a.map_rows = Divisor::of(in.height, in.cameras * in.height);
  return a;
}

}  // namespace muspace::bevpool
