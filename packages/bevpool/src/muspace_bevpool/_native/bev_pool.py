# SPDX-License-Identifier: Apache-2.0
"""bev_pool on the library: keys, plan, unweighted sums; the gradient is a gather."""

from __future__ import annotations

import torch
from muspace_core.checks import readable

from muspace_bevpool._native import cell_pool
from muspace_bevpool._plan import KeyRule, PointMap

#: A row of features per point, no weights.
POINTS = PointMap()


def rule(B: int, D: int, H: int, W: int) -> KeyRule:
    """Columns (h, w, d, b) to the cell ``((b*D + d)*H + h)*W + w``."""
    return KeyRule(bounds=(H, W, D, B), strides=(W, 1, H * W, D * H * W), cells=B * D * H * W)


def forward(
    feats: torch.Tensor,
    coords: torch.Tensor,
    keys: torch.Tensor,
    plan: torch.Tensor,
    B: int,
    D: int,
    H: int,
    W: int,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, C, D, H, W]``; without a plan it is made here, ``deterministic`` changes nothing."""
    cells, channels = B * D * H * W, feats.shape[1]
    output = torch.empty((B, channels, D * H * W), dtype=feats.dtype, device=feats.device)
    if feats.numel() == 0 or output.numel() == 0:
        return output.zero_().view(B, channels, D, H, W)
    if not plan.numel():
        keys = cell_pool.keys("coords", coords, None, rule(B, D, H, W), backend)
        plan = cell_pool.plan(keys, cells, POINTS, backend)
    cell_pool.pool(readable("feats", feats), None, plan, feats.shape[0], output, backend)
    return output.view(B, channels, D, H, W)


def backward(
    grad_output: torch.Tensor,
    feats: torch.Tensor,
    coords: torch.Tensor,
    keys: torch.Tensor,
    plan: torch.Tensor,
    B: int,
    D: int,
    H: int,
    W: int,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """Gradient of ``feats``: the cell of every point, in the caller's order."""
    if feats.numel() == 0 or grad_output.numel() == 0:
        return torch.zeros(feats.shape, dtype=feats.dtype, device=feats.device)
    if not plan.numel():
        keys = cell_pool.keys("coords", coords, None, rule(B, D, H, W), backend)
    grad = readable("grad_output", grad_output).view(B, feats.shape[1], D * H * W)
    return cell_pool.gather(grad, keys, feats.dtype, backend)
