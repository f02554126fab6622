# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of voxel_pool_depth as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.refusals import NARROW, STORAGE, refused, wrong_device, wrong_shape, wrong_type, wrong_value

Places = Callable[[np.random.Generator, tuple[int, ...], np.ndarray], np.ndarray]


def around(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """(b, x, y, z): the batch item is the point's own; the rest inside or up to one cell beyond on either side."""
    found = random.integers(-1, limits + 1, (*extent, 4))
    found[..., 0] = np.arange(extent[0]).reshape(-1, 1, 1, 1, 1, 1)
    return found


def one_cell(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    return np.broadcast_to(limits - 1, (*extent, 4))


def elsewhere(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """The batch column names any item, and items outside as well."""
    return random.integers(-1, limits + 1, (*extent, 4))


def outside(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    """Every point has exactly one coordinate outside, just below or just above."""
    found = random.integers(0, limits, (*extent, 4))
    axis = random.integers(0, 4, extent)
    edge = np.where(random.random(extent) < 0.5, -1, limits[axis])
    np.put_along_axis(found, axis[..., None], edge[..., None], -1)
    return found


def borders(random: np.random.Generator, extent: tuple[int, ...], limits: np.ndarray) -> np.ndarray:
    edges = np.stack([-1 + 0 * limits, 0 * limits, limits - 1, limits, 0 * limits - 2**31, 0 * limits + 2**31 - 1], 0)
    chosen = random.choice(6, (*extent, 4), p=np.array([0.04, 0.45, 0.39, 0.04, 0.04, 0.04]))
    return edges[chosen, np.arange(4)]


def pooling(
    name: str, views: tuple[int, int, int] = (2, 1, 2), bins: int = 3, map_size: tuple[int, int] = (2, 3), channels: int = 4,
    grid: tuple[int, int, int] = (3, 4, 2), place: Places = around, masked: float = 0.8, kind: type = np.int64,
) -> Arguments:  # fmt: skip
    """Arguments of a call; ``views`` is (B, sweeps, cameras), ``grid`` (X, Y, Z), ``masked`` the share of points that count."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    batch, sweeps, cameras = views
    extent = (*views, bins, *map_size)
    coords = place(random, extent, np.array([batch, *grid])).astype(kind)
    return {
        "img_feats": random.standard_normal((batch, sweeps * cameras, channels, *map_size)),
        "img_depth": random.random((batch * sweeps * cameras, bins, *map_size)),
        "voxel_coords": np.ascontiguousarray(coords), "mask": random.random(extent) < masked,
        "B": batch, "X": grid[0], "Y": grid[1], "Z": grid[2],
    }  # fmt: skip


def _case(
    name: str, *, keywords: dict[str, Any] | None = None, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (),
    **sizes: Any,
) -> Case:  # fmt: skip
    return Case(name, lambda: pooling(name, **sizes), keywords or {}, warp_sensitive=warp_sensitive, skip_on=skip_on)


def _width(channels: int, **more: Any) -> Case:
    return _case(f"c{channels}", views=(1, 1, 2), bins=4, channels=channels, grid=(3, 2, 2), warp_sensitive=True, **more)


SUMMED = {"reduce_cams": True}
CASES = (
    _case("tiny"),
    _case("tiny_int32", views=(1, 2, 3), kind=np.int32),
    *[_width(channels) for channels in (1, 3, 5, 8, 16, 32, 33, 64)],
    *[_width(channels, skip_on=("emu",)) for channels in (80, 128, 257)],
    _case("sweeps", views=(2, 3, 2), bins=2, map_size=(2, 2), channels=8, warp_sensitive=True),
    _case("sweeps_summed", views=(2, 3, 2), bins=2, map_size=(2, 2), channels=8, keywords=SUMMED, warp_sensitive=True),
    _case("summed", views=(1, 1, 3), channels=6, keywords=SUMMED, warp_sensitive=True),
    _case("summed_c32", views=(2, 1, 2), channels=32, keywords=SUMMED, warp_sensitive=True),
    # The sizes of a public check of the model: five channels, three cameras, a grid of 7 x 7 x 2.
    _case("three_cameras", views=(1, 1, 3), bins=3, map_size=(4, 6), channels=5, grid=(7, 7, 2)),
    _case("one_cell", views=(1, 1, 3), bins=3, map_size=(4, 6), channels=5, grid=(7, 7, 2), place=one_cell, masked=1.0,
          warp_sensitive=True),
    _case("one_cell_summed", views=(1, 1, 3), bins=3, map_size=(4, 6), channels=5, grid=(7, 7, 2), place=one_cell, masked=1.0,
          keywords=SUMMED, warp_sensitive=True),
    _case("other_items", views=(3, 1, 2), channels=4, place=elsewhere),
    _case("borders", views=(2, 1, 2), bins=4, map_size=(3, 3), channels=4, place=borders, masked=1.0, warp_sensitive=True),
    _case("all_outside", place=outside, masked=1.0),
    _case("nothing_masked", masked=0.0),
    _case("one_pixel", views=(1, 1, 2), bins=7, map_size=(1, 1), channels=8),
    _case("one_bin", views=(1, 2, 1), bins=1, map_size=(3, 3), channels=8),
    _case("flat_grid", views=(1, 1, 2), channels=8, grid=(9, 1, 1)),
    _case("many_cells", views=(1, 1, 2), bins=30, map_size=(6, 9), channels=4, grid=(100, 100, 16), skip_on=("emu",)),
    _case("wide", views=(1, 1, 4), bins=20, map_size=(6, 9), channels=64, grid=(20, 24, 4), skip_on=("emu",)),
    _case("wide_summed", views=(2, 1, 3), bins=20, map_size=(6, 9), channels=24, grid=(20, 24, 4), keywords=SUMMED,
          skip_on=("emu",)),
)  # fmt: skip


def _cut(**sizes: int) -> Callable[[Arguments], Arguments]:
    """Axes cut to a size in every argument that has them; cameras and sweeps of a single sweep or camera."""
    where = {
        "D": {"img_depth": 1, "voxel_coords": 3, "mask": 3}, "C": {"img_feats": 2},
        "H": {"img_feats": 3, "img_depth": 2, "voxel_coords": 4, "mask": 4},
        "W": {"img_feats": 4, "img_depth": 3, "voxel_coords": 5, "mask": 5},
        "batch": {"img_feats": 0, "img_depth": 0, "voxel_coords": 0, "mask": 0},
        "cameras": {"img_feats": 1, "img_depth": 0, "voxel_coords": 2, "mask": 2},
        "sweeps": {"img_feats": 1, "img_depth": 0, "voxel_coords": 1, "mask": 1},
    }  # fmt: skip

    def shrink(arguments: Arguments) -> Arguments:
        for axis, size in sizes.items():
            for name, dimension in where[axis].items():
                arguments[name] = np.take(arguments[name], range(size), axis=dimension)
            if axis == "batch":
                arguments["B"] = size
        return arguments

    return shrink


EMPTY = (
    *[EmptyCase(axis, _cut(**{axis: 0})) for axis in ("batch", "sweeps", "cameras", "D", "H", "W", "C")],
    EmptyCase("mask", lambda a: a | {"mask": np.zeros_like(a["mask"])}),
    *[EmptyCase(axis, lambda a, axis=axis: a | {axis: 0}) for axis in ("X", "Y", "Z")],
)

FEATS, DEPTH, COORDS = "img_feats", "img_depth", "voxel_coords"
ERRORS = (
    wrong_shape("feats_rank", FEATS, lambda t: t[0], "[B, S*N, C, H, W]", "[2, 4, 2, 3]"),
    wrong_shape("feats_images", FEATS, lambda t: t[:, :1], "[B*S*N, D, H, W] = [2, 3, 2, 3]", "[4, 3, 2, 3]", "img_depth"),
    wrong_value("feats_batch", FEATS, lambda t: t[:1], "B = 2 batch items", "1"),
    wrong_shape(
        "feats_height", FEATS, lambda t: t[:, :, :, :1], "[B*S*N, D, H, W] = [4, 3, 1, 3]", "[4, 3, 2, 3]", "img_depth"
    ),
    wrong_shape("depth_rank", DEPTH, lambda t: t[0], "[B*S*N, D, H, W]", "[3, 2, 3]"),
    wrong_shape("depth_images", DEPTH, lambda t: t[:3], "[B*S*N, D, H, W] = [4, 3, 2, 3]", "[3, 3, 2, 3]"),
    wrong_shape(
        "depth_bins",
        DEPTH,
        lambda t: t[:, :2],
        "[B, S, N, D, H, W, 4] = [2, 1, 2, 2, 2, 3, 4]",
        "[2, 1, 2, 3, 2, 3, 4]",
        "voxel_coords",
    ),
    wrong_shape("depth_width", DEPTH, lambda t: t[..., :1], "[B*S*N, D, H, W] = [4, 3, 2, 3]", "[4, 3, 2, 1]"),
    wrong_shape("coords_rank", COORDS, lambda t: t[0], "[B, S, N, D, H, W, 4]", "[1, 2, 3, 2, 3, 4]"),
    refused("coords_columns", COORDS, lambda t: t[..., :3]),
    wrong_shape("mask_rank", "mask", lambda t: t[0], "[B, S, N, D, H, W] = [2, 1, 2, 3, 2, 3]", "[1, 2, 3, 2, 3]"),
    wrong_shape("mask_bins", "mask", lambda t: t[:, :, :, :2], "[B, S, N, D, H, W] = [2, 1, 2, 3, 2, 3]", "[2, 1, 2, 2, 2, 3]"),
    wrong_type("feats_int", FEATS, lambda t: t.int(), STORAGE, "int32"),
    wrong_type("depth_int", DEPTH, lambda t: t.int(), NARROW, "int32"),
    wrong_type("depth_complex", DEPTH, lambda t: t.to(torch.complex64), NARROW, "complex64"),
    wrong_type("coords_float", COORDS, lambda t: t.float(), "dtype int32, int64", "float32"),
    wrong_type("coords_none", COORDS, lambda t: None, "a torch.Tensor, or a plan in its place", "None"),
    wrong_type("mask_float", "mask", lambda t: t.float(), "dtype bool", "float32"),
    wrong_type("mask_list", "mask", lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_type("feats_none", FEATS, lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_device("coords_meta", COORDS, "img_feats"),
    wrong_device("mask_meta", "mask", "img_feats"),
    wrong_device("depth_meta", DEPTH, "img_feats"),
    *[refused(f"{axis}_negative", axis, lambda n: -n) for axis in ("B", "X", "Y", "Z")],
    *[refused(f"{axis}_float", axis, lambda n: n + 0.5, TypeError) for axis in ("B", "Z")],
)
