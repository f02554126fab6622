# SPDX-License-Identifier: Apache-2.0
"""The operators under their upstream names: argument translation only, one module per origin."""

from muspace_msda.compat.mmcv import (
    MSDeformAttnFunction,
    MultiScaleDeformableAttnFunction,
    multi_scale_deformable_attn_pytorch,
)
from muspace_msda.compat.sparse4d import (
    DeformableAggregationFunction,
    deformable_aggregation_ext,
    deformable_aggregation_function,
    feature_maps_format,
)
from muspace_msda.modules import MultiScaleDeformableAttention

__all__ = [
    "DeformableAggregationFunction",
    "MSDeformAttnFunction",
    "MultiScaleDeformableAttention",
    "MultiScaleDeformableAttnFunction",
    "deformable_aggregation_ext",
    "deformable_aggregation_function",
    "feature_maps_format",
    "multi_scale_deformable_attn_pytorch",
]
