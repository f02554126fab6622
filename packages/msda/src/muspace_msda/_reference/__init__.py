# SPDX-License-Identifier: Apache-2.0
"""What the operators of this wheel mean, in plain differentiable PyTorch: the fallback, and the yardstick of the bench."""

from muspace_msda._reference.deformable_aggregation import deformable_aggregation
from muspace_msda._reference.multi_scale_deformable_attn import multi_scale_deformable_attn

__all__ = ["deformable_aggregation", "multi_scale_deformable_attn"]
