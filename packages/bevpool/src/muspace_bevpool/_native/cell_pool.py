# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for the operators that sum rows per cell: keys, plans, sums and their gradients."""

from __future__ import annotations

from typing import Any, Final

import torch
from muspace_core import environment
from muspace_core.checks import readable
from muspace_core.device import launch_context

from muspace_bevpool._native import LIBRARY, nothing, workspace
from muspace_bevpool._plan import KeyRule, PointMap

LAUNCHES: Final = ("auto", "linear", "2d", "packed")
#: How weights that several points share are added up: ``ACCUMULATE`` in order on the cpu, by atomics on a device.
UNIQUE, ACCUMULATE, PER_POINT = 0, 1, 2
RANKS: Final = ("ranks_depth", "ranks_feat", "ranks_bev", "interval_starts", "interval_lengths")

LAUNCH = environment.Variable("MUSPACE_VOXEL_POOL_DEPTH_LAUNCH", "forward launch of voxel_pool_depth on devices")
DEPTH_WARP = environment.Variable("MUSPACE_VOXEL_POOL_DEPTH_DEPTH_WARP", "0: one thread a point for the depth gradient")


def _bits(tensor: torch.Tensor) -> int:
    return tensor.element_size() * 8


def _pixels(tensor: torch.Tensor) -> int:
    """Pixels of a channels-first tensor ``[images, C, pixels]``, 0 for rows ``[rows, C]``."""
    return tensor.shape[2] if tensor.dim() == 3 else 0


def _extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(rows, channels, pixels) of either layout."""
    if tensor.dim() == 3:
        return tensor.shape[0] * tensor.shape[2], tensor.shape[1], tensor.shape[2]
    return tensor.shape[0], tensor.shape[1], 0


def keys(argument: str, coords: torch.Tensor, mask: torch.Tensor | None, rule: KeyRule, backend: str) -> torch.Tensor:
    """int32 cell of every point of ``coords [..., columns]``, the caller's ``argument``, -1 where it has none."""
    flat = readable(argument, coords).view(-1, len(rule.bounds))
    found = torch.empty(flat.shape[0], dtype=torch.int32, device=coords.device)
    held = nothing(coords.device, torch.bool) if mask is None else readable("mask", mask).view(-1)
    LIBRARY.function(backend, "cell_keys")(found, flat, held, *rule.numbers(), launch_context(backend, coords.device))
    return found


def interval_keys(
    ranks: tuple[torch.Tensor, ...], weights: int, rows: int, cells: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, row keys and the fault word of (ranks_depth, ranks_feat, ranks_bev, interval_starts, interval_lengths)."""
    count, device = ranks[0].shape[0], ranks[0].device
    found, row_keys = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    faults = torch.empty(1, dtype=torch.int32, device=device)
    LIBRARY.function(backend, "interval_keys")(
        found,
        row_keys,
        faults,
        *(readable(name, rank) for name, rank in zip(RANKS, ranks, strict=True)),
        weights,
        rows,
        cells,
        launch_context(backend, device),
    )
    return found, row_keys, faults


def plan(keys: torch.Tensor, cells: int, points: PointMap, backend: str) -> torch.Tensor:
    """The points of every cell, in order; opaque int32 words."""
    count, weighted = keys.shape[0], int(points.weighted)
    words = LIBRARY.function(backend, "cell_plan_words")(count, cells, weighted)
    entries = torch.empty(words, dtype=torch.int32, device=keys.device)
    LIBRARY.function(backend, "cell_plan")(
        entries,
        keys,
        nothing(keys.device) if points.rows is None else points.rows,
        nothing(keys.device) if points.weights is None else points.weights,
        points.depth_bins,
        points.pixels,
        cells,
        workspace(backend, "cell_plan", keys.device, count, cells, weighted),
        launch_context(backend, keys.device),
    )
    return entries


def pool(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    entries: torch.Tensor,
    points: int,
    output: torch.Tensor,
    backend: str,
    launch: int = 0,
) -> torch.Tensor:
    """Writes the sums into ``output`` and returns it; ``rows`` and ``output`` in either layout."""
    size = (*_extent(rows), output.shape[0] * (output.shape[2] if output.dim() == 3 else 1), _pixels(output), points)
    scratch = workspace(backend, "cell_pool", rows.device, *size, int(weights is not None), _bits(rows), _bits(output))
    held = nothing(rows.device, rows.dtype) if weights is None else weights
    context = launch_context(backend, rows.device)
    LIBRARY.function(backend, "cell_pool")(output, rows, held, entries, points, launch, scratch, context)
    return output


def gather(grad_output: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """Gradient of unweighted rows: each point's cell of ``grad_output``, zero for points without one."""
    cells, channels, pixels = _extent(grad_output)
    grad_rows = torch.empty((keys.shape[0], channels), dtype=dtype, device=keys.device)
    numbers = (cells, channels, pixels, keys.shape[0], _bits(grad_output))
    scratch = workspace(backend, "cell_pool_gather", keys.device, *numbers)
    LIBRARY.function(backend, "cell_pool_gather")(grad_rows, grad_output, keys, scratch, launch_context(backend, keys.device))
    return grad_rows


def backward(
    grad_output: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    row_entries: torch.Tensor,
    points: PointMap,
    route: int,
    backend: str,
    depth_warp: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``rows`` (its dtype and layout) and, fp32 or fp64, of ``weights`` or (``PER_POINT``) of the points."""
    accumulator = torch.float64 if rows.dtype is torch.float64 else torch.float32
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    count = keys.shape[0] if route == PER_POINT else weights.shape[0]
    grad_weights = torch.empty(count, dtype=accumulator, device=rows.device)
    cells, _, cell_pixels = _extent(grad_output)
    numbers = (*_extent(rows), cells, cell_pixels, keys.shape[0], _bits(rows), _bits(grad_output))
    LIBRARY.function(backend, "cell_pool_backward")(
        grad_rows,
        grad_weights,
        grad_output,
        rows,
        weights,
        keys,
        row_entries,
        points.depth_bins,
        points.pixels,
        route,
        int(depth_warp),
        workspace(backend, "cell_pool_backward", rows.device, *numbers),
        launch_context(backend, rows.device),
    )
    return grad_rows, grad_weights


def launch_code() -> int:
    """``MUSPACE_VOXEL_POOL_DEPTH_LAUNCH`` as the library's code; ValueError for another word."""
    word = LAUNCH.value() or "auto"
    if word not in LAUNCHES:
        raise ValueError(f"{LAUNCH.name}: expected one of {', '.join(LAUNCHES)}; got {word!r}")
    return LAUNCHES.index(word)


def depth_warp() -> bool:
    """``MUSPACE_VOXEL_POOL_DEPTH_DEPTH_WARP``; ValueError for anything but 0 and 1."""
    word = DEPTH_WARP.value() or "1"
    if word not in ("0", "1"):
        raise ValueError(f"{DEPTH_WARP.name}: expected 0 or 1, got {word!r}")
    return word == "1"


def route(_module: Any, backend: str, planned: bool, backward_route: str, _deterministic: bool, gradient: bool) -> str:
    """Name of the route of a call: ``<forward>`` or, if a gradient was recorded, ``<forward>+<backward>``."""
    forward = "cached_plan" if planned else "sort"
    if backward_route == "per_point" and backend == "cpu":
        backward_route = "accumulate"
    return f"{forward}+{backward_route}" if gradient else forward
