# SPDX-License-Identifier: Apache-2.0
"""Public operators of this wheel: validate in the caller's words, choose the backend, run, report."""

from __future__ import annotations

import torch

from muspace_msda import _autograd
from muspace_msda._ops.deformable_aggregation import deformable_aggregation
from muspace_msda._ops.multi_scale_deformable_attn import multi_scale_deformable_attn


def why_not(backend: str, *tensors: torch.Tensor, operator: str = "multi_scale_deformable_attn") -> str | None:
    """Why ``backend`` cannot run ``operator`` with these tensors, or ``None`` if it can.

    >>> import torch
    >>> from muspace_msda import why_not
    >>> why_not("musa", torch.zeros(1))
    'backend musa needs tensors on musa, these are on cpu'
    """
    return _autograd.DISPATCHERS[operator].why_not(backend, *tensors)


__all__ = ["deformable_aggregation", "multi_scale_deformable_attn", "why_not"]
