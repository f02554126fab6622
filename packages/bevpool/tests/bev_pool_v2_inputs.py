# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of bev_pool_v2 as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase, ErrorCase
from muspace_core.testing.refusals import NARROW, STORAGE, number_at, wrong_device, wrong_shape, wrong_type, wrong_value

RANKS = ("ranks_depth", "ranks_feat", "ranks_bev")
INTERVALS = ("interval_starts", "interval_lengths")
INDICES = (*RANKS, *INTERVALS)


def intervals(ranks_bev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the runs of equal numbers."""
    if not len(ranks_bev):
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    starts = np.flatnonzero(np.r_[True, ranks_bev[1:] != ranks_bev[:-1]])
    return starts.astype(np.int32), np.diff(np.r_[starts, len(ranks_bev)]).astype(np.int32)


def indexed(ranks_depth: np.ndarray, ranks_feat: np.ndarray, ranks_bev: np.ndarray) -> Arguments:
    """The five index arrays of points given in any order: sorted by cell, cut into one interval a cell."""
    order = np.argsort(ranks_bev, kind="stable")
    made = {k: np.asarray(r)[order].astype(np.int32) for k, r in zip(RANKS, (ranks_depth, ranks_feat, ranks_bev), strict=True)}
    return made | dict(zip(INTERVALS, intervals(made["ranks_bev"]), strict=True))


def frustum(images: int, bins: int, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Depth and feature rank of every frustum point."""
    number = np.arange(images * bins * pixels)
    return number, number // (bins * pixels) * pixels + number % pixels


Cells = Callable[[np.random.Generator, int, int], np.ndarray]


def anywhere(random: np.random.Generator, points: int, cells: int) -> np.ndarray:
    """A tenth of the points outside."""
    return np.where(random.random(points) < 0.1, -1, random.integers(0, max(cells, 1), points))


def one_cell(random: np.random.Generator, points: int, cells: int) -> np.ndarray:
    return np.full(points, cells - 1)


def apart(random: np.random.Generator, points: int, cells: int) -> np.ndarray:
    found = np.full(points, -1)
    number = min(points, cells)
    found[random.permutation(points)[:number]] = random.permutation(cells)[:number]
    return found


def dense(random: np.random.Generator, points: int, cells: int) -> np.ndarray:
    """Cells of very different lengths."""
    return np.minimum((random.random(points) ** 3 * cells).astype(np.int64), cells - 1)


def nowhere(random: np.random.Generator, points: int, cells: int) -> np.ndarray:
    return np.full(points, -1)


def pooling(
    name: str, views: tuple[int, int] = (2, 2), bins: int = 3, map_size: tuple[int, int] = (2, 3), channels: int = 4,
    grid: tuple[int, int, int] = (1, 3, 4), place: Cells = anywhere,
) -> Arguments:  # fmt: skip
    """Arguments of a call; ``views`` is (B, N), ``map_size`` (fH, fW), ``grid`` (Dz, Dy, Dx); points stay in their item."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    (batch, cameras), (height, width), cells = views, map_size, int(np.prod(grid))
    ranks_depth, ranks_feat = frustum(batch * cameras, bins, height * width)
    per_item = cameras * bins * height * width
    item = np.arange(batch * per_item) // max(per_item, 1)
    cell = np.concatenate([place(random, per_item, cells) for _ in range(batch)] or [np.zeros(0, np.int64)])
    kept = np.flatnonzero(cell >= 0)
    made = indexed(ranks_depth[kept], ranks_feat[kept], (item * cells + cell)[kept])
    return {
        "depth": random.random((batch, cameras, bins, height, width)),
        "feat": random.standard_normal((batch, cameras, height, width, channels)),
        **{k: made[k] for k in RANKS},
        "bev_feat_shape": (batch, *grid, channels),
        **{k: made[k] for k in INTERVALS},
    }


def repeated(name: str = "repeated") -> Arguments:
    """Depth numbers used twice (same and other cells), and cells that several intervals hold, in no order."""
    arguments = pooling(name, views=(1, 2), bins=4, map_size=(3, 5), channels=8, grid=(1, 4, 5))
    random = np.random.default_rng(5)
    again = random.integers(0, len(arguments["ranks_bev"]), 40)
    rd, rf, rb = (np.concatenate([arguments[k], arguments[k][again]]) for k in RANKS)
    rb[-20:] = random.integers(0, 20, 20)
    arguments |= indexed(rd, rf, rb)
    # Two halves of every second interval, and then all of them shuffled.
    pieces = []
    for start, length in zip(arguments["interval_starts"].tolist(), arguments["interval_lengths"].tolist(), strict=True):
        cut = length // 2 if start % 2 else 0
        pieces += [(start, cut), (start + cut, length - cut)] if cut else [(start, length)]
    shuffled = np.array(pieces, np.int32)[random.permutation(len(pieces))]
    return arguments | {"interval_starts": shuffled[:, 0].copy(), "interval_lengths": shuffled[:, 1].copy()}


def partly(name: str = "partly") -> Arguments:
    """Every third interval left out: its points count for nothing, in the gradients neither."""
    arguments = pooling(name, channels=8)
    chosen = np.arange(len(arguments["interval_starts"])) % 3 != 1
    return arguments | {k: arguments[k][chosen] for k in INTERVALS}


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    return Case(name, lambda: pooling(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on)


def _width(channels: int, **more: Any) -> Case:
    return _case(
        f"c{channels}", views=(1, 2), bins=4, map_size=(2, 3), channels=channels, grid=(1, 3, 4), warp_sensitive=True, **more
    )


CASES = (
    _case("tiny"),
    *[_width(channels) for channels in (1, 2, 3, 5, 8, 16, 30, 32, 33, 64, 80, 128)],
    _width(136, skip_on=("emu",)),
    _width(257, skip_on=("emu",)),
    _case("heights", views=(2, 1), bins=5, map_size=(3, 2), channels=6, grid=(3, 2, 5), warp_sensitive=True),
    _case("row_of_cells", views=(1, 3), bins=4, map_size=(1, 5), channels=8, grid=(1, 1, 20)),
    _case("column_of_cells", views=(2, 1), bins=2, map_size=(5, 1), channels=8, grid=(1, 11, 1)),
    _case("one_bin", views=(1, 2), bins=1, map_size=(3, 3), channels=8),
    _case("one_cell", views=(1, 2), bins=10, map_size=(3, 5), channels=8, grid=(1, 5, 5), place=one_cell, warp_sensitive=True),
    _case("apart", views=(1, 2), bins=3, map_size=(4, 5), channels=8, grid=(1, 12, 13), place=apart, warp_sensitive=True),
    _case("nothing_kept", place=nowhere),
    _case("dense", views=(1, 2), bins=9, map_size=(3, 4), channels=8, grid=(1, 4, 4), place=dense, warp_sensitive=True),
    Case("repeated", repeated, warp_sensitive=True),
    Case("partly", partly, warp_sensitive=True),
    _case("wide", views=(2, 3), bins=20, map_size=(8, 11), channels=64, grid=(1, 40, 30), place=dense, skip_on=("emu",)),
    _case("odd", views=(1, 6), bins=13, map_size=(5, 7), channels=20, grid=(4, 9, 11), skip_on=("emu",)),
)


def _no_points(arguments: Arguments) -> Arguments:
    return arguments | {k: arguments[k][:0] for k in INDICES}


def _resized(arguments: Arguments, **sizes: int) -> Arguments:
    """Axes of depth and feat cut to a size; no points are left."""
    where = {"B": (0, 0), "N": (1, 1), "D": (2, None), "fH": (3, 2), "fW": (4, 3), "C": (None, 4)}
    changed = _no_points(arguments)
    for axis, size in sizes.items():
        for name, dimension in zip(("depth", "feat"), where[axis], strict=True):
            if dimension is not None:
                changed[name] = np.take(changed[name], range(size), axis=dimension)
    return changed | {"bev_feat_shape": (changed["depth"].shape[0], *changed["bev_feat_shape"][1:4], changed["feat"].shape[4])}


def _no_intervals(arguments: Arguments) -> Arguments:
    """Points that no interval covers."""
    return arguments | {name: arguments[name][:0] for name in INTERVALS}


EMPTY = (
    EmptyCase("points", _no_points),
    EmptyCase("intervals", _no_intervals),
    *[EmptyCase(axis, lambda a, axis=axis: _resized(a, **{axis: 0})) for axis in ("B", "N", "D", "fH", "fW", "C")],
    EmptyCase("bins_with_points", lambda a: _no_intervals(a) | {"depth": a["depth"][:, :, :0]}),
    EmptyCase("rows_with_points", lambda a: _no_intervals(a) | {"depth": a["depth"][:, :, :, :0], "feat": a["feat"][:, :, :0]}),
    EmptyCase("cells", lambda a: _no_points(a) | {"bev_feat_shape": (2, 1, 0, 4, 4)}),
    EmptyCase(
        "channels_with_points",
        lambda a: a | {"feat": a["feat"][..., :0], "bev_feat_shape": (*a["bev_feat_shape"][:4], 0)},
    ),
)

ERRORS = (
    wrong_shape("depth_rank", "depth", lambda t: t[0], "[B, N, D, fH, fW]", "[2, 3, 2, 3]"),
    wrong_shape("feat_rank", "feat", lambda t: t[0], "[B, N, fH, fW, C]", "[2, 2, 3, 4]"),
    wrong_shape("feat_cameras", "feat", lambda t: t[:, :1], "[B, N, D, fH, fW] = [2, 1, 3, 2, 3]", "[2, 2, 3, 2, 3]", "depth"),
    wrong_shape("feat_batch", "feat", lambda t: t[:1], "[B, N, D, fH, fW] = [1, 2, 3, 2, 3]", "[2, 2, 3, 2, 3]", "depth"),
    wrong_shape(
        "feat_height", "feat", lambda t: t[:, :, :1], "[B, N, D, fH, fW] = [2, 2, 3, 1, 3]", "[2, 2, 3, 2, 3]", "depth"
    ),
    wrong_shape(
        "feat_width", "feat", lambda t: t[:, :, :, :1], "[B, N, D, fH, fW] = [2, 2, 3, 2, 1]", "[2, 2, 3, 2, 3]", "depth"
    ),
    wrong_type("depth_int", "depth", lambda t: t.int(), NARROW, "int32"),
    wrong_type("depth_complex", "depth", lambda t: t.to(torch.complex64), NARROW, "complex64"),
    wrong_type("feat_int", "feat", lambda t: t.int(), STORAGE, "int32"),
    wrong_type("feat_float8", "feat", lambda t: t.to(torch.float8_e4m3fn), STORAGE, "float8_e4m3fn"),
    wrong_type("feat_none", "feat", lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_type("depth_array", "depth", lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    *[wrong_type(f"{name}_float", name, lambda t: t.float(), "dtype int32, int64", "float32") for name in INDICES],
    *[wrong_type(f"{name}_none", name, lambda t: None, "a torch.Tensor, or a plan in its place", "None") for name in INDICES],
    *[wrong_type(f"{name}_list", name, lambda t: t.tolist(), "a torch.Tensor", "list") for name in RANKS],
    *[wrong_shape(f"{name}_rank", name, lambda t: t[None], "[Np]", "[1, 66]") for name in RANKS],
    *[wrong_shape(f"{name}_rank", name, lambda t: t[None], "[Ni]", "[1, 22]") for name in INTERVALS],
    *[wrong_device(f"{name}_meta", name, "feat") for name in ("depth", *INDICES)],
    wrong_value("feat_meta", "feat", lambda t: t.to("meta"), "device meta (that of feat)", "{device}", "depth"),
    wrong_value("ranks_feat_short", "ranks_feat", lambda t: t[:-1], "as many as ranks_bev, 66", "65"),
    wrong_value("ranks_bev_short", "ranks_bev", lambda t: t[:-1], "as many as ranks_bev, 65", "66", "ranks_depth"),
    wrong_value("interval_lengths_short", "interval_lengths", lambda t: t[:-1], "as many as interval_starts, 22", "21"),
    wrong_value("shape_of_four", "bev_feat_shape", lambda t: t[1:], "5 integers", "[1, 3, 4, 4]"),
    wrong_value("shape_of_six", "bev_feat_shape", lambda t: (1, *t), "5 integers", "[1, 2, 1, 3, 4, 4]"),
    wrong_value(
        "shape_channels",
        "bev_feat_shape",
        lambda t: (*t[:4], t[4] + 1),
        "(B, Dz, Dy, Dx, C) with the C = 4 of feat",
        "[2, 1, 3, 4, 5]",
    ),
    wrong_value("shape_negative", "bev_feat_shape", lambda t: (t[0], -1, *t[2:]), "sizes of at least 0", "[2, -1, 3, 4, 4]"),
    wrong_type("shape_float", "bev_feat_shape", lambda t: (t[0], 1.5, *t[2:]), "5 integers", "[2, 1.5, 3, 4, 4]"),
    wrong_type("shape_number", "bev_feat_shape", lambda t: 4, "5 integers", "4"),
)


HUGE = 2**31 - 1


def _rank(name: str, argument: str, at: int, number: int) -> ErrorCase:
    limit = {"ranks_depth": 72, "ranks_feat": 24}[argument]
    expected = f"an index from 0 to {limit - 1}"
    return wrong_value(name, argument, number_at(at, number), expected, str(number), f"{argument}[{at}]")


def _cell(name: str, at: int, number: int) -> ErrorCase:
    expected = "a cell from 0 to 23"
    return wrong_value(name, "ranks_bev", number_at(at, number), expected, str(number), f"ranks_bev[{at}]")


def _interval(name: str, argument: str, at: int, number: int, start: int, length: int) -> ErrorCase:
    expected, got = "an interval inside the 66 points", f"start {start}, length {length}"
    return wrong_value(name, argument, number_at(at, number), expected, got, f"interval_starts[{at}]")


#: Contents of the smallest call that are refused on the cpu backend always, elsewhere under MUSPACE_CHECK=1.
CONTENTS = (
    _rank("depth_rank_negative", "ranks_depth", 3, -1),
    _rank("depth_rank_at_the_end", "ranks_depth", 3, 72),
    _rank("depth_rank_huge", "ranks_depth", 0, HUGE),
    _rank("feat_rank_negative", "ranks_feat", 65, -1),
    _rank("feat_rank_at_the_end", "ranks_feat", 3, 24),
    _cell("bev_rank_negative", 0, -1),
    _cell("bev_rank_at_the_end", 65, 24),
    _cell("bev_rank_smallest", 0, -HUGE - 1),
    wrong_value(
        "bev_rank_of_another_cell", "ranks_bev", number_at(64, 5), "22 like the first of its interval", "5", "ranks_bev[64]"
    ),
    _interval("start_negative", "interval_starts", 0, -1, -1, 6),
    _interval("start_at_the_end", "interval_starts", 21, 1000, 1000, 1),
    _interval("start_huge", "interval_starts", 21, HUGE, HUGE, 1),
    _interval("length_negative", "interval_lengths", 2, -1, 7, -1),
    _interval("length_beyond_the_end", "interval_lengths", 21, 100, 65, 100),
    _interval("length_huge", "interval_lengths", 21, HUGE, 65, HUGE),
)
