# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_inference on the library: keys, plan, weighted sums; the backward walks the depth bins of every pixel."""

from __future__ import annotations

import torch
from muspace_core.checks import readable
from muspace_core.scratch import nothing

from muspace_bevpool._native import cell_pool, zeros_like
from muspace_bevpool._native.voxel_pooling_train import cells_of, keys
from muspace_bevpool._plan import PointMap


def frustum(depth_features: torch.Tensor) -> PointMap:
    """Points in the order of ``[images, D, H, W]``."""
    return PointMap(depth_bins=depth_features.shape[1], pixels=depth_features.shape[2] * depth_features.shape[3])


def forward(
    geom_xyz: torch.Tensor,
    depth_features: torch.Tensor,
    context_features: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    batch: int,
    X: int,
    Y: int,
    Z: int,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, C, Y, X]``, a view of a ``[B, Y, X, C]`` buffer; without a plan it is made here."""
    channels, points = context_features.shape[1], depth_features.numel()
    output = torch.empty((batch, Y, X, channels), dtype=context_features.dtype, device=context_features.device)
    if points == 0 or output.numel() == 0:
        return output.zero_().permute(0, 3, 1, 2)
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
        plan = cell_pool.plan(plan_keys, batch * Y * X, frustum(depth_features), backend)
    rows, weights = readable("context_features", context_features), readable("depth_features", depth_features)
    cell_pool.pool(output, 3, rows, 1, weights, plan, points, backend)
    return output.permute(0, 3, 1, 2)


def backward(
    grad_output: torch.Tensor,
    geom_xyz: torch.Tensor,
    depth_features: torch.Tensor,
    context_features: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    batch: int,
    X: int,
    Y: int,
    Z: int,
    backend: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of depth and context."""
    if depth_features.numel() == 0 or context_features.numel() == 0 or grad_output.numel() == 0:
        return zeros_like(depth_features, context_features)  # type: ignore[return-value]
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
    grad_context, grad_depth = cell_pool.backward(
        *cells_of(grad_output),
        readable("context_features", context_features),
        1,
        readable("depth_features", depth_features),
        plan_keys,
        nothing(plan_keys.device),
        frustum(depth_features),
        cell_pool.UNIQUE,
        backend,
    )
    return grad_depth, grad_context
