# SPDX-License-Identifier: Apache-2.0
"""Calls of the library for the operators that sum rows per cell: keys, plans, sums and their gradients."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from muspace_core import environment
from muspace_core.checks import readable, sum_dtype
from muspace_core.device import launch_context
from muspace_core.scratch import nothing, scratch, size_of, workspace

from muspace_bevpool._native import LIBRARY
from muspace_bevpool._plan import KeyRule, PointMap

LAUNCHES: Final = ("auto", "linear", "2d", "packed")
#: How weights that several points share are added up: ``ACCUMULATE`` in order on the cpu, by atomics on a device.
UNIQUE, ACCUMULATE, PER_POINT = 0, 1, 2
RANKS: Final = ("ranks_depth", "ranks_feat", "ranks_bev", "interval_starts", "interval_lengths")

LAUNCH = environment.Variable("MUSPACE_VOXEL_POOL_DEPTH_LAUNCH", "forward launch of voxel_pool_depth on devices")
DEPTH_WARP = environment.Variable("MUSPACE_VOXEL_POOL_DEPTH_DEPTH_WARP", "0: one thread a point for the depth gradient")


def _bits(dtype: torch.dtype) -> int:
    return dtype.itemsize * 8


def _extent(shape: torch.Size, channel_axis: int) -> tuple[int, int, int]:
    """(rows, channels, pixels); pixels are 0 where the channels come last."""
    pixels = shape[channel_axis + 1 :].numel()
    return shape[:channel_axis].numel() * pixels, shape[channel_axis], pixels if channel_axis + 1 < len(shape) else 0


def keys(argument: str, coords: torch.Tensor, mask: torch.Tensor | None, rule: KeyRule, backend: str) -> torch.Tensor:
    """int32 cell of every point of ``coords [..., columns]``, the caller's ``argument``, -1 where it has none."""
    device = coords.device
    found = torch.empty(coords.shape[:-1].numel(), dtype=torch.int32, device=device)
    held = nothing(device, torch.bool) if mask is None else readable("mask", mask)
    columns = readable(argument, coords)
    LIBRARY.function(backend, "cell_keys")(found, columns, held, *rule.numbers(), launch_context(backend, device))
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
    words = size_of(LIBRARY.function(backend, "cell_plan_words"), count, cells, weighted)
    entries = torch.empty(words, dtype=torch.int32, device=keys.device)
    LIBRARY.function(backend, "cell_plan")(
        entries,
        keys,
        nothing(keys.device) if points.rows is None else points.rows,
        nothing(keys.device) if points.weights is None else points.weights,
        points.depth_bins,
        points.pixels,
        cells,
        workspace(LIBRARY, backend, "cell_plan", keys.device, count, cells, weighted),
        launch_context(backend, keys.device),
    )
    return entries


def pool(
    output: torch.Tensor,
    output_channel_axis: int,
    rows: torch.Tensor,
    rows_channel_axis: int,
    weights: torch.Tensor | None,
    entries: torch.Tensor,
    points: int,
    backend: str,
    launch: int = 0,
) -> torch.Tensor:
    """Writes the sums into ``output`` and returns it. All other axes of ``rows`` and ``output`` count rows and cells."""
    device = rows.device
    size = _pool_bytes(
        LIBRARY.function(backend, "cell_pool_workspace"),
        (rows.shape, rows_channel_axis, rows.dtype),
        (output.shape, output_channel_axis, output.dtype),
        points,
        weights is not None,
    )
    LIBRARY.function(backend, "cell_pool")(
        output,
        output_channel_axis,
        rows,
        rows_channel_axis,
        nothing(device, rows.dtype) if weights is None else weights,
        entries,
        points,
        launch,
        scratch(size, device),
        launch_context(backend, device),
    )
    return output


_Layout = tuple[torch.Size, int, torch.dtype]


@functools.lru_cache(maxsize=4096)
def _pool_bytes(workspace_of: Any, rows: _Layout, output: _Layout, points: int, weighted: bool) -> int:
    """Workspace of ``pool``, remembered by what a call has at hand."""
    cells, _, cell_pixels = _extent(*output[:2])
    return workspace_of(*_extent(*rows[:2]), cells, cell_pixels, points, int(weighted), _bits(rows[2]), _bits(output[2]))


def gather(
    grad_output: torch.Tensor, output_channel_axis: int, keys: torch.Tensor, rows: torch.Tensor, backend: str
) -> torch.Tensor:
    """Gradient of unweighted ``rows [..., C]``: each point's cell of ``grad_output``, zero for points without one."""
    device = keys.device
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=device)
    numbers = (*_extent(grad_output.shape, output_channel_axis), keys.shape[0], _bits(grad_output.dtype))
    LIBRARY.function(backend, "cell_pool_gather")(
        grad_rows,
        grad_output,
        output_channel_axis,
        keys,
        workspace(LIBRARY, backend, "cell_pool_gather", device, *numbers),
        launch_context(backend, device),
    )
    return grad_rows


def backward(
    grad_output: torch.Tensor,
    output_channel_axis: int,
    rows: torch.Tensor,
    rows_channel_axis: int,
    weights: torch.Tensor,
    keys: torch.Tensor,
    row_entries: torch.Tensor,
    points: PointMap,
    route: int,
    backend: str,
    depth_warp: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``rows`` and ``weights``; under ``PER_POINT`` the second is that of the points, fp32 or fp64."""
    device = rows.device
    grad_rows = torch.empty(rows.shape, dtype=rows.dtype, device=device)
    grad_weights = torch.empty(keys.shape if route == PER_POINT else weights.shape, dtype=sum_dtype(rows.dtype), device=device)
    cells, _, cell_pixels = _extent(grad_output.shape, output_channel_axis)
    numbers = (*_extent(rows.shape, rows_channel_axis), cells, cell_pixels, keys.shape[0])
    LIBRARY.function(backend, "cell_pool_backward")(
        grad_rows,
        grad_weights,
        grad_output,
        output_channel_axis,
        rows,
        rows_channel_axis,
        weights,
        keys,
        row_entries,
        points.depth_bins,
        points.pixels,
        route,
        int(depth_warp),
        workspace(LIBRARY, backend, "cell_pool_backward", device, *numbers, _bits(rows.dtype), _bits(grad_output.dtype)),
        launch_context(backend, device),
    )
    return grad_rows, grad_weights if route == PER_POINT else grad_weights.to(weights.dtype)


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
