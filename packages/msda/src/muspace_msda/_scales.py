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
    """int64 ``[cams, scales, 2]`` and ``[cams, scales]`` on the device of ``mc_ms_feat``."""
    device = mc_ms_feat.device
    shapes, starts = (
        index_tensor(argument, _tensor(argument, given, depth, device), "mc_ms_feat", device)
        for argument, given, depth in (("spatial_shape", spatial_shape, 3), ("scale_start_index", scale_start_index, 2))
    )
    if shapes.dim() != 3 or shapes.shape[2] != 2:
        raise checks.fail("spatial_shape", "shape [cams, scales, 2]", list(shapes.shape))
    if starts.shape != shapes.shape[:2]:
        checks.shape("scale_start_index", starts, "cams scales", shapes.shape[:2])
    return shapes, starts


def _tensor(argument: str, given: torch.Tensor | Sequence[Any], depth: int, device: torch.device) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    rows = checks.integers(argument, given, depth)
    try:
        return torch.tensor(rows, dtype=torch.int64, device=device)
    except (ValueError, OverflowError, RuntimeError):
        raise checks.fail(argument, "as many entries for every camera, 64-bit integers", rows) from None


def check_tensors(shapes: torch.Tensor, starts: torch.Tensor, length: int) -> None:
    """ValueError unless every map has positive sides and lies inside the ``length`` rows of ``mc_ms_feat``; syncs on a GPU."""
    checks.memory("spatial_shape", shapes)
    checks.memory("scale_start_index", starts)
    numbers = torch.cat((shapes.reshape(-1), starts.reshape(-1))).tolist()
    maps = shapes.shape[0] * shapes.shape[1]
    for place in range(maps):
        height, width, start = numbers[2 * place], numbers[2 * place + 1], numbers[2 * maps + place]
        where = f"[{place // shapes.shape[1]}, {place % shapes.shape[1]}]"
        if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
            raise checks.fail(f"spatial_shape{where}", f"height and width from 1 to {MAX_SIDE}", f"({height}, {width})")
        if not 0 <= start <= length - height * width:
            expected = f"a map of {height} x {width} rows inside the {length} rows of mc_ms_feat"
            raise checks.fail(f"scale_start_index{where}", expected, f"start {start}")
