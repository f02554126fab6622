// SPDX-License-Identifier: Apache-2.0
// What bind.cc and the kernel translation units of multi_scale_deformable_attn share: no FFI, no vendor header.
#pragma once
#include <cstdint>

#include "muspace/call.h"

namespace muspace::msda {

enum class ForwardRoute : int { general = 0, fused = 1 };
enum class BackwardRoute : int { general = 0, block_sorted = 1, ordered = 2 };

struct Extent {
  int64_t batch;     // B
  int64_t rows;      // S, flattened pixels of all levels
  int64_t heads;     // H
  int64_t channels;  // D, per head
  int64_t queries;   // Q
  int64_t levels;    // L
  int64_t points;    // P
};

// Inputs, all contiguous. When value_type is f64, location_type and weight_type are f64 or f32; otherwise f32, f16 or
// bf16.
struct Inputs {
  Extent extent;
  Storage value_type, location_type, weight_type;
  const void* value;                 // [B, S, H, D]
  const int64_t* spatial_shapes;     // [L, 2] rows (height, width); device memory on device backends
  const int64_t* level_start_index;  // [L], or null: the exclusive cumulative sum of height * width
  const void* sampling_locations;    // [B, Q, H, L, P, 2], last axis (x, y)
  const void* attention_weights;     // [B, Q, H, L, P]
};

struct Gradients {
  const void* output;  // [B, Q, H * D], value_type; read
  void* value;         // [B, S, H, D] f32 (f64 when value_type is f64); zero-filled by the launcher, then accumulated
  void* sampling_locations;  // location_type; written completely
  void* attention_weights;   // weight_type; written completely
};

// bind.cc has checked shapes, dtypes, contiguity and devices, and answers every case in which an extent is zero with
// launch_fill_zero. Launchers make `place.device` current themselves and cope with levels that do not fit.
Status launch_forward(const Inputs& inputs, void* output, ForwardRoute route, const Place& place);
Status launch_backward(const Inputs& inputs, const Gradients& gradients, void* workspace, int64_t workspace_bytes,
                       BackwardRoute route, const Place& place);
int64_t workspace_bytes(const Extent& extent, BackwardRoute route);

// The route that a launch takes when `wanted` is asked for: kernels made for some extents leave the others to
// `general`.
ForwardRoute reached_route(const Extent& extent, Storage value_type, ForwardRoute wanted);
BackwardRoute reached_route(const Extent& extent, Storage value_type, BackwardRoute wanted);

// Whether the levels lie inside the `rows` of value and fill them exactly; for a table in host memory.
bool levels_fill(const int64_t* spatial_shapes, const int64_t* level_start_index, int64_t levels, int64_t rows);

}  // namespace muspace::msda
