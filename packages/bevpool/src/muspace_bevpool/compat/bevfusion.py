# SPDX-License-Identifier: Apache-2.0
"""BEVFusion's ``mmdet3d.ops.bev_pool``; mmdetection3d's project, MapTR and VMA carry the same interface."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from muspace_bevpool.ops import bev_pool as _pool

Size = int | torch.Tensor


def bev_pool(feats: torch.Tensor, coords: torch.Tensor, B: Size, D: Size, H: Size, W: Size) -> torch.Tensor:
    """BEVFusion's function: rows ``[N, C]``, coordinates ``[N, 4]`` (h, w, d, b) to ``[B, C, D, H, W]``.

    Unlike upstream rows out of range are dropped, the order of the rows is free and N = 0 gives zeros.
    """
    return _pool(feats, coords, B, D, H, W)


class QuickCumsumCuda:
    """BEVFusion's autograd function, called as ``QuickCumsumCuda.apply(x, geom_feats, ranks, B, D, H, W)``."""

    @staticmethod
    def apply(
        x: torch.Tensor, geom_feats: torch.Tensor, ranks: torch.Tensor | None, B: Size, D: Size, H: Size, W: Size
    ) -> torch.Tensor:
        """``[B, D, H, W, C]``; ``ranks`` are ignored, the rows need not be sorted by them."""
        return _pool(x, geom_feats, B, D, H, W).permute(0, 2, 3, 4, 1)


class QuickCumsum:
    """BEVFusion's cumulative-sum function, called as ``QuickCumsum.apply(x, geom_feats, ranks)`` on rows sorted by rank.

    The sums are those of ``index_add``: upstream's difference of running sums loses four digits at a million points.
    """

    @staticmethod
    def apply(x: torch.Tensor, geom_feats: torch.Tensor, ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of every run of equal ranks ``[runs, C]`` and the coordinates of its last row ``[runs, 4]``."""
        _, run, lengths = torch.unique_consecutive(ranks, return_inverse=True, return_counts=True)
        total = x.new_zeros((lengths.shape[0], x.shape[1])).index_add(0, run, x)
        return total, geom_feats[torch.cumsum(lengths, 0) - 1]


def _bev_pool_forward(
    x: torch.Tensor,
    geom_feats: torch.Tensor,
    interval_lengths: torch.Tensor,
    interval_starts: torch.Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> torch.Tensor:
    return QuickCumsumCuda.apply(x, geom_feats, None, b, d, h, w).contiguous()


def _bev_pool_backward(
    out_grad: torch.Tensor,
    geom_feats: torch.Tensor,
    interval_lengths: torch.Tensor,
    interval_starts: torch.Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> torch.Tensor:
    rows = out_grad.new_zeros((geom_feats.shape[0], out_grad.shape[4])).requires_grad_()
    with torch.enable_grad():
        output = _pool(rows, geom_feats, b, d, h, w)
    return torch.autograd.grad(output, rows, out_grad.permute(0, 4, 1, 2, 3))[0]


#: The extension module: sums ``[b, d, h, w, c]`` and the gradient of the rows. The intervals are not needed and not read.
bev_pool_ext = SimpleNamespace(bev_pool_forward=_bev_pool_forward, bev_pool_backward=_bev_pool_backward)
