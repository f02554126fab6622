# SPDX-License-Identifier: Apache-2.0
"""bev_pool_v2: checks in the caller's words, its plan, and the ranks of a geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from muspace_core import checks
from muspace_core.register import outside_graphs
from muspace_core.scratch import absent

from muspace_bevpool import _autograd, _host, _reference
from muspace_bevpool._native import bev_pool_v2 as library, cell_pool
from muspace_bevpool._ops import planning
from muspace_bevpool._plan import MOST, PointMap, PoolPlan, check_counts

_DISPATCHER = _autograd.DISPATCHERS["bev_pool_v2"]
_NAMES = ("ranks_depth", "ranks_feat", "ranks_bev", "interval_starts", "interval_lengths")


def bev_pool_v2(
    depth: torch.Tensor,
    feat: torch.Tensor,
    ranks_depth: torch.Tensor | None,
    ranks_feat: torch.Tensor | None,
    ranks_bev: torch.Tensor | None,
    bev_feat_shape: Sequence[int],
    interval_starts: torch.Tensor | None,
    interval_lengths: torch.Tensor | None,
    *,
    plan: PoolPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Depth-weighted sum of image features per bird's-eye-view cell (BEVDet's and FlashOcc's ``bev_pool_v2``).

    .. math:: out[cell_i,:] = \sum_{k \in interval_i} depth[ranks\_depth_k]\; feat[ranks\_feat_k,:]

    ``cell_i`` is ``ranks_bev`` of the interval's first point, ``((b*Dz + z)*Dy + y)*Dx + x``. Intervals may come in any order
    and share a cell; cells without one are zero. Sums are fp32 for 16-bit and fp32 features, fp64 for fp64.

    Args:
        depth: ``[B, N, D, fH, fW]``, its own dtype.
        feat: ``[B, N, fH, fW, C]``; float32, bfloat16, float16, or float64 (cpu). Decides the dtype of the result.
        ranks_depth, ranks_feat, ranks_bev: ``[Np]`` int32 (int64 is accepted): flat indices into ``depth``, into the rows of
            ``feat`` and into the cells; may be ``None`` with a plan.
        bev_feat_shape: ``(B, Dz, Dy, Dx, C)``.
        interval_starts, interval_lengths: ``[Ni]`` int32 (or int64), runs of points of one cell.
        plan: from ``bev_pool_v2_plan`` with the same ranks; saves a sort in the forward and two in the backward.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, C, Dz, Dy, Dx]``, contiguous. Differentiable once in ``depth`` and ``feat``; a depth index that several points
        share receives the sum of their gradients.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: wrong rank, size or device; a plan of another operator, size, device or backend; ranks out of range,
            intervals that overlap or leave the points (cpu always, a device under ``MUSPACE_CHECK=1``; otherwise the points
            concerned are dropped).
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: bit-reproducible forward and backward.

    Example:
        >>> import torch
        >>> from muspace_bevpool import bev_pool_v2
        >>> depth, feat = torch.tensor([[[[[0.25, 0.5]]]]]), torch.ones(1, 1, 1, 2, 3)
        >>> ranks, start, length = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2])
        >>> bev_pool_v2(depth, feat, ranks, ranks, torch.tensor([3, 3]), (1, 1, 2, 2, 3), start, length)[0, 0, 0]
        tensor([[0.0000, 0.0000],
                [0.0000, 0.7500]])
    """
    checks.tensors(depth=depth, feat=feat)
    checks.rank("depth", depth, "B N D fH fW")
    checks.rank("feat", feat, "B N fH fW C")
    checks.storage("feat", feat)
    checks.companion("depth", depth, "feat", feat)
    planning.check_plan(plan)
    shape = _bev_shape(bev_feat_shape, feat.shape[4])
    batch, cameras, height, width, channels = feat.shape
    checks.shape("depth", depth, "B N D fH fW", (batch, cameras, depth.shape[2], height, width))
    rows, cells = batch * cameras * height * width, math.prod(shape)
    if plan is None:
        ranks = _checked_ranks((ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths), "feat", feat.device)
        check_counts("depth", depth.numel(), "bev_feat_shape", cells)
    else:
        plan.check("bev_pool_v2", (*depth.shape, *shape), feat.device)
        ranks = plan.ranks

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        keys, entries = planning.held(plan, selected, feat)
        row_entries = absent(feat) if plan is None else plan.row_entries
        unique = plan is not None and plan.unique
        return _autograd.bev_pool_v2(depth, feat, *ranks, keys, entries, row_entries, *shape, unique, selected, deterministic)

    def reference() -> torch.Tensor:
        key = _reference_keys(ranks, depth.numel(), rows, cells) if plan is None else plan.plain_keys()
        points = PointMap(rows=ranks[1], weights=ranks[0])
        total = _reference.pool(feat.reshape(rows, channels), depth.reshape(-1), key, cells, points)
        items, *volume = shape
        first = total.view(items, math.prod(volume), channels).transpose(1, 2).to(feat.dtype)
        return first.contiguous().view(items, channels, *volume)

    backward_route = "unique" if plan is not None and plan.unique else "per_point"
    return _DISPATCHER.run(backend, feat, native, reference, (), (plan is not None, backward_route))


