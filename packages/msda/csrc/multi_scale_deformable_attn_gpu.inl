// SPDX-License-Identifier: Apache-2.0
// Kernels and launchers of multi_scale_deformable_attn for cuda, hip, musa and emu. The build may compile the parts
// "forward" and "backward" as separate translation units.
#if !defined(MSP_PARTS) || defined(MSP_PART_FORWARD)
#include "multi_scale_deformable_attn_forward_launch.inl"

namespace muspace::msda {

bool levels_fill(const int64_t* spatial_shapes, const int64_t* level_start_index, int64_t levels, int64_t rows) {
  return host_levels_fill(spatial_shapes, level_start_index, levels, rows);
}

}  // namespace muspace::msda
#endif

#if !defined(MSP_PARTS) || defined(MSP_PART_BACKWARD)
#include "multi_scale_deformable_attn_backward_launch.inl"
#endif
