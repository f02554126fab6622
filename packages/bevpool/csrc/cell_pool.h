// SPDX-License-Identifier: Apache-2.0
// Sums of rows per cell, the common part of bev_pool, bev_pool_v2, voxel_pooling and voxel_pool_depth: what bind.cc and
// the kernel translation units share. No FFI, no vendor header.
//
// A *point* is one frustum sample. It falls into one cell or none, reads one row of features and, in the weighted
// operators, one weight (its depth probability):
//
//   output[cell, :] = sum over the points of the cell, by ascending point, of weight[point] * rows[row of point, :]
//
// Keys are the cells of the points (-1: none). A plan is the inverse of the keys: the points of every cell, in order.
// Both depend on the geometry alone, so a fixed calibration computes them once.
#pragma once
#include <cstdint>

#include "muspace/call.h"

namespace muspace::bevpool {

constexpr int kMaxColumns = 4;

// key = sum of coords[i][column] * strides[column] + (i / run % count) * run_stride, or -1 unless every coords[i][column]
// lies in [0, bounds[column]), the mask (if any) holds, and the key lies in [0, cells).
struct KeyRule {
  int columns;                   // of coords
  int64_t bounds[kMaxColumns];   // a column that only filters has stride 0
  int64_t strides[kMaxColumns];
  int64_t run, count, run_stride;  // which image or batch item a point belongs to follows from its place
  int64_t cells;
};

struct Coordinates {
  const void* data;     // [points, columns]
  bool wide;            // int64, else int32
  const uint8_t* mask;  // [points], or null
  int64_t points;
};

Status launch_cell_keys(const Coordinates& coords, const KeyRule& rule, int32_t* keys, const Place& place);

// Points and intervals as bev_pool_v2's callers prepare them. Point k of interval i (start_i <= k < start_i + length_i)
// has the key ranks_bev[start_i].
struct Intervals {
  const int32_t *ranks_depth, *ranks_feat, *ranks_bev;  // [points]
  const int32_t *starts, *lengths;                      // [intervals]
  int64_t points, intervals;
  int64_t weights, rows, cells;  // what the three ranks index
};

enum Fault : int {  // bits of the fault word
  kBevRank = 1,     // a covered ranks_bev outside [0, cells), or one that differs from its interval's first
  kFeatRank = 2,    // a covered ranks_feat outside [0, rows)
  kDepthRank = 4,   // a covered ranks_depth outside [0, weights)
  kInterval = 8,    // an interval of negative start or length, or that ends beyond the points (it counts for nothing)
  kOverlap = 16,    // a point in two intervals (it counts once, for the interval that comes first in the arrays)
};

// Writes keys and row_keys (ranks_feat of the points that have a key, else -1) completely; a faulty point has the key
// -1, and its fault is or-ed into *faults, which the call zeroes first.
Status launch_interval_keys(const Intervals& intervals, int32_t* keys, int32_t* row_keys, int32_t* faults,
                            const Place& place);

// How a point finds its row and weight.
struct PointMap {
  const int32_t* rows;     // [points], or null: by place
  const int32_t* weights;  // [points], or null: the point itself
  // Frustum order, if rows is null and depth_bins > 0: point = (image * depth_bins + bin) * pixels + pixel reads the
  // row image * pixels + pixel. With depth_bins == 0 the row is the point itself and there are no weights.
  int64_t depth_bins, pixels;
  bool weighted() const { return rows != nullptr || depth_bins > 0; }
};

// The plan of `keys`; entries of a cell ascend by point. `plan` holds plan_words() words and is opaque.
int64_t plan_words(int64_t points, int64_t cells, bool weighted);
int64_t plan_workspace_bytes(int64_t points, int64_t cells, bool weighted);
Status launch_plan(const int32_t* keys, int64_t points, int64_t cells, const PointMap& map, int32_t* plan,
                   void* workspace, const Place& place);

// Features, one row of `channels` per pixel or point: [rows, channels], or [rows / pixels, channels, pixels] if
// pixels > 0 (channels first).
struct Rows {
  const void* data;
  Storage type;
  int64_t rows, channels, pixels;
};

// One value per weight index; data null: every weight is 1.
struct Weights {
  const void* data;
  Storage type;
  int64_t count;
};

// [cells, channels], or [cells / pixels, channels, pixels] if pixels > 0 (channels first). Any storage type: the sums
// are fp32 (fp64 for f64 rows) and narrowed once.
struct Cells {
  void* data;
  Storage type;
  int64_t cells, channels, pixels;
};

// Shape of the launch on device backends; the sums are the same. `automatic` takes the fastest that fits; `packed` moves
// 16 bytes a lane and needs rows and output aligned and divisible so (ValueError otherwise).
enum class PoolLaunch : int { automatic = 0, linear = 1, two_dimensional = 2, packed = 3 };

int64_t pool_workspace_bytes(const Rows& rows, const Weights& weights, const Cells& output, int64_t points);
// Writes `output` completely. Row and weight indices outside their arrays count for nothing (a plan is opaque, but it is
// device memory all the same).
Status launch_pool(const Rows& rows, const Weights& weights, const int32_t* plan, int64_t points, const Cells& output,
                   PoolLaunch launch, void* workspace, const Place& place);

// Gradient of the unweighted sum: grad_rows[point, :] = grad_output[key of point, :], zero for points without a cell.
// grad_rows [points, channels] has the type of the forward's rows, grad_output any layout and type of Cells.
int64_t gather_workspace_bytes(const Cells& grad_output, int64_t points);
Status launch_gather(const Cells& grad_output, const int32_t* keys, int64_t points, void* grad_rows, Storage type,
                     void* workspace, const Place& place);

// How the gradient of the weights is written. `unique`: no weight index occurs twice, plain stores. `atomic`: repeated
// ones meet in fp32 atomics. `per_point`: grad_weights[point], for the caller to add up in order.
enum class WeightRoute : int { unique = 0, atomic = 1, per_point = 2 };

struct PoolGradients {
  Cells output;         // gradient of the output; read
  void* rows;           // type and layout of the forward's rows; written completely
  void* weights;        // fp32 (fp64 for f64 rows) [weights.count], per_point [points]; written completely
};

// grad_rows[r, :] = sum over the points of row r, ascending, of weight * grad_output[key, :];
// grad_weight of a point = <grad_output[key, :], rows[r, :]>.
// Which points a row has: with map.rows null those of its depth bins (frustum order) by `keys`; otherwise those of
// `row_plan`, the plan of the row_keys with the PointMap {keys, map.weights}. `depth_warp` false forms the products with
// the rows one thread a point instead of one warp (device backends).
int64_t pool_backward_workspace_bytes(const Rows& rows, const Weights& weights, const Cells& grad_output,
                                      int64_t points);
Status launch_pool_backward(const Rows& rows, const Weights& weights, const int32_t* keys, const int32_t* row_plan,
                            int64_t points, int64_t depth_bins, int64_t pixels, WeightRoute route, bool depth_warp,
                            const PoolGradients& gradients, void* workspace, const Place& place);

}  // namespace muspace::bevpool
