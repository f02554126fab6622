// SPDX-License-Identifier: Apache-2.0
// What deformable_aggregation adds to the formulas of multi_scale_deformable_attn, for host and device. The bilinear
// sample of one scale of one camera is the same; the window is not: a point counts in a camera iff it lies strictly
// inside that camera's image, whatever the scale.
#pragma once
#include "multi_scale_deformable_attn_math.h"

namespace muspace::msda {

// NaN fails every comparison.
template <class T>
MSP_HD bool in_image(T x, T y) {
  return x > T(0) && x < T(1) && y > T(0) && y < T(1);
}

}  // namespace muspace::msda
