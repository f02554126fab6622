# SPDX-License-Identifier: Apache-2.0
"""bev_pool_v2 on the library: keys from intervals, plan, weighted sums; the backward walks the points of every pixel."""

from __future__ import annotations

import torch
from muspace_core import checks, environment
from muspace_core.checks import readable

from muspace_bevpool._native import cell_pool, zeros_like
from muspace_bevpool._plan import PointMap

#: Bits of the fault word, in the order in which they are reported.
INTERVAL, OVERLAP, BEV_RANK, FEAT_RANK, DEPTH_RANK = 8, 16, 1, 2, 4

Ranks = tuple[torch.Tensor, ...]


def keys(ranks: Ranks, weights: int, rows: int, cells: int, backend: str, check: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and row keys; ValueError for faulty ranks if ``check``, which waits for a device, and on cpu."""
    found, row_keys, faults = cell_pool.interval_keys(ranks, weights, rows, cells, backend)
    if check or backend == "cpu" or environment.CHECK.enabled():
        word = int(faults)
        if word:
            raise fault(word, ranks, weights, rows, cells)
    return found, row_keys


def fault(word: int, ranks: Ranks, weights: int, rows: int, cells: int) -> ValueError:
    """The error of a fault word, with the first offender; copies the ranks to the host."""
    rank_depth, rank_feat, rank_bev, starts, lengths = (rank.long().cpu() for rank in ranks)
    points = rank_bev.shape[0]
    inside = (starts >= 0) & (lengths >= 0) & (starts + lengths <= points)
    if word & INTERVAL:
        place = int(torch.nonzero(~inside)[0])
        got = f"start {int(starts[place])}, length {int(lengths[place])}"
        return checks.fail(f"interval_starts[{place}]", f"an interval inside the {points} points", got)
    if word & OVERLAP:
        return checks.fail("interval_starts", "intervals that share no point", "overlapping intervals")
    covered = torch.zeros(points, dtype=torch.bool, device="cpu")
    first = rank_bev.clone()
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        covered[start : start + length] = True
        first[start : start + length] = rank_bev[start] if length else 0
    if word & BEV_RANK:
        place = int(torch.nonzero(covered & ((rank_bev < 0) | (rank_bev >= cells) | (rank_bev != first)))[0])
        cell = int(rank_bev[place])
        alone = f"{int(first[place])} like the first of its interval"
        return checks.fail(f"ranks_bev[{place}]", alone if 0 <= cell < cells else f"a cell from 0 to {cells - 1}", cell)
    argument, rank, count = ("ranks_feat", rank_feat, rows) if word & FEAT_RANK else ("ranks_depth", rank_depth, weights)
    place = int(torch.nonzero(covered & ((rank < 0) | (rank >= count)))[0])
    return checks.fail(f"{argument}[{place}]", f"an index from 0 to {count - 1}", int(rank[place]))


def forward(
    depth: torch.Tensor,
    feat: torch.Tensor,
    ranks_depth: torch.Tensor,
    ranks_feat: torch.Tensor,
    ranks_bev: torch.Tensor,
    interval_starts: torch.Tensor,
    interval_lengths: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    row_plan: torch.Tensor,
    B: int,
    Dz: int,
    Dy: int,
    Dx: int,
    unique: bool,
    backend: str,
    deterministic: bool,
) -> torch.Tensor:
    """``[B, C, Dz, Dy, Dx]``; without a plan it is made here."""
    points = ranks_bev.shape[0]
    output = torch.empty((B, feat.shape[4], Dz, Dy, Dx), dtype=feat.dtype, device=feat.device)
    if points == 0 or feat.numel() == 0 or depth.numel() == 0 or output.numel() == 0:
        return output.zero_()
    if not plan.numel():
        cells = B * Dz * Dy * Dx
        ranks = (ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths)
        plan_keys, _ = keys(ranks, depth.numel(), feat.shape[:4].numel(), cells, backend, check=False)
        places = PointMap(rows=readable("ranks_feat", ranks_feat), weights=readable("ranks_depth", ranks_depth))
        plan = cell_pool.plan(plan_keys, cells, places, backend)
    return cell_pool.pool(output, 1, readable("feat", feat), 4, readable("depth", depth), plan, points, backend)


def backward(
    grad_output: torch.Tensor,
    depth: torch.Tensor,
    feat: torch.Tensor,
    ranks_depth: torch.Tensor,
    ranks_feat: torch.Tensor,
    ranks_bev: torch.Tensor,
    interval_starts: torch.Tensor,
    interval_lengths: torch.Tensor,
    plan_keys: torch.Tensor,
    plan: torch.Tensor,
    row_plan: torch.Tensor,
    B: int,
    Dz: int,
    Dy: int,
    Dx: int,
    unique: bool,
    backend: str,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of depth and features; a depth index that repeats receives the sum of its points, in order."""
    rows, cells = feat.shape[:4].numel(), B * Dz * Dy * Dx
    if ranks_bev.shape[0] == 0 or feat.numel() == 0 or depth.numel() == 0 or cells == 0:
        return zeros_like(depth, feat)  # type: ignore[return-value]
    ranks_depth = readable("ranks_depth", ranks_depth)
    if not row_plan.numel():
        ranks = (ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths)
        plan_keys, row_keys = keys(ranks, depth.numel(), rows, cells, backend, check=False)
        row_plan = by_row(plan_keys, row_keys, ranks_depth, rows, backend)
    route = cell_pool.UNIQUE if unique else cell_pool.ACCUMULATE if backend == "cpu" else cell_pool.PER_POINT
    places = PointMap(rows=plan_keys, weights=ranks_depth)
    grad_feat, grad_depth = cell_pool.backward(
        readable("grad_output", grad_output),
        1,
        readable("feat", feat),
        4,
        readable("depth", depth),
        plan_keys,
        row_plan,
        places,
        route,
        backend,
    )
    if route == cell_pool.PER_POINT:
        grad_depth = _by_depth(grad_depth, plan_keys, ranks_depth, depth, backend)
    return grad_depth, grad_feat


def by_row(plan_keys: torch.Tensor, row_keys: torch.Tensor, ranks_depth: torch.Tensor, rows: int, backend: str) -> torch.Tensor:
    """The plan of the backward: the points of every feature row, as (cell, depth index)."""
    return cell_pool.plan(row_keys, rows, PointMap(rows=plan_keys, weights=ranks_depth), backend)


def _by_depth(
    products: torch.Tensor, plan_keys: torch.Tensor, ranks_depth: torch.Tensor, depth: torch.Tensor, backend: str
) -> torch.Tensor:
    """Sum of the points' products per depth index: the same sum per cell once more, with one channel."""
    depth_keys = torch.where(plan_keys >= 0, ranks_depth, -1)
    entries = cell_pool.plan(depth_keys, depth.numel(), PointMap(), backend)
    output = torch.empty((*depth.shape, 1), dtype=products.dtype, device=products.device)
    cell_pool.pool(output, 5, products.view(-1, 1), 1, None, entries, products.shape[0], backend)
    return output.to(depth.dtype).view(depth.shape)
