// SPDX-License-Identifier: Apache-2.0
// Kernels and launchers of flash_bevpool for cuda, hip, musa and emu. The build may compile the parts "forward" and
// "backward" as separate translation units.
#if !defined(MSP_PARTS) || defined(MSP_PART_FORWARD)
#include "flash_bevpool_forward_launch.inl"
#endif

#if !defined(MSP_PARTS) || defined(MSP_PART_BACKWARD)
#include "flash_bevpool_backward_launch.inl"
#endif
