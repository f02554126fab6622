# SPDX-License-Identifier: Apache-2.0
"""voxel_pool_depth on the library: keys, plan, weighted sums; the backward walks the depth bins of every pixel."""

from __future__ import annotations

import torch
from muspace_core.checks import readable
from muspace_core.scratch import nothing

from muspace_bevpool._native import cell_pool, zeros_like
from muspace_bevpool._native.voxel_pooling_inference import frustum
from muspace_bevpool._plan import KeyRule


def rule(batch: int, cameras: int, points: int, X: int, Y: int, Z: int, reduce_cams: bool) -> KeyRule:
    """Columns (b, x, y, z) of ``points`` points an image to the cell ``((b*n + camera)*X + x)*Y*Z + y*Z + z``."""
    volume, kept = X * Y * Z, 1 if reduce_cams else cameras
    return KeyRule(
        bounds=(batch, X, Y, Z),
        strides=(kept * volume, Y * Z, Z, 1),
        cells=batch * kept * volume,
        run=points,
        count=cameras,
        run_stride=0 if reduce_cams else volume,
    )


def keys(
    voxel_coords: torch.Tensor, mask: torch.Tensor, cameras: int, X: int, Y: int, Z: int, reduce_cams: bool, backend: str
) -> torch.Tensor:
    """Cell of every masked point of ``voxel_coords [B, sweeps, cameras, D, H, W, 4]``."""
    batch, points = voxel_coords.shape[0], voxel_coords.shape[3:6].numel()
    return cell_pool.keys("voxel_coords", voxel_coords, mask, rule(batch, cameras, points, X, Y, Z, reduce_cams), backend)


def forward(
    img_feats: torch.Tensor,
    img_depth: torch.Tensor,
    voxel_coords: torch.Tensor,
    mask: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    cameras: int,
    X: int,
    Y: int,
    Z: int,
    reduce_cams: bool,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, cameras or 1, X, Y, Z, C]``; without a plan it is made here."""
    batch, channels, points = img_feats.shape[0], img_feats.shape[2], img_depth.numel()
    shape = (batch, 1 if reduce_cams else cameras, X, Y, Z, channels)
    dtype = torch.promote_types(img_feats.dtype, img_depth.dtype)
    output = torch.empty(shape, dtype=dtype, device=img_feats.device)
    if points == 0 or output.numel() == 0:
        return output.zero_()
    if not plan.numel():
        plan_keys = keys(voxel_coords, mask, cameras, X, Y, Z, reduce_cams, backend)
        plan = cell_pool.plan(plan_keys, output.shape[:5].numel(), frustum(img_depth), backend)
    rows, weights = readable("img_feats", img_feats), readable("img_depth", img_depth)
    return cell_pool.pool(output, 5, rows, 2, weights, plan, points, backend, cell_pool.launch_code())


def backward(
    grad_output: torch.Tensor,
    img_feats: torch.Tensor,
    img_depth: torch.Tensor,
    voxel_coords: torch.Tensor,
    mask: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    cameras: int,
    X: int,
    Y: int,
    Z: int,
    reduce_cams: bool,
    backend: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of features and depth; every pixel owns its depth bins, so nothing is scattered."""
    if img_depth.numel() == 0 or img_feats.numel() == 0 or grad_output.numel() == 0:
        return zeros_like(img_feats, img_depth)  # type: ignore[return-value]
    if not plan.numel():
        plan_keys = keys(voxel_coords, mask, cameras, X, Y, Z, reduce_cams, backend)
    return cell_pool.backward(
        readable("grad_output", grad_output),
        5,
        readable("img_feats", img_feats),
        2,
        readable("img_depth", img_depth),
        plan_keys,
        nothing(plan_keys.device),
        frustum(img_depth),
        cell_pool.UNIQUE,
        backend,
        cell_pool.depth_warp(),
    )
