# SPDX-License-Identifier: Apache-2.0
"""multi_scale_deformable_attn in plain differentiable PyTorch."""

from __future__ import annotations

import torch

from muspace_msda import _levels
from muspace_msda._reference.bilinear import corners, pixel


def _sample_level(rows: torch.Tensor, height: int, width: int, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over the points of one level.

    rows ``[B*H, h*w, D]``; locations ``[B*H, Q, P, 2]``; weights ``[B*H, Q, P]``; returns ``[B*H, Q, D]``.
    """
    images, queries, points, _ = locations.shape
    x = pixel(locations[..., 0], width, rows.dtype).reshape(images, queries * points)
    y = pixel(locations[..., 1], height, rows.dtype).reshape(images, queries * points)
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    scale = torch.where(inside, weights.reshape(images, queries * points), 0.0)
    total = rows.new_zeros(images, queries, rows.shape[2])
    for corner, weight in corners(rows, height, width, x, y, inside):
        total = total + (corner * (weight * scale)[..., None]).view(images, queries, points, rows.shape[2]).sum(2)
    return total


def multi_scale_deformable_attn(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
) -> torch.Tensor:
    """Reference of ``muspace_msda.multi_scale_deformable_attn`` on the tensors that ``ops`` has checked.

    Computes in fp32 (fp64 for fp64) and narrows once. Reads the level table on the host, so it syncs on a GPU.
    """
    if not torch.compiler.is_compiling():
        _levels.check_tensors(spatial_shapes, level_start_index, value.shape[1])
    dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
    batch, _, heads, channels = value.shape
    rows = value.to(dtype).permute(0, 2, 1, 3).flatten(0, 1)
    locations = sampling_locations.to(dtype).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)
    weights = attention_weights.to(dtype).permute(3, 0, 2, 1, 4).flatten(1, 2)
    queries = sampling_locations.shape[1]
    # The sums of nothing give a result without levels or points its path back to the inputs.
    nothing = rows[:, :0].sum() + locations[..., :0].sum() + weights[..., :0].sum()
    output = rows.new_zeros(batch * heads, queries, channels) + nothing
    start = 0
    starts = level_start_index.tolist()
    for level, (height, width) in enumerate(spatial_shapes.tolist()):
        first = starts[level] if starts else start
        level_rows = rows[:, first : first + height * width]
        output = output + _sample_level(level_rows, height, width, locations[level], weights[level])
        start += height * width
    return (
        output.view(batch, heads, queries, channels)
        .permute(0, 2, 1, 3)
        .reshape(batch, queries, heads * channels)
        .to(value.dtype)
    )
