# SPDX-License-Identifier: Apache-2.0
"""Bilinear sampling of one map, corner by corner, with nothing flowing to or from what lies outside."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def pixel(locations: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """``fma(location, size, -0.5)`` in ``dtype``: through fp64, which holds the product exactly, where the device has it."""
    if dtype is torch.float32 and locations.device.type in ("cpu", "cuda"):
        return (locations.double() * size - 0.5).float()
    return locations.to(dtype) * size - 0.5


def corners(
    rows: torch.Tensor, height: int, width: int, x: torch.Tensor, y: torch.Tensor, inside: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The four corners of every sample: their rows ``[N, K, D]`` and bilinear weights ``[N, K]``, both zero where invalid.

    rows ``[N, h*w, D]``; pixel coordinates ``x``, ``y`` and the mask ``inside`` (false: the sample counts for nothing,
    whatever its coordinates are) ``[N, K]``.
    """
    # Outside (NaN included) nothing may flow, neither a value nor a gradient: replace before computing.
    x, y = torch.where(inside, x, 0.0), torch.where(inside, y, 0.0)
    x0, y0 = x.detach().floor(), y.detach().floor()
    fx, fy = x - x0, y - y0
    for dy, wy in ((0, 1 - fy), (1, fy)):
        for dx, wx in ((0, 1 - fx), (1, fx)):
            column, line = x0.long() + dx, y0.long() + dy
            valid = inside & (column >= 0) & (column < width) & (line >= 0) & (line < height)
            index = (line * width + column).where(valid, torch.zeros_like(column))[..., None]
            corner = rows.gather(1, index.expand(-1, -1, rows.shape[2]))
            # A corner outside the map must not turn an infinite inner pixel into 0 * inf.
            yield torch.where(valid[..., None], corner, 0.0), torch.where(valid, wy * wx, 0.0)