def bev_pool_v2_plan(
    ranks_depth: torch.Tensor,
    ranks_feat: torch.Tensor,
    ranks_bev: torch.Tensor,
    bev_feat_shape: Sequence[int],
    interval_starts: torch.Tensor,
    interval_lengths: torch.Tensor,
    *,
    depth_shape: Sequence[int],
    backend: str = "auto",
) -> PoolPlan:
    """The plan of ``bev_pool_v2`` for fixed ranks: the sorts of forward and backward, and the checks of every index.

    Args:
        ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths: as ``bev_pool_v2`` takes them.
        bev_feat_shape: ``(B, Dz, Dy, Dx, C)`` or ``(B, Dz, Dy, Dx)``.
        depth_shape: ``(B, N, D, fH, fW)``, the shape of ``depth``.
        backend: that of the calls it is for.

    Raises:
        TypeError, ValueError: as ``bev_pool_v2``; every faulty rank and interval raises here, on a device too (one wait).

    Example:
        >>> import torch
        >>> from muspace_bevpool import bev_pool_v2, bev_pool_v2_plan
        >>> ranks, start, length = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2])
        >>> ranks_bev, shape = torch.tensor([3, 3]), (1, 1, 2, 2, 3)
        >>> plan = bev_pool_v2_plan(ranks, ranks, ranks_bev, shape, start, length, depth_shape=(1, 1, 1, 1, 2))
        >>> depth, feat = torch.ones(1, 1, 1, 1, 2), torch.ones(1, 1, 1, 2, 3)
        >>> bev_pool_v2(depth, feat, None, None, None, shape, None, None, plan=plan).sum()
        tensor(6.)
    """
    given = (ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths)
    checks.tensors(**dict(zip(_NAMES, given, strict=True)))
    for name, rank in zip(_NAMES, given, strict=True):
        planning.check_contents(name, rank)
    device = ranks_depth.device
    ranks = _checked_ranks(given, "ranks_depth", device)
    shape = _bev_shape(bev_feat_shape, None)
    batch, cameras, bins, height, width = _host.sizes("depth_shape", depth_shape, 5)
    rows, cells = batch * cameras * height * width, math.prod(shape)
    weights, count = rows * bins, ranks[0].shape[0]
    check_counts("depth_shape", max(weights, count), "bev_feat_shape", cells)
    selected = _DISPATCHER.choose(backend, device, torch.float32).backend
    sizes = (batch, cameras, bins, height, width, *shape)
    with torch.inference_mode(False):  # a plan serves training too, wherever it was made
        return _make_plan(ranks, sizes, weights, rows, cells, selected)


