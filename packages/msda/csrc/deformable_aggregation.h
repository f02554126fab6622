// SPDX-License-Identifier: Apache-2.0
// What deformable_aggregation_bind.cc and the kernel translation units share: no FFI, no vendor header.
#pragma once
#include <cstdint>

#include "muspace/call.h"

namespace muspace::msda {

struct AggregationInputs {
  int64_t batch, rows, channels;                     // rows: F, pixels of all cameras and scales
  int64_t anchors, points, cameras, scales, groups;  // channels % groups == 0
  Storage feature_type, location_type, weight_type;
  const void* feature;               // [batch, rows, channels]
  const int64_t* spatial_shape;      // [cameras, scales, 2] rows (height, width); device memory on device backends
  const int64_t* scale_start_index;  // [cameras, scales]
  const void* sampling_location;     // [batch, anchors, points, cameras, 2], last axis (x, y) normalised
  const void* weights;               // [batch, anchors, points, cameras, scales, groups]
};

struct AggregationGradients {
  const void* output;       // [batch, anchors, channels], feature_type; read
  void* feature;            // fp32 (f64 for f64), zero-filled by the launcher
  void* sampling_location;  // location_type, written completely
  void* weights;            // weight_type, written completely
};

enum class AggregationForwardRoute : int { general = 0, fused = 1 };
enum class AggregationBackwardRoute : int { general = 0, block_sorted = 1, ordered = 2 };

// output [batch, anchors, channels] in feature_type, written completely. `forward_workspace` holds partial sums of
// anchors whose points are split over blocks.
int64_t aggregation_forward_workspace_bytes(const AggregationInputs& inputs, AggregationForwardRoute route);
Status launch_aggregation(const AggregationInputs& inputs, void* output, void* workspace,
                          AggregationForwardRoute route, const Place& place);
int64_t aggregation_backward_workspace_bytes(const AggregationInputs& inputs, AggregationBackwardRoute route);
Status launch_aggregation_backward(const AggregationInputs& inputs, const AggregationGradients& gradients,
                                   void* workspace, int64_t workspace_bytes, AggregationBackwardRoute route,
                                   const Place& place);
AggregationForwardRoute aggregation_reached_route(const AggregationInputs& inputs, AggregationForwardRoute wanted);
AggregationBackwardRoute aggregation_reached_route(const AggregationInputs& inputs, AggregationBackwardRoute wanted);

}  // namespace muspace::msda
