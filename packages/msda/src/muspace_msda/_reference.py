# SPDX-License-Identifier: Apache-2.0
"""What the operators of this wheel mean, in plain differentiable PyTorch: the fallback, and the yardstick of the bench."""

from __future__ import annotations

import torch

from muspace_msda import _levels


def _pixel(locations: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """``fma(location, size, -0.5)`` in ``dtype``: through fp64, which holds the product exactly, where the device has it."""
    if dtype is torch.float32 and locations.device.type in ("cpu", "cuda"):
        return (locations.double() * size - 0.5).float()
    return locations.to(dtype) * size - 0.5


def _sample_level(rows: torch.Tensor, height: int, width: int, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over the points of one level.

    rows ``[B, H, h*w, D]``; locations ``[B, H, Q, P, 2]``; weights ``[B, H, Q, P]``; returns ``[B, H, Q, D]``.
    """
    batch, heads, queries, points, _ = locations.shape
    x = _pixel(locations[..., 0], width, rows.dtype)
    y = _pixel(locations[..., 1], height, rows.dtype)
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    # Outside the open window (NaN included) nothing may flow, neither a value nor a gradient: replace before computing.
    x, y = torch.where(inside, x, 0.0), torch.where(inside, y, 0.0)
    x0, y0 = x.detach().floor(), y.detach().floor()
    fx, fy = x - x0, y - y0
    total = rows.new_zeros(batch, heads, queries, rows.shape[3])
    for dy, wy in ((0, 1 - fy), (1, fy)):
        for dx, wx in ((0, 1 - fx), (1, fx)):
            column, line = x0.long() + dx, y0.long() + dy
            valid = inside & (column >= 0) & (column < width) & (line >= 0) & (line < height)
            index = (line * width + column).where(valid, torch.zeros_like(column)).reshape(batch, heads, queries * points, 1)
            corner = rows.gather(2, index.expand(-1, -1, -1, rows.shape[3])).reshape(
                batch, heads, queries, points, rows.shape[3]
            )
            # A corner outside the map must not turn an infinite inner pixel into 0 * inf.
            corner = torch.where(valid[..., None], corner, 0.0)
            weight = torch.where(valid, wy * wx * weights, 0.0)
            total = total + (corner * weight[..., None]).sum(3)
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
    rows = value.to(dtype).permute(0, 2, 1, 3)
    locations = sampling_locations.to(dtype).permute(3, 0, 2, 1, 4, 5)
    weights = attention_weights.to(dtype).permute(3, 0, 2, 1, 4)
    queries = sampling_locations.shape[1]
    # The sums of nothing give a result without levels or points its path back to the inputs.
    nothing = rows[:, :, :0].sum() + locations[..., :0].sum() + weights[..., :0].sum()
    output = rows.new_zeros(batch, heads, queries, channels) + nothing
    start = 0
    starts = level_start_index.tolist()
    for level, (height, width) in enumerate(spatial_shapes.tolist()):
        first = starts[level] if starts else start
        level_rows = rows[:, :, first : first + height * width]
        output = output + _sample_level(level_rows, height, width, locations[level], weights[level])
        start += height * width
    return output.permute(0, 2, 1, 3).reshape(batch, queries, heads * channels).to(value.dtype)
