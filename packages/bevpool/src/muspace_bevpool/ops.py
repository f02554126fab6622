# SPDX-License-Identifier: Apache-2.0
"""Public operators of this wheel: validate in the caller's words, choose the backend, run, report."""

from __future__ import annotations

import torch

from muspace_bevpool import _autograd
from muspace_bevpool._ops.bev_pool import bev_pool, bev_pool_plan
from muspace_bevpool._ops.bev_pool_v2 import bev_pool_v2, bev_pool_v2_plan, bev_pool_v2_ranks
from muspace_bevpool._ops.flash_bevpool import flash_bevpool
from muspace_bevpool._ops.flash_bevpool_sca import flash_bevpool_sca
from muspace_bevpool._ops.voxel_pool_depth import voxel_pool_depth, voxel_pool_depth_plan
from muspace_bevpool._ops.voxel_pooling import (
    voxel_pooling_inference,
    voxel_pooling_inference_plan,
    voxel_pooling_train,
    voxel_pooling_train_plan,
)


def why_not(backend: str, *tensors: torch.Tensor, operator: str = "bev_pool") -> str | None:
    """Why ``backend`` cannot run ``operator`` with these tensors, or ``None`` if it can.

    >>> import torch
    >>> from muspace_bevpool import why_not
    >>> why_not("musa", torch.zeros(1))
    'backend musa needs tensors on musa, these are on cpu'
    """
    return _autograd.DISPATCHERS[operator].why_not(backend, *tensors)


__all__ = [
    "bev_pool",
    "bev_pool_plan",
    "bev_pool_v2",
    "bev_pool_v2_plan",
    "bev_pool_v2_ranks",
    "flash_bevpool",
    "flash_bevpool_sca",
    "voxel_pool_depth",
    "voxel_pool_depth_plan",
    "voxel_pooling_inference",
    "voxel_pooling_inference_plan",
    "voxel_pooling_train",
    "voxel_pooling_train_plan",
    "why_not",
]
