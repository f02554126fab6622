# SPDX-License-Identifier: Apache-2.0
"""Cell centres of a bird's-eye-view grid and their projection into the cameras."""

from __future__ import annotations

import torch


def centres(low: float, high: float, cells: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[cells]`` metres."""
    step = (high - low) / max(cells, 1)
    return ((torch.arange(cells, dtype=torch.float64) + 0.5) * step + low).to(device=device, dtype=dtype)


def project(
    projections: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | float, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels ``u``, ``v`` and depth, each ``[B, cells]``, of points with the ego coordinates ``x``, ``y``, ``z`` (``[cells]``).

    ``projections [B, 3, 4]`` of one camera; the division is by ``max(depth, epsilon)``.
    """
    entry = projections[..., None]  # no matmul: it may be computed in TF32

    def along(row: int) -> torch.Tensor:
        return entry[:, row, 0] * x + entry[:, row, 1] * y + entry[:, row, 2] * z + entry[:, row, 3]

    depth = along(2)
    divisor = depth.clamp(min=epsilon)
    return along(0) / divisor, along(1) / divisor, depth
