# SPDX-License-Identifier: Apache-2.0
"""The scale table of deformable_aggregation: sizes and first rows of every camera's maps inside ``mc_ms_feat``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from muspace_core import checks

from muspace_msda._levels import MAX_SIDE, index_tensor


def as_tensors(
    mc_ms_feat: torch.Tensor, spatial_shape: torch.Tensor | Sequence[Any], scale_start_index: torch.Tensor | Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[cams, scales, 2]`` and ``[cams, scales]`` on the device of ``mc_ms_feat``; two lists are checked here."""
    device = mc_ms_feat.device
    shapes, rows = _table("spatial_shape", spatial_shape, 3, device)
    starts, firsts = _table("scale_start_index", scale_start_index, 2, device)
    sizes = shapes.shape
    if len(sizes) != 3 or sizes[2] != 2:
        raise checks.fail("spatial_shape", "shape [cams, scales, 2]", list(sizes))
    if starts.shape != sizes[:2]:
        checks.shape("scale_start_index", starts, "cams scales", sizes[:2])
    if rows is not None and firsts is not None:
        maps = [tuple(level) for camera in rows for level in camera]
        _check(maps, [first for camera in firsts for first in camera], sizes[1], mc_ms_feat.shape[1])
    return shapes, starts


def _table(
    argument: str, given: torch.Tensor | Sequence[Any], depth: int, device: torch.device
) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """The int64 table on ``device``, and its rows if it was a list."""
    if isinstance(given, torch.Tensor):
        return index_tensor(argument, given, "mc_ms_feat", device), None
    rows = checks.integers(argument, given, depth)
    try:
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device), rows
    except (ValueError, OverflowError, RuntimeError):
        raise checks.fail(argument, "as many entries for every camera, 64-bit integers", rows) from None


def check_tensors(shapes: torch.Tensor, starts: torch.Tensor, length: int) -> None:
    """ValueError unless every map has positive sides and lies inside the ``length`` rows of ``mc_ms_feat``; syncs on a GPU."""
    checks.memory("spatial_shape", shapes)
    checks.memory("scale_start_index", starts)
    numbers = torch.cat((shapes.reshape(-1), starts.reshape(-1))).tolist()
    count = shapes.shape[0] * shapes.shape[1]
    maps = list(zip(numbers[: 2 * count : 2], numbers[1 : 2 * count : 2], strict=True))
    _check(maps, numbers[2 * count :], shapes.shape[1], length)


def _check(maps: Sequence[tuple[int, int]], starts: Sequence[int], scales: int, length: int) -> None:
    for place, ((height, width), start) in enumerate(zip(maps, starts, strict=True)):
        where = f"[{place // scales}, {place % scales}]"
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
            raise checks.fail(f"spatial_shape{where}", f"height and width from 1 to {MAX_SIDE}", f"({height}, {width})")
        if not 0 <= start <= length - height * width:
            expected = f"a map of {height} x {width} rows inside the {length} rows of mc_ms_feat"
            raise checks.fail(f"scale_start_index{where}", expected, f"start {start}")
