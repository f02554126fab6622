# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of voxel_pooling_train as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.refusals import STORAGE, refused, wrong_device, wrong_shape, wrong_type, wrong_value

Places = Callable[[np.random.Generator, tuple[int, ...], np.ndarray], np.ndarray]


def around(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """Inside, and up to one cell beyond on either side of every axis."""
    return random.integers(-1, limits + 1, (*extent, 3))


def one_cell(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    return np.broadcast_to(limits - 1, (*extent, 3))


def outside(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """Every point has exactly one coordinate outside, just below or just above."""
    found = random.integers(0, limits, (*extent, 3))
    axis = random.integers(0, 3, extent)
    edge = np.where(random.random(extent) < 0.5, -1, limits[axis])
    np.put_along_axis(found, axis[..., None], edge[..., None], -1)
    return found


def borders(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """The first and last cell of every axis, one step beyond each, and the ends of the 32-bit range."""
    edges = np.stack([-1 + 0 * limits, 0 * limits, limits - 1, limits, 0 * limits - 2**31, 0 * limits + 2**31 - 1], 0)
    chosen = random.choice(6, (*extent, 3), p=np.array([0.05, 0.43, 0.37, 0.05, 0.05, 0.05]))
    return edges[chosen, np.arange(3)]


def ego(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """Dense in the middle: cells of very different lengths."""
    return np.floor(random.normal(0.5, 0.15, (*extent, 3)) * limits).astype(np.int64)


def pooling(
    name: str, extent: tuple[int, ...] = (2, 12), channels: int = 4, voxel_num: tuple[int, int, int] = (4, 3, 2),
    place: Places = around,
) -> Arguments:  # fmt: skip
    """Arguments of a call; ``extent`` is the batch and any further axes of the points."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    geom = np.ascontiguousarray(place(random, extent, np.array(voxel_num)).astype(np.int32))
    return {"geom_xyz": geom, "input_features": random.standard_normal((*extent, channels)), "voxel_num": voxel_num}


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    return Case(name, lambda: pooling(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on)


def _width(channels: int, **more: Any) -> Case:
    return _case(f"c{channels}", extent=(1, 60), channels=channels, voxel_num=(4, 3, 1), warp_sensitive=True, **more)


CASES = (
    _case("tiny"),
    *[_width(channels) for channels in (1, 3, 8, 16, 32, 33, 80)],
    _width(128, skip_on=("emu",)),
    _width(257, skip_on=("emu",)),
    _case("cameras", extent=(2, 2, 3, 2, 3), channels=8, voxel_num=(5, 3, 2), warp_sensitive=True),
    _case("no_middle_axis", extent=(5,), channels=4, voxel_num=(2, 2, 1)),
    _case("row_of_cells", extent=(1, 40), channels=8, voxel_num=(11, 1, 1)),
    _case("column_of_cells", extent=(2, 40), channels=8, voxel_num=(1, 11, 1)),
    _case("borders", extent=(2, 120), channels=4, voxel_num=(5, 3, 4), place=borders, warp_sensitive=True),
    _case("one_cell", extent=(1, 300), channels=8, voxel_num=(6, 5, 1), place=one_cell, warp_sensitive=True),
    _case("all_outside", extent=(2, 30), channels=4, place=outside),
    _case("heights", extent=(1, 80), channels=4, voxel_num=(3, 3, 10)),
    _case("ego", extent=(2, 6, 20, 8, 11), channels=80, voxel_num=(48, 40, 1), place=ego, skip_on=("emu",)),
)

TENSORS = ("geom_xyz", "input_features")
EMPTY = (
    EmptyCase("batch", lambda a: a | {k: a[k][:0] for k in TENSORS}),
    EmptyCase("points", lambda a: a | {k: a[k][:, :0] for k in TENSORS}),
    EmptyCase("channels", lambda a: a | {"input_features": a["input_features"][..., :0]}),
    *[
        EmptyCase(axis, lambda a, i=i: a | {"voxel_num": tuple(0 if i == j else n for j, n in enumerate(a["voxel_num"]))})
        for i, axis in enumerate(("X", "Y", "Z"))
    ],
)

ERRORS = (
    refused("geom_columns", "geom_xyz", lambda t: t[..., :2]),
    refused("geom_flat", "geom_xyz", lambda t: t[0, 0]),
    wrong_value(
        "features_points",
        "input_features",
        lambda t: t[:, :5],
        "5 points for each of 2 batch items, those of input_features",
        "shape [2, 12, 3]",
        "geom_xyz",
    ),
    wrong_value(
        "features_batch",
        "input_features",
        lambda t: t[:1],
        "12 points for each of 1 batch items, those of input_features",
        "shape [2, 12, 3]",
        "geom_xyz",
    ),
    wrong_shape("features_flat", "input_features", lambda t: t[0, 0], "[B, ..., C]", "[4]"),
    wrong_type("geom_float", "geom_xyz", lambda t: t.float(), "dtype int32, int64", "float32"),
    wrong_type("geom_int16", "geom_xyz", lambda t: t.short(), "dtype int32, int64", "int16"),
    wrong_type("geom_list", "geom_xyz", lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_type("geom_none", "geom_xyz", lambda t: None, "a torch.Tensor, or a plan in its place", "None"),
    wrong_type("features_int", "input_features", lambda t: t.int(), STORAGE, "int32"),
    wrong_type("features_complex", "input_features", lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("features_none", "input_features", lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_device("geom_meta", "geom_xyz", "input_features"),
    wrong_value("voxel_num_two", "voxel_num", lambda n: n[:2], "3 integers", "[4, 3]"),
    wrong_value("voxel_num_four", "voxel_num", lambda n: (*n, 1), "3 integers", "[4, 3, 2, 1]"),
    wrong_value("voxel_num_negative", "voxel_num", lambda n: (n[0], -1, n[2]), "sizes of at least 0", "[4, -1, 2]"),
    wrong_type("voxel_num_float", "voxel_num", lambda n: (n[0], 2.5, n[2]), "3 integers", "[4, 2.5, 2]"),
    wrong_type("voxel_num_none", "voxel_num", lambda n: None, "3 integers", "None"),
)
