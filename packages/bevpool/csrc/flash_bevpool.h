// SPDX-License-Identifier: Apache-2.0
// FlashBEV's fused sampling view transform: what bind.cc and the kernel translation units share.
#pragma once
#include <cstdint>

#include "muspace/call.h"

namespace muspace::bevpool {

enum class DepthDistribution : int { gaussian = 0, laplace = 1 };

struct BevGrid {
  double x_min, x_max, y_min, y_max, z_min, z_max;  // metres
  int64_t x_cells, y_cells, z_cells;
};

struct FlashInputs {
  int64_t batch, cameras, height, width, channels;
  BevGrid grid;
  double image_height, image_width;  // pixels that the projections map to
  DepthDistribution distribution;
  double epsilon, threshold;
  Storage feature_type, depth_type;  // f64 features go with f64 or f32 depth, others with f32, f16 or bf16
  const void* image_feats;           // [batch, cameras, height, width, channels]
  const void* depth_params;          // [batch, cameras, height, width, 2], (mean, scale)
  const void* projections;           // [batch, cameras, 3, 4] fp32 (fp64 for f64 features), ego frame to pixels
};

// `block_sorted` ends in fp32 atomics, `ordered` is bit-reproducible.
enum class FlashBackwardRoute : int { general = 0, block_sorted = 1, ordered = 2 };

struct FlashGradients {
  const void* output;  // [batch, y_cells, x_cells, channels], feature_type; read
  void* image_feats;   // fp32 (f64 for f64), zero-filled by the launcher
  void* depth_params;  // fp32 (f64 for f64), zero-filled by the launcher
};

// output [batch, y_cells, x_cells, channels] in feature_type, written completely.
Status launch_flash_bevpool(const FlashInputs& inputs, void* output, const Place& place);
int64_t flash_bevpool_workspace_bytes(const FlashInputs& inputs, FlashBackwardRoute route);
FlashBackwardRoute flash_bevpool_reached_route(const FlashInputs& inputs, FlashBackwardRoute wanted);
Status launch_flash_bevpool_backward(const FlashInputs& inputs, const FlashGradients& gradients, void* workspace,
                                     int64_t workspace_bytes, FlashBackwardRoute route, const Place& place);

}  // namespace muspace::bevpool