@outside_graphs
def _make_plan(
    given: tuple[torch.Tensor, ...], sizes: tuple[int, ...], weights: int, rows: int, cells: int, selected: str
) -> PoolPlan:
    ranks = tuple(rank.clone() for rank in given)  # a plan must not follow what its caller does to the tensors later
    count = ranks[0].shape[0]
    entries = row_entries = absent(ranks[0])
    if selected == "reference" or not (count and rows and weights and cells):
        key = _reference_keys(ranks, weights, rows, cells).int()
    else:
        key, row_keys = library.keys(ranks, weights, rows, cells, selected, check=True)
        entries = cell_pool.plan(key, cells, PointMap(rows=ranks[1], weights=ranks[0]), selected)
        row_entries = library.by_row(key, row_keys, ranks[0], rows, selected)
    depth_indices = ranks[0][key >= 0]
    unique = torch.unique(depth_indices).shape[0] == depth_indices.shape[0]
    return PoolPlan("bev_pool_v2", sizes, count, selected, key, entries, row_entries, ranks, unique)


def bev_pool_v2_ranks(
    points: torch.Tensor, lower_bound: Any, interval: Any, grid_size: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranks and intervals of a frustum (what BEVDet's ``voxel_pooling_prepare_v2`` computes), in exact integers.

    A coordinate falls into cell ``trunc((point - lower_bound) / interval)``, truncated toward zero as in the models, so the
    lowest cell of an axis also takes the cell below it; points outside the grid or not finite are left out. Points of a cell
    stay in frustum order. Waits for the device.

    Args:
        points: ``[B, N, D, fH, fW, 3]`` floating, metres in the ego frame, last axis (x, y, z).
        lower_bound, interval: three numbers each, metres.
        grid_size: ``(X, Y, Z)``, ints or whole floats.

    Returns:
        ``(ranks_bev, ranks_depth, ranks_feat, interval_starts, interval_lengths)``, int32; empty where nothing is kept.

    Raises:
        TypeError, ValueError: wrong dtype, shape or numbers; more cells or points than 2^31 - 1.

    Example:
        >>> import torch
        >>> from muspace_bevpool import bev_pool_v2_ranks
        >>> points = torch.tensor([[0.5, 1.5, 0.0], [0.2, 1.2, 0.0], [9.0, 0.0, 0.0]]).view(1, 1, 3, 1, 1, 3)
        >>> [rank.tolist() for rank in bev_pool_v2_ranks(points, (0, 0, -1), (1, 1, 2), (2, 2, 1))]
        [[2, 2], [0, 1], [0, 0], [0], [2]]
    """
    checks.tensors(points=points)
    checks.rank("points", points, "B N D fH fW 3")
    checks.storage("points", points)
    checks.plain_memory("points", points)
    if points.shape[5] != 3:
        checks.shape("points", points, "B N D fH fW 3", (*points.shape[:5], 3))
    low, step = _host.reals("lower_bound", lower_bound, 3), _host.reals("interval", interval, 3)
    grid = _host.reals("grid_size", grid_size, 3)
    if any(number != int(number) or number < 0 for number in grid):
        raise checks.fail("grid_size", "whole numbers of at least 0", list(grid))
    if any(number <= 0 for number in step):
        raise checks.fail("interval", "positive numbers", list(step))
    X, Y, Z = map(int, grid)
    batch, cameras, bins, height, width, _ = points.shape
    count = points.numel() // 3
    check_counts("points", count, "grid_size", batch * X * Y * Z)
    kind = points.dtype if points.dtype is torch.float64 else torch.float32
    scaled = (points.reshape(count, 3).to(kind) - points.new_tensor(low, dtype=kind)) / points.new_tensor(step, dtype=kind)
    # Compared before the cast: a huge float has no integer, and what that gives differs between devices.
    inside = ((scaled > -1) & (scaled < scaled.new_tensor([X, Y, Z]))).all(-1)
    kept = torch.nonzero(inside)[:, 0]
    cell = scaled[kept].long()
    item = kept // max(cameras * bins * height * width, 1)
    ranks_bev = ((item * Z + cell[:, 2]) * Y + cell[:, 1]) * X + cell[:, 0]
    ranks_bev, order = torch.sort(ranks_bev, stable=True)
    ranks_depth = kept[order]
    pixels = height * width
    ranks_feat = ranks_depth // max(bins * pixels, 1) * pixels + ranks_depth % max(pixels, 1)
    _, lengths = torch.unique_consecutive(ranks_bev, return_counts=True)
    starts = torch.cumsum(lengths, 0) - lengths
    return ranks_bev.int(), ranks_depth.int(), ranks_feat.int(), starts.int(), lengths.int()


def _bev_shape(bev_feat_shape: Sequence[int], channels: int | None) -> tuple[int, int, int, int]:
    sizes = _host.sizes("bev_feat_shape", bev_feat_shape, *((5,) if channels is not None else (5, 4)))
    if channels is not None and sizes[4] != channels:
        raise checks.fail("bev_feat_shape", f"(B, Dz, Dy, Dx, C) with the C = {channels} of feat", list(sizes))
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _checked_ranks(ranks: tuple[Any, ...], owner: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The five tensors as int32, of two lengths."""
    found = tuple(_checked_rank(name, rank, owner, device) for name, rank in zip(_NAMES, ranks, strict=True))
    points, intervals = found[2].shape[0], found[3].shape[0]
    for place, rank in enumerate(found):
        count, counted = (points, "ranks_bev") if place < 3 else (intervals, "interval_starts")
        if rank.shape[0] != count:
            raise checks.fail(_NAMES[place], f"as many as {counted}, {count}", rank.shape[0])
    return found


def _checked_rank(name: str, rank: Any, owner: str, device: torch.device) -> torch.Tensor:
    planning.require(name, rank)
    checks.layout(**{name: rank})
    checks.rank(name, rank, "Ni" if name.startswith("interval") else "Np")
    checks.dtype(name, rank, planning.INDEX_DTYPES)
    checks.same_device(name, rank, owner, device)
    checks.plain_memory(name, rank)
    # what does not fit into 32 bits becomes the nearest that does, which no rank may be either
    return rank if rank.dtype is torch.int32 else rank.clamp(-MOST - 1, MOST).int()


def _reference_keys(ranks: tuple[torch.Tensor, ...], weights: int, rows: int, cells: int) -> torch.Tensor:
    """Keys in plain PyTorch; faulty ranks raise, since indexing with them would crash."""
    if torch.compiler.is_compiling() or ranks[0].is_meta:
        return _reference.interval_keys(*ranks[2:])
    word = _faults(ranks, weights, rows, cells)
    if word:
        raise library.fault(word, ranks, weights, rows, cells)
    return _reference.interval_keys(*ranks[2:])


def _faults(ranks: tuple[torch.Tensor, ...], weights: int, rows: int, cells: int) -> int:
    """The fault word of ranks, by plain tensor operations; see ``library.fault``."""
    rank_depth, rank_feat, rank_bev, starts, lengths = (rank.long() for rank in ranks)
    points = rank_bev.shape[0]
    if not bool(((starts >= 0) & (lengths >= 0) & (starts + lengths <= points)).all()):
        return library.INTERVAL
    owner = torch.repeat_interleave(torch.arange(starts.shape[0], device=starts.device), lengths)
    covered = starts[owner] + torch.arange(owner.shape[0], device=starts.device) - (torch.cumsum(lengths, 0) - lengths)[owner]
    if torch.unique(covered).shape[0] != covered.shape[0]:
        return library.OVERLAP
    found = rank_bev[covered]
    word = library.BEV_RANK * bool(((found < 0) | (found >= cells) | (found != rank_bev[starts[owner]])).any())
    for bit, rank, count in ((library.FEAT_RANK, rank_feat, rows), (library.DEPTH_RANK, rank_depth, weights)):
        word |= bit * bool(((rank[covered] < 0) | (rank[covered] >= count)).any())
    return word
