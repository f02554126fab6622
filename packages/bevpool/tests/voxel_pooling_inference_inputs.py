# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of voxel_pooling_inference as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.refusals import NARROW, STORAGE, refused, wrong_device, wrong_shape, wrong_type, wrong_value

train = load_sibling(__file__, "voxel_pooling_train_inputs")


def pooling(
    name: str, views: tuple[int, int] = (2, 2), bins: int = 3, map_size: tuple[int, int] = (2, 3), channels: int = 4,
    voxel_num: tuple[int, int, int] = (4, 3, 2), place: Callable[..., np.ndarray] = train.around,
) -> Arguments:  # fmt: skip
    """Arguments of a call; ``views`` is (B, N), ``map_size`` (H, W)."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    geom = place(random, (*views, bins, *map_size), np.array(voxel_num)).astype(np.int32)
    images = views[0] * views[1]
    return {
        "geom_xyz": np.ascontiguousarray(geom), "depth_features": random.random((images, bins, *map_size)),
        "context_features": random.standard_normal((images, channels, *map_size)), "voxel_num": voxel_num,
    }  # fmt: skip


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    return Case(name, lambda: pooling(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on)


def _width(channels: int, **more: Any) -> Case:
    return _case(f"c{channels}", views=(1, 2), bins=4, channels=channels, voxel_num=(4, 3, 1), warp_sensitive=True, **more)


CASES = (
    _case("tiny"),
    *[_width(channels) for channels in (1, 3, 8, 16, 32, 33, 80)],
    _width(128, skip_on=("emu",)),
    _width(257, skip_on=("emu",)),
    _case("odd_map", views=(2, 1), bins=5, map_size=(3, 7), channels=6, voxel_num=(5, 4, 3), warp_sensitive=True),
    _case("one_pixel", views=(1, 3), bins=6, map_size=(1, 1), channels=8),
    _case("one_bin", views=(2, 1), bins=1, map_size=(4, 4), channels=8),
    _case("row_of_cells", views=(1, 2), bins=4, channels=8, voxel_num=(11, 1, 1)),
    _case("column_of_cells", views=(2, 1), bins=4, channels=8, voxel_num=(1, 11, 1)),
    _case("borders", views=(2, 2), bins=5, map_size=(3, 4), voxel_num=(5, 3, 4), place=train.borders, warp_sensitive=True),
    _case("one_cell", views=(1, 2), bins=10, map_size=(3, 4), channels=8, place=train.one_cell, warp_sensitive=True),
    _case("all_outside", place=train.outside),
    _case(
        "ego", views=(2, 6), bins=20, map_size=(8, 11), channels=80, voxel_num=(48, 40, 1), place=train.ego, skip_on=("emu",)
    ),
)


def _cut(**sizes: int) -> Callable[[Arguments], Arguments]:
    """Axes cut to a size in every argument that has them."""
    where = {"D": {"geom_xyz": 2, "depth_features": 1}, "C": {"context_features": 1}}
    where |= {"H": {"geom_xyz": 3, "depth_features": 2, "context_features": 2}}
    where |= {"W": {"geom_xyz": 4, "depth_features": 3, "context_features": 3}}
    where |= {axis: {"geom_xyz": i, "depth_features": 0, "context_features": 0} for i, axis in enumerate("BN")}

    def shrink(arguments: Arguments) -> Arguments:
        for axis, size in sizes.items():
            for name, dimension in where[axis].items():
                arguments[name] = np.take(arguments[name], range(size), axis=dimension)
        return arguments

    return shrink


EMPTY = (
    *[EmptyCase(axis, _cut(**{axis: 0})) for axis in ("B", "N", "D", "H", "W", "C")],
    *[
        EmptyCase(axis, lambda a, i=i: a | {"voxel_num": tuple(0 if i == j else n for j, n in enumerate(a["voxel_num"]))})
        for i, axis in enumerate(("X", "Y", "Z"))
    ],
)

DEPTH, CONTEXT = "depth_features", "context_features"
ERRORS = (
    refused("geom_columns", "geom_xyz", lambda t: t[..., :2]),
    wrong_shape("geom_rank", "geom_xyz", lambda t: t[0], "[B, N, D, H, W, 3]", "[2, 3, 2, 3, 3]"),
    wrong_shape("depth_images", DEPTH, lambda t: t[:3], "[B*N, D, H, W] = [4, 3, 2, 3]", "[3, 3, 2, 3]"),
    wrong_shape(
        "depth_bins", DEPTH, lambda t: t[:, :2], "[B, N, D, H, W, 3] = [2, 2, 2, 2, 3, 3]", "[2, 2, 3, 2, 3, 3]", "geom_xyz"
    ),
    wrong_shape("depth_rank", DEPTH, lambda t: t[0], "[B*N, D, H, W]", "[3, 2, 3]"),
    wrong_shape("context_images", CONTEXT, lambda t: t[:3], "[B*N, D, H, W] = [3, 3, 2, 3]", "[4, 3, 2, 3]", "depth_features"),
    wrong_shape(
        "context_height", CONTEXT, lambda t: t[:, :, :1], "[B*N, D, H, W] = [4, 3, 1, 3]", "[4, 3, 2, 3]", "depth_features"
    ),
    wrong_shape(
        "context_width", CONTEXT, lambda t: t[..., :1], "[B*N, D, H, W] = [4, 3, 2, 1]", "[4, 3, 2, 3]", "depth_features"
    ),
    wrong_shape("context_rank", CONTEXT, lambda t: t[0], "[B*N, C, H, W]", "[4, 2, 3]"),
    wrong_type("geom_float", "geom_xyz", lambda t: t.float(), "dtype int32, int64", "float32"),
    wrong_type("geom_none", "geom_xyz", lambda t: None, "a torch.Tensor, or a plan in its place", "None"),
    wrong_type("depth_int", DEPTH, lambda t: t.int(), NARROW, "int32"),
    wrong_type("context_int", CONTEXT, lambda t: t.int(), STORAGE, "int32"),
    wrong_type("context_complex", CONTEXT, lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("context_none", CONTEXT, lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_device("geom_meta", "geom_xyz", "context_features"),
    wrong_device("depth_meta", DEPTH, "context_features"),
    wrong_value("voxel_num_two", "voxel_num", lambda n: n[:2], "3 integers", "[4, 3]"),
    wrong_value("voxel_num_negative", "voxel_num", lambda n: (n[0], -1, n[2]), "sizes of at least 0", "[4, -1, 2]"),
    wrong_type("voxel_num_float", "voxel_num", lambda n: (n[0], 2.5, n[2]), "3 integers", "[4, 2.5, 2]"),
)
