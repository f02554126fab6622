# SPDX-License-Identifier: Apache-2.0
"""Multi-scale deformable attention and deformable aggregation, native on CPU, CUDA, HIP and MUSA."""

from muspace_msda._spec import SPECS
from muspace_msda.modules import MultiScaleDeformableAttention
from muspace_msda.ops import deformable_aggregation, multi_scale_deformable_attn, why_not

__version__ = "0.1.0"

__all__ = [
    "SPECS",
    "MultiScaleDeformableAttention",
    "deformable_aggregation",
    "multi_scale_deformable_attn",
    "why_not",
]
