# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool in plain differentiable PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muspace_bevpool._reference.projection import centres, project


def _interpolate(rows: torch.Tensor, width: int, height: int, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[B, cells, C]`` of ``rows [B, height*width, C]``: pixel centres on integers, the far corner clamped to the border."""
    u0, v0 = u.floor(), v.floor()
    fu, fv = (u - u0)[..., None], (v - v0)[..., None]
    left, top = u0.long(), v0.long()
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)

    def corner(line: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        index = (line * width + column)[..., None].expand(-1, -1, rows.shape[2])
        return rows.gather(1, index)

    upper = corner(top, left) * (1 - fu) + corner(top, right) * fu
    lower = corner(bottom, left) * (1 - fu) + corner(bottom, right) * fu
    return upper * (1 - fv) + lower * fv


def depth_weight(
    depth: torch.Tensor, params: torch.Tensor, distribution: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How likely ``depth`` is under ``params [..., 2]`` = (mean, scale), and its distance from the mean in scales.

    Gaussian (0) without 1/sqrt(2 pi), or Laplace (1).
    """
    scale = params[..., 1] + epsilon
    z = (depth - params[..., 0]) / scale
    return (torch.exp(-z * z / 2) / scale if distribution == 0 else 0.5 * torch.exp(-z.abs()) / scale), z


def flash_bevpool(
    image_feats: torch.Tensor,
    depth_params: torch.Tensor,
    projection_matrices: torch.Tensor,
    image_size: Sequence[float],
    roi_range: Sequence[float],
    grid_size: Sequence[int],
    depth_distribution: int,
    epsilon: float,
    depth_weight_threshold: float,
) -> torch.Tensor:
    """Reference of ``muspace_bevpool.flash_bevpool`` on the arguments that ``ops`` has checked, in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if image_feats.dtype is torch.float64 else torch.float32
    batch, cameras, height, width, channels = image_feats.shape
    feats, params = image_feats.to(dtype).flatten(2, 3), depth_params.to(dtype).flatten(2, 3)
    x_min, x_max, y_min, y_max, z_min, z_max = roi_range
    X, Y, Z = grid_size
    device = image_feats.device
    x, y = centres(x_min, x_max, X, dtype, device).repeat(Y), centres(y_min, y_max, Y, dtype, device).repeat_interleave(X)
    heights = centres(z_min, z_max, Z, dtype, device)
    # The sums of nothing give a result without cameras or heights its path back to the inputs.
    total = feats.new_zeros(batch, Y * X, channels) + feats[:, :, :0].sum() + params[:, :, :0].sum()
    count = feats.new_zeros(batch, Y * X)
    for camera in range(cameras if height * width else 0):
        for level in heights:
            u, v, depth = project(projection_matrices[:, camera].to(dtype), x, y, level, epsilon)
            u, v = u / image_size[1] * width, v / image_size[0] * height
            seen = (depth > 0) & (u >= 0) & (u < width) & (v >= 0) & (v < height)
            u, v, depth = (torch.where(seen, value, 0.0) for value in (u, v, depth))
            params_here = _interpolate(params[:, camera], width, height, u, v)
            with torch.no_grad():
                weight, z = depth_weight(depth, params_here, depth_distribution, epsilon)
                kept = seen & (weight >= depth_weight_threshold) & weight.isfinite() & z.isfinite()
            # What does not count is replaced before it is computed with: behind the exponential it would still be 0 * NaN.
            depth, params_here = torch.where(kept, depth, 0.0), torch.where(kept[..., None], params_here, 1.0)
            weight, _ = depth_weight(depth, params_here, depth_distribution, epsilon)
            sample = torch.where(kept[..., None], _interpolate(feats[:, camera], width, height, u, v), 0.0)
            total = total + sample * torch.where(kept, weight, 0.0)[..., None]
            count = count + kept
    return (total / count.clamp(min=1)[..., None]).view(batch, Y, X, channels).to(image_feats.dtype)
