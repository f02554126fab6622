# SPDX-License-Identifier: Apache-2.0
"""bev_pool on the library: keys, plan, unweighted sums; the gradient is a gather."""

from __future__ import annotations

import torch
from muspace_core.checks import readable

from muspace_bevpool._native import cell_pool, zeros_like
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
    output = torch.empty((B, feats.shape[1], D, H, W), dtype=feats.dtype, device=feats.device)
    if feats.numel() == 0 or output.numel() == 0:
        return output.zero_()
    if not plan.numel():
        keys = cell_pool.keys("coords", coords, None, rule(B, D, H, W), backend)
        plan = cell_pool.plan(keys, B * D * H * W, POINTS, backend)
    return cell_pool.pool(output, 1, readable("feats", feats), 1, None, plan, feats.shape[0], backend)


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
        return zeros_like(feats)[0]
    if not plan.numel():
        keys = cell_pool.keys("coords", coords, None, rule(B, D, H, W), backend)
    return cell_pool.gather(readable("grad_output", grad_output), 1, keys, feats, backend)
