# SPDX-License-Identifier: Apache-2.0
"""bev_pool: checks in the caller's words."""

from __future__ import annotations

import torch
from muspace_core import checks

from muspace_bevpool import _autograd, _host, _reference
from muspace_bevpool._native.bev_pool import POINTS, rule
from muspace_bevpool._ops import planning
from muspace_bevpool._plan import PoolPlan, check_counts

_DISPATCHER = _autograd.DISPATCHERS["bev_pool"]
Size = int | torch.Tensor


def bev_pool(
    feats: torch.Tensor,
    coords: torch.Tensor | None,
    B: Size,
    D: Size,
    H: Size,
    W: Size,
    *,
    plan: PoolPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Sum of the feature rows that fall into each cell of a bird's-eye-view grid (BEVFusion's ``bev_pool``).

    .. math:: out[b,:,d,h,w] = \sum_{i:\ coords_i = (h,w,d,b)} feats[i,:]

    Rows with any coordinate out of range are dropped; the order of the rows is free. Sums are fp32 for 16-bit and fp32
    features, fp64 for fp64, and are narrowed once.

    Args:
        feats: ``[N, C]``; float32, bfloat16, float16, or float64 (cpu). Decides the dtype of the result.
        coords: ``[N, 4]`` int64 or int32, columns ``(h, w, d, b)``; may be ``None`` with a plan.
        B, D, H, W: sizes of the grid, ints or 0-dim tensors. A size in device memory is read once per tensor, which waits for
            the device; BEVFusion passes x, y, z as h, w, d.
        plan: from ``bev_pool_plan`` with the same coordinates and sizes; saves the sort of every call.
        backend: ``auto``, ``native``, ``cpu``, ``cuda``, ``hip``, ``musa``, ``emu`` or ``reference``.

    Returns:
        ``[B, C, D, H, W]``, contiguous. Differentiable once in ``feats``.

    Raises:
        TypeError: not a tensor, a dtype that is not accepted, sizes that are no integers.
        ValueError: wrong rank, size or device; a plan of another operator, size, device or backend.
        BackendUnavailable: a named backend cannot run the call, or strict mode forbids the fallback.

    Determinism: bit-reproducible forward and backward; the rows of a cell are added in ascending order.

    Example:
        >>> import torch
        >>> from muspace_bevpool import bev_pool
        >>> coords = torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [9, 9, 9, 9]])
        >>> bev_pool(torch.ones(3, 2), coords, 1, 1, 2, 3)[0, 0, 0]
        tensor([[0., 2., 0.],
                [0., 0., 0.]])
    """
    checks.tensors(feats=feats)
    checks.rank("feats", feats, "N C")
    checks.storage("feats", feats)
    planning.check_plan(plan)
    sizes = _sizes(B, D, H, W)
    points, channels = feats.shape
    if plan is None:
        coords = _check_coords(coords, points, feats.device)
        check_counts("feats", points, "B", rule(*sizes).cells)
        place = coords
    else:
        plan.check("bev_pool", (points, *sizes), feats.device)
        place = plan.row_entries  # empty, in the place of the coordinates

    def native(selected: str, deterministic: bool) -> torch.Tensor:
        keys, entries = planning.held(plan, selected, feats)
        return _autograd.bev_pool(feats, place, keys, entries, *sizes, selected, deterministic)

    def reference() -> torch.Tensor:
        key = _reference.keys(place, None, rule(*sizes)) if plan is None else plan.plain_keys()
        total = _reference.pool(feats, None, key, rule(*sizes).cells, POINTS)
        batch, depth, height, width = sizes
        cells = total.view(batch, depth * height * width, channels).transpose(1, 2)
        return cells.to(feats.dtype).contiguous().view(batch, channels, depth, height, width)

    return _DISPATCHER.run(backend, feats, native, reference, (), (plan is not None, "gather"))


def bev_pool_plan(coords: torch.Tensor, B: Size, D: Size, H: Size, W: Size, *, backend: str = "auto") -> PoolPlan:
    """The plan of ``bev_pool`` for fixed coordinates: the sort that a call would otherwise repeat.

    Args:
        coords: ``[N, 4]`` int64 or int32, columns ``(h, w, d, b)``; rows out of range are dropped.
        B, D, H, W: sizes of the grid, ints or 0-dim tensors.
        backend: that of the calls it is for.

    Raises:
        TypeError, ValueError: as ``bev_pool``.

    Example:
        >>> import torch
        >>> from muspace_bevpool import bev_pool, bev_pool_plan
        >>> plan = bev_pool_plan(torch.tensor([[0, 1, 0, 0], [1, 2, 0, 0]]), 1, 1, 2, 3)
        >>> bev_pool(torch.ones(2, 4), None, 1, 1, 2, 3, plan=plan).sum()
        tensor(8.)
    """
    checks.tensors(coords=coords)
    _check_coords(coords, None, coords.device)
    sizes = _sizes(B, D, H, W)
    located, named = rule(*sizes), ("coords", "B")
    return planning.make_plan("bev_pool", (coords.shape[0], *sizes), coords, None, located, POINTS, named, backend)


def _sizes(B: Size, D: Size, H: Size, W: Size) -> tuple[int, int, int, int]:
    return _host.size("B", B), _host.size("D", D), _host.size("H", H), _host.size("W", W)


def _check_coords(coords: torch.Tensor | None, points: int | None, device: torch.device) -> torch.Tensor:
    coords = planning.check_coordinates("coords", coords, "N 4", "feats", device)
    if points is not None and coords.shape[0] != points:
        checks.shape("coords", coords, "N 4", (points, 4))
    return coords
