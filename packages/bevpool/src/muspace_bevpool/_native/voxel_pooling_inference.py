# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_inference on the library: keys, plan, weighted sums; the backward walks the depth bins of every pixel."""

from __future__ import annotations

import torch
from muspace_core.checks import readable

from muspace_bevpool._native import cell_pool, nothing
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
    output = torch.empty((batch * Y * X, channels), dtype=context_features.dtype, device=context_features.device)
    if points == 0 or output.numel() == 0:
        return output.zero_().view(batch, Y, X, channels).permute(0, 3, 1, 2)
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
        plan = cell_pool.plan(plan_keys, batch * Y * X, frustum(depth_features), backend)
    rows = readable("context_features", context_features).flatten(2)
    cell_pool.pool(rows, readable("depth_features", depth_features).view(-1), plan, points, output, backend)
    return output.view(batch, Y, X, channels).permute(0, 3, 1, 2)


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
        zeros = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (depth_features, context_features))
        return tuple(zeros)  # type: ignore[return-value]
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
    rows = readable("context_features", context_features).flatten(2)
    weights = readable("depth_features", depth_features).view(-1)
    grad_rows, grad_weights = cell_pool.backward(
        cells_of(grad_output),
        rows,
        weights,
        plan_keys,
        nothing(plan_keys.device),
        frustum(depth_features),
        cell_pool.UNIQUE,
        backend,
    )
    return grad_weights.to(depth_features.dtype).view(depth_features.shape), grad_rows.view(context_features.shape)
