# SPDX-License-Identifier: Apache-2.0
"""voxel_pooling_train on the library: keys, plan, unweighted sums; the gradient is a gather."""

from __future__ import annotations

import torch
from muspace_core import checks
from muspace_core.checks import readable

from muspace_bevpool._native import cell_pool, zeros_like
from muspace_bevpool._native.bev_pool import POINTS
from muspace_bevpool._plan import KeyRule


def rule(batch: int, points: int, X: int, Y: int, Z: int) -> KeyRule:
    """Columns (x, y, z) of ``points`` points a batch item to the cell ``(b*Y + y)*X + x``; z only filters."""
    return KeyRule((X, Y, Z), (1, X, 0), batch * Y * X, run=points, count=batch, run_stride=Y * X)


def keys(geom_xyz: torch.Tensor, X: int, Y: int, Z: int, backend: str) -> torch.Tensor:
    """Cell of every point of ``geom_xyz [B, ..., 3]``."""
    batch = geom_xyz.shape[0]
    points = geom_xyz.numel() // 3 // max(batch, 1)
    return cell_pool.keys("geom_xyz", geom_xyz, None, rule(batch, points, X, Y, Z), backend)


def forward(
    geom_xyz: torch.Tensor,
    input_features: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    X: int,
    Y: int,
    Z: int,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, C, Y, X]``, a view of a ``[B, Y, X, C]`` buffer; without a plan it is made here."""
    batch, channels = input_features.shape[0], input_features.shape[-1]
    output = torch.empty((batch, Y, X, channels), dtype=input_features.dtype, device=input_features.device)
    if input_features.numel() == 0 or output.numel() == 0:
        return output.zero_().permute(0, 3, 1, 2)
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
        plan = cell_pool.plan(plan_keys, batch * Y * X, POINTS, backend)
    rows, axis = readable("input_features", input_features), input_features.dim() - 1
    cell_pool.pool(output, 3, rows, axis, None, plan, rows.shape[:-1].numel(), backend)
    return output.permute(0, 3, 1, 2)


def backward(
    grad_output: torch.Tensor,
    geom_xyz: torch.Tensor,
    input_features: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    X: int,
    Y: int,
    Z: int,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """Gradient of ``input_features``: the cell of every point."""
    if input_features.numel() == 0 or grad_output.numel() == 0:
        return zeros_like(input_features)[0]
    if not plan.numel():
        plan_keys = keys(geom_xyz, X, Y, Z, backend)
    return cell_pool.gather(*cells_of(grad_output), plan_keys, input_features, backend)


def cells_of(grad_output: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``[B, C, Y, X]`` and the axis of its channels, in whichever of the two layouts it has, copied only if it has neither."""
    checks.memory("grad_output", grad_output)
    channels_last = grad_output.permute(0, 2, 3, 1)
    if channels_last.is_contiguous():
        return readable("grad_output", channels_last), 3
    return readable("grad_output", grad_output), 1
