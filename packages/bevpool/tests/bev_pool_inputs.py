# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of bev_pool as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.refusals import STORAGE, refused, wrong_device, wrong_shape, wrong_type

Coordinates = Callable[[np.random.Generator, int, np.ndarray], np.ndarray]


def around(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    """Inside, and up to one cell beyond on either side of every axis."""
    return random.integers(-1, limits + 1, (points, 4))


def inside(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    return random.integers(0, limits, (points, 4))


def one_cell(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    return np.tile(limits - 1, (points, 1))


def apart(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    """At most one point a cell."""
    h, w, d, b = np.unravel_index(random.permutation(int(limits.prod()))[:points], limits)
    return np.stack([h, w, d, b], 1)


def outside(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    """Every row has exactly one coordinate outside, just below or just above."""
    found = random.integers(0, limits, (points, 4))
    axis = random.integers(0, 4, points)
    found[np.arange(points), axis] = np.where(random.random(points) < 0.5, -1, limits[axis])
    return found


def borders(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    """The first and last cell of every axis, one step beyond each, and the ends of the 32-bit range."""
    edges = np.stack([-1 + 0 * limits, 0 * limits, limits - 1, limits, 0 * limits - 2**31, 0 * limits + 2**31 - 1], 0)
    likely = np.array([0.04, 0.44, 0.4, 0.04, 0.04, 0.04])
    return np.take_along_axis(edges, random.choice(6, (points, 4), p=likely), 0)


def ego(random: np.random.Generator, points: int, limits: np.ndarray) -> np.ndarray:
    """Dense in the middle, as a camera rig sees the ground: cells of very different lengths."""
    spread = random.normal(0.5, 0.12, (points, 2)) * limits[:2]
    rest = random.integers(0, limits[2:], (points, 2))
    return np.concatenate([np.floor(spread).astype(np.int64), rest], 1)


def pooling(
    name: str, points: int = 40, channels: int = 4, grid: tuple[int, int, int, int] = (2, 1, 3, 4),
    place: Coordinates = around, kind: type = np.int32,
) -> Arguments:  # fmt: skip
    """Arguments of a call; ``grid`` is (B, D, H, W)."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    B, D, H, W = grid
    coords = place(random, points, np.array([H, W, D, B])).astype(kind)
    return {"feats": random.standard_normal((points, channels)), "coords": coords, "B": B, "D": D, "H": H, "W": W}


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    return Case(name, lambda: pooling(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on)


def _width(channels: int, **more: Any) -> Case:
    return _case(f"c{channels}", points=60, channels=channels, grid=(1, 1, 4, 3), warp_sensitive=True, **more)


CASES = (
    _case("tiny", points=12),
    _case("tiny_int64", points=20, kind=np.int64),
    *[_width(channels) for channels in (1, 2, 3, 5, 8, 16, 30, 32, 33, 64, 80, 128)],
    _width(136, skip_on=("emu",)),
    _width(257, skip_on=("emu",)),
    _case("deep", points=90, channels=6, grid=(2, 3, 4, 5), warp_sensitive=True),
    _case("flat", points=50, channels=8, grid=(1, 1, 1, 9)),
    _case("tall", points=50, channels=8, grid=(3, 1, 9, 1)),
    _case("borders", points=200, channels=4, grid=(2, 2, 3, 5), place=borders, warp_sensitive=True),
    _case("one_point", points=1, channels=8, place=inside),
    _case("one_cell", points=300, channels=8, grid=(1, 1, 5, 5), place=one_cell, warp_sensitive=True),
    _case("apart", points=60, channels=8, grid=(1, 1, 12, 12), place=apart, warp_sensitive=True),
    _case("all_outside", points=30, channels=4, place=outside),
    _case("few_points_many_cells", points=9, channels=4, grid=(2, 2, 30, 20)),
    _case("odd_plane", points=150, channels=12, grid=(2, 1, 7, 5), warp_sensitive=True),
    _case("long_cells", points=40000, channels=16, grid=(1, 1, 3, 1), place=inside, skip_on=("emu",)),
    _case("many_cells", points=20000, channels=4, grid=(1, 8, 200, 200), place=inside, skip_on=("emu",)),
    _case("ego", points=30000, channels=80, grid=(1, 1, 64, 48), place=ego, skip_on=("emu",)),
    _case("ego_batch", points=9000, channels=24, grid=(3, 2, 20, 31), place=ego, skip_on=("emu",)),
)


def _no_points(arguments: Arguments) -> Arguments:
    return arguments | {k: arguments[k][:0] for k in ("feats", "coords")}


EMPTY = (
    EmptyCase("points", _no_points),
    EmptyCase("channels", lambda a: a | {"feats": a["feats"][:, :0]}),
    EmptyCase("points_and_channels", lambda a: _no_points(a) | {"feats": a["feats"][:0, :0]}),
    *[EmptyCase(axis, lambda a, axis=axis: a | {axis: 0}) for axis in ("B", "D", "H", "W")],
)

ERRORS = (
    wrong_shape("feats_rank", "feats", lambda t: t[0], "[N, C]", "[4]"),
    wrong_shape("feats_rank_3", "feats", lambda t: t[None], "[N, C]", "[1, 12, 4]"),
    refused("coords_rank", "coords", lambda t: t[0]),
    refused("coords_columns", "coords", lambda t: t[:, :3]),
    wrong_shape("coords_rows", "coords", lambda t: t[:5], "[N, 4] = [12, 4]", "[5, 4]"),
    wrong_shape("coords_one_row", "coords", lambda t: t[:1], "[N, 4] = [12, 4]", "[1, 4]"),
    wrong_type("feats_int", "feats", lambda t: t.int(), STORAGE, "int32"),
    wrong_type("feats_bool", "feats", lambda t: t > 0, STORAGE, "bool"),
    wrong_type("feats_complex", "feats", lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("feats_float8", "feats", lambda t: t.to(torch.float8_e4m3fn), STORAGE, "float8_e4m3fn"),
    wrong_type("coords_float", "coords", lambda t: t.float(), "dtype int32, int64", "float32"),
    wrong_type("coords_int16", "coords", lambda t: t.short(), "dtype int32, int64", "int16"),
    wrong_type("coords_bool", "coords", lambda t: t > 0, "dtype int32, int64", "bool"),
    wrong_type("feats_array", "feats", lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    wrong_type("feats_none", "feats", lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_type("coords_list", "coords", lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_type("coords_none", "coords", lambda t: None, "a torch.Tensor, or a plan in its place", "None"),
    wrong_device("coords_meta", "coords", "feats"),
    *[refused(f"{axis}_negative", axis, lambda n: -n) for axis in ("B", "D", "H", "W")],
    *[refused(f"{axis}_float", axis, lambda n: n + 0.5, TypeError) for axis in ("B", "W")],
    *[refused(f"{axis}_none", axis, lambda n: None, TypeError) for axis in ("D", "H")],
)
