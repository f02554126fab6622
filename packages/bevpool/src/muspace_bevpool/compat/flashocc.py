# SPDX-License-Identifier: Apache-2.0
"""BEVDet's and FlashOcc's ``ops.bev_pool_v2``."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from muspace_core import checks

from muspace_bevpool.ops import bev_pool_v2, bev_pool_v2_ranks


class QuickCumsumCuda:
    """The autograd function, called as ``QuickCumsumCuda.apply(depth, feat, ranks_depth, ...)``; fp32 as upstream casts."""

    @staticmethod
    def apply(
        depth: torch.Tensor,
        feat: torch.Tensor,
        ranks_depth: torch.Tensor,
        ranks_feat: torch.Tensor,
        ranks_bev: torch.Tensor,
        bev_feat_shape: Sequence[int],
        interval_starts: torch.Tensor,
        interval_lengths: torch.Tensor,
    ) -> torch.Tensor:
        """``[B, Dz, Dy, Dx, C]``."""
        ranks = (ranks_depth, ranks_feat, ranks_bev)
        output = bev_pool_v2(depth.float(), feat.float(), *ranks, bev_feat_shape, interval_starts, interval_lengths)
        return output.permute(0, 2, 3, 4, 1)


class TRTBEVPoolv2:
    """FlashOcc's export function, called as ``TRTBEVPoolv2.apply(depth [N, D, H, W], feat [N, H, W, C], ...)``."""

    @staticmethod
    def apply(
        depth: torch.Tensor,
        feat: torch.Tensor,
        ranks_depth: torch.Tensor,
        ranks_feat: torch.Tensor,
        ranks_bev: torch.Tensor,
        interval_starts: torch.Tensor,
        interval_lengths: torch.Tensor,
        output_height: int = 128,
        output_width: int = 128,
        output_z: int = 1,
    ) -> torch.Tensor:
        """``[B, Y, X, C]`` for one height, else ``[B, C, Z, Y, X]``."""
        shape = (1, output_z, output_height, output_width, feat.shape[-1])
        ranks = (ranks_depth, ranks_feat, ranks_bev)
        output = bev_pool_v2(depth[None], feat[None], *ranks, shape, interval_starts, interval_lengths)
        return output.squeeze(2).permute(0, 2, 3, 1) if output_z == 1 else output


def voxel_pooling_prepare_v2(self: Any, coor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The view transformer's method, with ``grid_lower_bound``, ``grid_interval`` and ``grid_size`` of ``self``.

    ``(ranks_bev, ranks_depth, ranks_feat, interval_starts, interval_lengths)``, five ``None`` where no point is kept. Ranks
    are exact integers; upstream's are built in fp32 and collide beyond 2^24 cells.
    """
    found = bev_pool_v2_ranks(coor, self.grid_lower_bound, self.grid_interval, self.grid_size)
    return found if found[0].shape[0] else (None,) * 5


def _bev_pool_v2_forward(
    depth: torch.Tensor,
    feat: torch.Tensor,
    out: torch.Tensor,
    ranks_depth: torch.Tensor,
    ranks_feat: torch.Tensor,
    ranks_bev: torch.Tensor,
    interval_lengths: torch.Tensor,
    interval_starts: torch.Tensor,
) -> None:
    ranks = (ranks_depth, ranks_feat, ranks_bev)
    checks.rank("out", out, "B Dz Dy Dx C")
    with torch.no_grad():
        found = bev_pool_v2(depth, feat, *ranks, out.shape, interval_starts, interval_lengths)
        out.copy_(found.permute(0, 2, 3, 4, 1))


def _bev_pool_v2_backward(
    out_grad: torch.Tensor,
    depth_grad: torch.Tensor,
    feat_grad: torch.Tensor,
    depth: torch.Tensor,
    feat: torch.Tensor,
    ranks_depth: torch.Tensor,
    ranks_feat: torch.Tensor,
    ranks_bev: torch.Tensor,
    interval_lengths: torch.Tensor,
    interval_starts: torch.Tensor,
) -> None:
    checks.shape("depth_grad", depth_grad, "B N D fH fW", depth.shape)
    checks.shape("feat_grad", feat_grad, "B N fH fW C", feat.shape)
    # The intervals are runs of one feature row here, so every point is an interval of its own cell.
    starts = torch.arange(ranks_bev.shape[0], dtype=torch.int32, device=ranks_bev.device)
    leaves = depth.detach().requires_grad_(), feat.detach().requires_grad_()
    with torch.enable_grad():
        ranks = (ranks_depth, ranks_feat, ranks_bev)
        output = bev_pool_v2(*leaves, *ranks, out_grad.shape, starts, torch.ones_like(starts))
    found = torch.autograd.grad(output, leaves, out_grad.permute(0, 4, 1, 2, 3).to(output.dtype))
    depth_grad.copy_(found[0])
    feat_grad.copy_(found[1])


#: The extension module, lengths before starts: ``bev_pool_v2_forward(depth, feat, out, rd, rf, rb, lengths, starts)`` writes
#: ``out [B, Dz, Dy, Dx, C]``; ``bev_pool_v2_backward(out_grad, depth_grad, feat_grad, depth, feat, rd, rf, rb, lengths,
#: starts)`` writes the two gradients; its intervals are taken to cover all points, as the models make them.
bev_pool_v2_ext = SimpleNamespace(bev_pool_v2_forward=_bev_pool_v2_forward, bev_pool_v2_backward=_bev_pool_v2_backward)

__all__ = ["QuickCumsumCuda", "TRTBEVPoolv2", "bev_pool_v2", "bev_pool_v2_ext", "voxel_pooling_prepare_v2"]
