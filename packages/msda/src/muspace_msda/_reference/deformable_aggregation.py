# SPDX-License-Identifier: Apache-2.0
"""deformable_aggregation in plain differentiable PyTorch."""

from __future__ import annotations

import torch

from muspace_msda import _scales
from muspace_msda._reference.bilinear import corners, pixel


def deformable_aggregation(
    mc_ms_feat: torch.Tensor,
    spatial_shape: torch.Tensor,
    scale_start_index: torch.Tensor,
    sampling_location: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Reference of ``muspace_msda.deformable_aggregation`` on the tensors that ``ops`` has checked.

    Computes in fp32 (fp64 for fp64) and narrows once. Reads the scale table on the host, so it syncs on a GPU.
    """
    if not torch.compiler.is_compiling():
        _scales.check_tensors(spatial_shape, scale_start_index, mc_ms_feat.shape[1])
    dtype = torch.float64 if mc_ms_feat.dtype is torch.float64 else torch.float32
    batch, _, channels = mc_ms_feat.shape
    _, anchors, points, cameras, scales, groups = weights.shape
    rows, shares = mc_ms_feat.to(dtype), weights.to(dtype)
    # The sums of nothing give a result without cameras, scales or points its path back to the inputs.
    nothing = rows[:, :0].sum() + sampling_location[..., :0].sum().to(dtype) + shares[..., :0].sum()
    output = rows.new_zeros(batch, anchors, channels) + nothing
    shapes, starts = spatial_shape.tolist(), scale_start_index.tolist()
    for camera in range(cameras):
        location = sampling_location[:, :, :, camera].to(dtype).reshape(batch, anchors * points, 2)
        # Strictly inside the image on both axes, tested before the scale: NaN and the half-pixel rim count for nothing.
        inside = ((location > 0) & (location < 1)).all(-1)
        for scale in range(scales):
            (height, width), start = shapes[camera][scale], starts[camera][scale]
            x, y = (pixel(location[..., axis], size, dtype) for axis, size in enumerate((width, height)))
            share = torch.where(inside[..., None], shares[:, :, :, camera, scale].reshape(batch, anchors * points, groups), 0.0)
            for corner, weight in corners(rows[:, start : start + height * width], height, width, x, y, inside):
                scaled = (share * weight[..., None])[..., None]  # [B, A*P, G, 1]
                terms = corner.view(batch, anchors * points, groups, channels // groups) * scaled
                output = output + terms.view(batch, anchors, points, channels).sum(2)
    return output.to(mc_ms_feat.dtype)
