# SPDX-License-Identifier: Apache-2.0
"""BEVDepth's ``ops.voxel_pooling_train`` and ``ops.voxel_pooling_inference``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from muspace_core import checks

from muspace_bevpool.ops import voxel_pooling_inference, voxel_pooling_train


class VoxelPoolingTrain:
    """The autograd function, called as ``VoxelPoolingTrain.apply(geom_xyz, input_features, voxel_num)``."""

    @staticmethod
    def apply(geom_xyz: torch.Tensor, input_features: torch.Tensor, voxel_num: Any) -> torch.Tensor:
        """``[B, C, Y, X]``."""
        return voxel_pooling_train(geom_xyz, input_features, voxel_num)


class VoxelPoolingInference:
    """The function, called as ``VoxelPoolingInference.apply(geom_xyz, depth_features, context_features, voxel_num)``."""

    @staticmethod
    def apply(
        geom_xyz: torch.Tensor, depth_features: torch.Tensor, context_features: torch.Tensor, voxel_num: Any
    ) -> torch.Tensor:
        """``[B, C, Y, X]``."""
        return voxel_pooling_inference(geom_xyz, depth_features, context_features, voxel_num)


def _train_forward_wrapper(
    batch_size: int,
    num_points: int,
    num_channels: int,
    num_voxel_x: int,
    num_voxel_y: int,
    num_voxel_z: int,
    geom_xyz: torch.Tensor,
    input_features: torch.Tensor,
    output_features: torch.Tensor,
    pos_memo: torch.Tensor,
) -> int:
    sizes = (num_voxel_x, num_voxel_y, num_voxel_z)
    checks.shape("output_features", output_features, "B Y X C", (batch_size, num_voxel_y, num_voxel_x, num_channels))
    checks.shape("pos_memo", pos_memo, "B N 3", (batch_size, num_points, 3))
    points = geom_xyz.view(batch_size, num_points, 3)
    with torch.no_grad():
        rows = input_features.view(batch_size, num_points, num_channels)
        found = voxel_pooling_train(points, rows, sizes).permute(0, 2, 3, 1)
        bounds = torch.tensor(sizes, device=points.device)
        inside = ((points >= 0) & (points < bounds)).all(-1, keepdim=True)
        item = torch.arange(batch_size, device=points.device, dtype=points.dtype).view(-1, 1).expand(-1, num_points)
        place = torch.stack((item, points[..., 1], points[..., 0]), -1)
        memo = torch.where(inside, place.to(pos_memo.dtype), pos_memo)
        output_features.add_(found)  # nothing is written before everything is known
        pos_memo.copy_(memo)
    return 1


def _inference_forward_wrapper(
    batch_size: int,
    num_cams: int,
    num_depth: int,
    num_height: int,
    num_width: int,
    num_channels: int,
    num_voxel_x: int,
    num_voxel_y: int,
    num_voxel_z: int,
    geom_xyz: torch.Tensor,
    depth_features: torch.Tensor,
    context_features: torch.Tensor,
    output_features: torch.Tensor,
) -> int:
    frustum = (batch_size, num_cams, num_depth, num_height, num_width)
    images = batch_size * num_cams
    checks.shape("output_features", output_features, "B Y X C", (batch_size, num_voxel_y, num_voxel_x, num_channels))
    with torch.no_grad():
        found = voxel_pooling_inference(
            geom_xyz.view(*frustum, 3),
            depth_features.view(images, *frustum[2:]),
            context_features.view(images, num_channels, num_height, num_width),
            (num_voxel_x, num_voxel_y, num_voxel_z),
        ).permute(0, 2, 3, 1)
        output_features.add_(found)
    return 1


#: The extension modules. As upstream they add to the caller's (zeroed) ``[B, Y, X, C]`` output, write (b, y, x) of every kept
#: point into ``pos_memo [B, N, 3]``, leave the others, and return 1.
voxel_pooling_train_ext = SimpleNamespace(voxel_pooling_train_forward_wrapper=_train_forward_wrapper)
voxel_pooling_inference_ext = SimpleNamespace(voxel_pooling_inference_forward_wrapper=_inference_forward_wrapper)

__all__ = [
    "VoxelPoolingInference",
    "VoxelPoolingTrain",
    "voxel_pooling_inference",
    "voxel_pooling_inference_ext",
    "voxel_pooling_train",
    "voxel_pooling_train_ext",
]
