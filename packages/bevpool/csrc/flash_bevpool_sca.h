// SPDX-License-Identifier: Apache-2.0
// Fused spatial cross-attention: what bind.cc and the kernel translation units share.
#pragma once
#include <cstdint>

#include "muspace/call.h"

namespace muspace::bevpool {

constexpr int64_t kMaxScaLevels = 8;

struct ScaInputs {
  int64_t batch, cameras, rows, heads, channels;  // rows: pixels of all levels of a camera; channels: of all heads
  int64_t levels, points, anchors;                // points = PA per query, head and level; point k uses anchor k % anchors
  int64_t level_height[kMaxScaLevels], level_width[kMaxScaLevels], level_start[kMaxScaLevels];
  double x_min, x_max, y_min, y_max;  // metres
  int64_t x_cells, y_cells;           // query q = y * x_cells + x
  double image_height, image_width, epsilon;
  bool average_hit_cameras;  // divide by max(1, cameras that see the pillar); else by nothing
  Storage feature_type, offset_type, weight_type;
  const void* image_feats;         // [batch, cameras, rows, channels], channel = head * (channels / heads) + d
  const void* projections;         // [batch, cameras, 3, 4] fp32 (fp64 for f64 features)
  const void* z_anchors;           // [anchors] metres, fp32 (fp64 for f64 features)
  const void* sampling_offsets;    // [batch, queries, heads, levels, points, 2] in pixels of the level, or null: zeros
  const void* attention_weights;   // [batch, queries, heads, levels, points], or null: 1 / (levels * points)
};

enum class ScaBackwardRoute : int { general = 0, block_sorted = 1, ordered = 2 };

struct ScaGradients {
  const void* output;       // [batch, queries, channels], feature_type; read
  void* image_feats;        // fp32 (f64 for f64), zero-filled by the launcher
  void* sampling_offsets;   // offset_type, written completely; null if the offsets are
  void* attention_weights;  // weight_type, written completely; null if the weights are
};

// output [batch, y_cells * x_cells, channels] in feature_type, written completely.
Status launch_flash_bevpool_sca(const ScaInputs& inputs, void* output, const Place& place);
int64_t flash_bevpool_sca_workspace_bytes(const ScaInputs& inputs, ScaBackwardRoute route);
ScaBackwardRoute flash_bevpool_sca_reached_route(const ScaInputs& inputs, ScaBackwardRoute wanted);
Status launch_flash_bevpool_sca_backward(const ScaInputs& inputs, const ScaGradients& gradients, void* workspace,
                                         int64_t workspace_bytes, ScaBackwardRoute route, const Place& place);

}  // namespace muspace::bevpool
