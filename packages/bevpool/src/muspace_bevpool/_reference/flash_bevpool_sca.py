# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool_sca in plain differentiable PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muspace_bevpool._reference.projection import centres, project


def _sample(
    rows: torch.Tensor, height: int, width: int, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """``[N, K, D]`` bilinear samples of ``rows [N, height*width, D]`` times ``weight [N, K]``; zero beyond the open window."""
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    x, y, weight = (torch.where(inside, value, 0.0) for value in (x, y, weight))
    x0, y0 = x.detach().floor(), y.detach().floor()
    total = rows.new_zeros(*x.shape, rows.shape[2])
    for line, share_y in ((y0, 1 - (y - y0)), (y0 + 1, y - y0)):
        for column, share_x in ((x0, 1 - (x - x0)), (x0 + 1, x - x0)):
            valid = inside & (column >= 0) & (column < width) & (line >= 0) & (line < height)
            index = torch.where(valid, line * width + column, 0.0).long()[..., None].expand(-1, -1, rows.shape[2])
            corner = torch.where(valid[..., None], rows.gather(1, index), 0.0)
            total = total + corner * torch.where(valid, share_x * share_y * weight, 0.0)[..., None]
    return total


def flash_bevpool_sca(
    image_feats: torch.Tensor,
    projection_matrices: torch.Tensor,
    sampling_offsets: torch.Tensor | None,
    attention_weights: torch.Tensor | None,
    level_sizes: Sequence[int],
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    z_anchors: Sequence[float],
    heads: int,
    points: int,
    eps: float,
    average: bool,
) -> torch.Tensor:
    """Reference of ``muspace_bevpool.flash_bevpool_sca`` on the arguments that ``ops`` has checked, in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if image_feats.dtype is torch.float64 else torch.float32
    batch, cameras, _, channels = image_feats.shape
    X, Y = grid_size
    queries, device = X * Y, image_feats.device
    feats = image_feats.to(dtype)
    # Once, not per camera: the gradient is then summed in this dtype and narrowed once.
    offsets, weights = (None if t is None else t.to(dtype) for t in (sampling_offsets, attention_weights))
    x = centres(roi_range[0], roi_range[1], X, dtype, device).repeat(Y)
    y = centres(roi_range[2], roi_range[3], Y, dtype, device).repeat_interleave(X)
    total = feats.new_zeros(batch, queries, channels) + feats[:, :, :0].sum()
    for given in (offsets, weights):
        if given is not None:
            total = total + given[..., :0].sum()
    hits = feats.new_zeros(batch, queries)
    for camera in range(cameras):
        places = [project(projection_matrices[:, camera].to(dtype), x, y, z, eps) for z in z_anchors]
        u = torch.stack([place[0] / image_size[1] for place in places], -1) if places else x.new_zeros(batch, queries, 0)
        v = torch.stack([place[1] / image_size[0] for place in places], -1) if places else x.new_zeros(batch, queries, 0)
        depth = torch.stack([place[2] for place in places], -1) if places else u
        hit = ((depth > eps) & (u > 0) & (u < 1) & (v > 0) & (v < 1)).any(-1)
        hits = hits + hit
        seen = _attend(feats[:, camera], u, v, hit, offsets, weights, level_sizes, heads, points)
        total = total + seen
    if average:
        total = total / hits.clamp(min=1)[..., None]
    return total.to(image_feats.dtype)


def _attend(
    feats: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    hit: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    level_sizes: Sequence[int],
    heads: int,
    points: int,
) -> torch.Tensor:
    """``[B, Q, C]``: deformable attention of one camera ``feats [B, S, C]`` around the pillars' projections ``[B, Q, A]``."""
    batch, queries, anchors = u.shape
    levels, channels = len(level_sizes) // 2, feats.shape[2]
    depth = channels // heads
    total = feats.new_zeros(batch * heads, queries, depth)
    anchor = torch.arange(points, device=u.device) % max(anchors, 1)
    rows = feats.reshape(batch, feats.shape[1], heads, depth).transpose(1, 2).flatten(0, 1)
    start, shape = 0, (batch, heads, queries, points)
    for level in range(levels):
        height, width = level_sizes[2 * level], level_sizes[2 * level + 1]
        if height * width == 0:
            continue
        reference = [value[..., anchor][:, None] * size for value, size in ((u, width), (v, height))]
        if offsets is None:
            x, y = (value.expand(shape) - 0.5 for value in reference)
        else:
            moved = offsets[:, :, :, level].transpose(1, 2)
            x, y = (value + moved[..., axis] - 0.5 for axis, value in enumerate(reference))
        if weights is None:
            weight = feats.new_full(shape, 1 / max(levels * points, 1))
        else:
            weight = weights[:, :, :, level].transpose(1, 2)
        # A camera that does not see the pillar contributes nothing, whatever its coordinates are.
        x = torch.where(hit[:, None, :, None], x, float("nan"))
        flat = (batch * heads, queries * points)
        part = rows[:, start : start + height * width]
        sampled = _sample(part, height, width, x.reshape(flat), y.reshape(flat), weight.expand(shape).reshape(flat))
        total = total + sampled.view(batch * heads, queries, points, depth).sum(2)
        start += height * width
    return total.view(batch, heads, queries, depth).transpose(1, 2).reshape(batch, queries, channels)
