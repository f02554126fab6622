# SPDX-License-Identifier: Apache-2.0
"""The level table: sizes and first rows of the pyramid levels inside ``value``, from lists or from tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from muspace_core import checks
from muspace_core.register import takes_direct_path
from muspace_core.scratch import absent

Levels = torch.Tensor | Sequence[Sequence[int]]
_INDEX_DTYPES = (torch.int64, torch.int32)
_INT64 = 1 << 63


#: Sides up to this are exact in fp32, which the window test of the kernels needs.
MAX_SIDE = 1 << 24


# Serves training and inference: a tensor made under inference_mode could never be saved for a backward.
@functools.lru_cache(maxsize=256)
def _cached(numbers: tuple[tuple[int, ...], ...] | tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)


def _from_rows(rows: tuple, value: torch.Tensor) -> torch.Tensor:
    if takes_direct_path((value,)):  # a fake or traced tensor must not end in the cache
        return _cached(rows, value.device)
    return torch.tensor(rows, dtype=torch.int64, device=value.device)


def index_tensor(argument: str, given: torch.Tensor, owner: str, device: torch.device) -> torch.Tensor:
    """``given`` as int64, on ``device``, that of the argument ``owner``."""
    if given.device != device:
        checks.same_device(argument, given, owner, device)
    if given.layout is not torch.strided:
        checks.layout(**{argument: given})
    if given.dtype is torch.int64:
        return given
    checks.dtype(argument, given, _INDEX_DTYPES)
    checks.plain_memory(argument, given)
    return given.to(torch.int64)


def as_tensors(
    value: torch.Tensor, spatial_shapes: Levels, level_start_index: torch.Tensor | Sequence[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ``[L, 2]`` and ``[L]`` (``[0]``: derive) on the device of ``value``; lists are checked against ``value`` here."""
    if isinstance(spatial_shapes, torch.Tensor):
        shapes = index_tensor("spatial_shapes", spatial_shapes, "value", value.device)
    elif isinstance(spatial_shapes, Sequence):
        rows = checks.integers("spatial_shapes", spatial_shapes, 2)
        if any(len(row) != 2 for row in rows):
            raise checks.fail("spatial_shapes", "rows (h, w)", spatial_shapes)
        check_contents(rows, None, value.shape[1])
        shapes = _from_rows(rows, value).view(-1, 2)
    else:
        raise TypeError(f"spatial_shapes: expected a tensor or a list of (h, w), got {type(spatial_shapes).__name__}")
    size = shapes.shape
    if len(size) != 2 or size[1] != 2:
        raise checks.fail("spatial_shapes", "shape [L, 2]", list(size))
    if level_start_index is None:
        starts = absent(value, torch.int64)  # makes the kernels derive it
    elif isinstance(level_start_index, torch.Tensor):
        starts = index_tensor("level_start_index", level_start_index, "value", value.device)
        if starts.shape != (size[0],):
            checks.shape("level_start_index", starts, "L", (size[0],))
    elif isinstance(level_start_index, Sequence):
        numbers = checks.integers("level_start_index", level_start_index)
        if len(numbers) != size[0]:
            raise checks.fail("level_start_index", f"shape [L] = [{size[0]}]", [len(numbers)])
        if not isinstance(spatial_shapes, torch.Tensor):
            check_contents(rows, numbers, value.shape[1])
        if any(not -_INT64 <= number < _INT64 for number in numbers):
            raise checks.fail("level_start_index", "64-bit integers", level_start_index)
        starts = _from_rows(numbers, value)
    else:
        raise TypeError(f"level_start_index: expected a tensor, a list or None, got {type(level_start_index).__name__}")
    return shapes, starts


def check_contents(shapes: Sequence[Sequence[int]], starts: Sequence[int] | None, length: int) -> None:
    """Raises ValueError unless the levels are positive, lie inside the ``length`` rows of ``value`` and add up to them."""
    total = 0
    for level, (height, width) in enumerate(shapes):
        if height < 1 or width < 1:
            raise checks.fail(f"spatial_shapes[{level}]", "positive height and width", f"({height}, {width})")
        if height > MAX_SIDE or width > MAX_SIDE:
            raise checks.fail(f"spatial_shapes[{level}]", f"height and width up to {MAX_SIDE}", f"({height}, {width})")
        if starts is not None and not 0 <= starts[level] <= length - height * width:
            raise checks.fail(
                f"level_start_index[{level}]",
                f"a level of {height} x {width} rows inside the {length} rows of value",
                f"start {starts[level]}",
            )
        total += height * width
    if total != length:
        raise checks.fail("value", f"S = sum of h * w over spatial_shapes = {total}", f"S = {length}")


def check_tensors(shapes: torch.Tensor, starts: torch.Tensor, length: int) -> None:
    """``check_contents`` of tensors; on a GPU one concatenation and one copy to the host, hence one sync."""
    if shapes.is_cpu:
        try:
            rows, firsts = shapes.tolist(), starts.tolist()
        except RuntimeError:
            checks.memory("spatial_shapes", shapes)
            checks.memory("level_start_index", starts)
            raise
        check_contents(rows, firsts or None, length)
        return
    checks.memory("spatial_shapes", shapes)
    checks.memory("level_start_index", starts)
    count = shapes.shape[0]
    numbers = torch.cat((shapes.reshape(-1), starts)).tolist()
    rows = [(numbers[2 * level], numbers[2 * level + 1]) for level in range(count)]
    check_contents(rows, numbers[2 * count :] or None, length)
