# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of flash_bevpool_sca as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.refusals import NARROW, STORAGE, wrong_device, wrong_shape, wrong_type

_flash = load_sibling(__file__, "flash_bevpool_inputs")

IMAGE = _flash.IMAGE
#: Arguments behind the four tensors, by keyword alone.
BY_KEYWORD = ("spatial_shapes", "image_size", "roi_range", "grid_size", "z_anchors", "eps", "average")
Levels = Sequence[tuple[int, int]]


def attend(
    name: str,
    *,
    batch: int = 1,
    cameras: int = 2,
    levels: Levels | tuple[int, int] = ((5, 7), (3, 4)),
    channels: int = 8,
    heads: int = 2,
    points: int = 2,
    grid: tuple[int, ...] = (4, 3),
    roi: Sequence[float] = (-5.0, 5.0, -4.0, 4.0),
    z_anchors: Sequence[float] | None = (-0.6, 0.7),
    offsets: bool = True,
    weights: bool = True,
    average: str = "hit_cameras",
    reach: float = 1.5,
) -> Arguments:
    """Arguments of a call: ``points`` per anchor, offsets of ``reach`` pixels, weights that sum to one.

    ``levels`` as one pair makes features ``[B,N,H,W,C]``; ``offsets`` or ``weights`` false leaves them away.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    single = isinstance(levels[0], int)
    shapes: Levels = (levels,) if single else levels  # type: ignore[assignment]
    anchors = len(z_anchors) if z_anchors is not None else grid[2]
    extent = (batch, grid[0] * grid[1], heads, len(shapes), anchors * points)
    rows = sum(h * w for h, w in shapes)
    feats = random.standard_normal((batch, cameras, rows, channels))
    shares = np.exp(random.standard_normal(extent))
    return {
        "image_feats": feats.reshape(batch, cameras, *shapes[0], channels) if single else feats,
        # Neighbours overlap by half of their view, so that pillars are seen by none, one and several cameras.
        "projection_matrices": _flash.rig(random, batch, cameras, 0.8),
        "sampling_offsets": random.normal(0, reach, (*extent, 2)) if offsets else None,
        "attention_weights": shares / shares.sum((3, 4), keepdims=True) if weights else None,
        "spatial_shapes": None if single else tuple(tuple(s) for s in shapes),
        "image_size": IMAGE,
        "roi_range": tuple(roi),
        "grid_size": tuple(grid),
        "z_anchors": None if z_anchors is None else tuple(z_anchors),
        "eps": 1e-5,
        "average": average,
    }


#: A camera of one metre's depth everywhere whose pixel is the pillar's place: u = x, v = y.
FLAT = _flash.FLAT


def flat(
    features: np.ndarray, x: tuple[float, float, int], y: tuple[float, float, int], matrix: np.ndarray = FLAT, **changes: Any
) -> Arguments:
    """One image [H,W,C] of that size in pixels, seen by ``matrix``; one anchor at height 0, no offsets, no weights."""
    h, w = features.shape[:2]
    return {
        "image_feats": np.asarray(features, np.float64)[None, None],
        "projection_matrices": np.asarray(matrix, np.float32)[None, None],
        "sampling_offsets": None,
        "attention_weights": None,
        "spatial_shapes": None,
        "image_size": (h, w),
        "roi_range": (*x[:2], *y[:2]),
        "grid_size": (x[2], y[2]),
        "z_anchors": (0.0,),
        "eps": 2.0**-10,
        "average": "hit_cameras",
    } | changes


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), seed: int = 0, **sizes: Any) -> Case:
    budget = 1_000_000
    build = partial(attend, f"{name}{seed}", **sizes)
    return Case(name, build, warp_sensitive=warp_sensitive, skip_on=skip_on, emu_budget=budget)


PYRAMID: Levels = ((8, 12), (4, 6), (2, 3), (1, 2))
SIX = (-5.0, 5.0, -4.0, 4.0, -1.0, 1.5)

CASES = (
    _case("tiny", batch=2),
    _case("h8_d4", channels=32, heads=8, grid=(3, 2), warp_sensitive=True),
    _case("h1_d33", channels=33, heads=1, grid=(3, 3), warp_sensitive=True),
    _case("h4_d64", channels=256, heads=4, grid=(2, 2), points=1, warp_sensitive=True),
    _case("h2_d1", channels=2, heads=2),
    _case("h3_d5", channels=15, heads=3, batch=2, grid=(3, 2)),
    _case("h1_d130", channels=130, heads=1, grid=(2, 2), points=1),
    _case("one_map", levels=(5, 7)),
    _case("pyramid", levels=PYRAMID, z_anchors=(-1.0, -0.2, 0.6, 1.4), grid=(3, 3), channels=16, warp_sensitive=True),
    _case("three_points", points=3, z_anchors=(-1.0, 0.1, 1.2), grid=(3, 3)),
    _case("cell_centres", z_anchors=None, grid=(4, 3, 3), roi=SIX),
    _case("no_offsets", offsets=False, heads=1),
    _case("no_weights", weights=False),
    _case("neither", offsets=False, weights=False, heads=1, points=1),
    _case("not_averaged", cameras=3, average="none"),
    _case("four_cameras", batch=2, cameras=4, grid=(3, 5)),
    _case("far_offsets", reach=6.0),
    _case("nothing_seen", roi=(-5.0, 5.0, -4.0, 4.0), z_anchors=(60.0, 70.0)),
    _case("ring", seed=5, batch=2, cameras=6, levels=PYRAMID, channels=32, heads=4, grid=(8, 6), points=1, skip_on=("emu",)),
)


def _cut(axis: str) -> Callable[[Arguments], Arguments]:
    where: dict[str, dict[str, int]] = {
        "batch": {"image_feats": 0, "projection_matrices": 0, "sampling_offsets": 0, "attention_weights": 0},
        "cameras": {"image_feats": 1, "projection_matrices": 1},
        "channels": {"image_feats": 3},
        "pixels": {"image_feats": 2},
        "points": {"sampling_offsets": 4, "attention_weights": 4},
        "grid_x": {"sampling_offsets": 1, "attention_weights": 1},
        "grid_y": {"sampling_offsets": 1, "attention_weights": 1},
    }

    def shrink(arguments: Arguments) -> Arguments:
        for name, dimension in where[axis].items():
            arguments[name] = np.take(arguments[name], range(0), axis=dimension)
        if axis == "pixels":
            arguments["spatial_shapes"] = tuple((0, width) for _, width in arguments["spatial_shapes"])
        if axis.startswith("grid"):
            arguments["grid_size"] = tuple(0 if i == "xy".index(axis[-1]) else n for i, n in enumerate(arguments["grid_size"]))
        return arguments

    return shrink


EMPTY = tuple(EmptyCase(name, _cut(name)) for name in ("batch", "cameras", "channels", "pixels", "points", "grid_x", "grid_y"))


F, P, S, W = "image_feats", "projection_matrices", "sampling_offsets", "attention_weights"


_PROJECTION = "[B, N, 3 or 4, 4] with B = 2, N = 2"
_OFFSETS = "[B, Q, heads, L, PA, 2]"
_WEIGHTS = "[B, Q, heads, L, PA]"

#: Messages are exact; ``{device}`` is the device under test.
ERRORS = (
    wrong_shape("projection_rank", P, lambda t: t[0], _PROJECTION, "[2, 3, 4]"),
    wrong_shape("projection_cameras", P, lambda t: t[:, :1], _PROJECTION, "[2, 1, 3, 4]"),
    wrong_shape("offsets_rank", S, lambda t: t[0], _OFFSETS, "[12, 2, 2, 4, 2]"),
    wrong_shape("offsets_last", S, lambda t: t[..., :1], f"{_OFFSETS} = [2, 12, 2, 2, 4, 2]", "[2, 12, 2, 2, 4, 1]"),
    wrong_shape("offsets_queries", S, lambda t: t[:, :9], f"{_OFFSETS} = [2, 12, 2, 2, 4, 2]", "[2, 9, 2, 2, 4, 2]"),
    wrong_shape("offsets_levels", S, lambda t: t[:, :, :, :1], f"{_OFFSETS} = [2, 12, 2, 2, 4, 2]", "[2, 12, 2, 1, 4, 2]"),
    wrong_shape("weights_rank", W, lambda t: t[0], _WEIGHTS, "[12, 2, 2, 4]"),
    wrong_shape("weights_points", W, lambda t: t[..., :2], f"{_WEIGHTS} = [2, 12, 2, 2, 4]", "[2, 12, 2, 2, 2]"),
    wrong_type("feats_int", F, lambda t: t.int(), STORAGE, "int32"),
    wrong_type("offsets_int", S, lambda t: t.long(), NARROW, "int64"),
    wrong_type("offsets_double", S, lambda t: t.double(), NARROW, "float64"),
    wrong_type("weights_double", W, lambda t: t.double(), NARROW, "float64"),
    wrong_type("feats_array", F, lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    wrong_type("offsets_list", S, lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_device("offsets_meta", S, F),
    wrong_device("weights_meta", W, F),
    wrong_device("projection_meta", P, F),
)

#: Host values that are refused: argument, value, the class of the error.
VALUES: dict[str, tuple[str, Any, type[Exception] | tuple[type[Exception], ...]]] = {
    "image_size of one number": ("image_size", (64,), ValueError),
    "image_size zero": ("image_size", (64, 0), ValueError),
    "roi_range of three numbers": ("roi_range", (-5.0, 5.0, -4.0), ValueError),
    "roi_range infinite": ("roi_range", (-5.0, 5.0, -4.0, float("inf")), ValueError),
    "grid_size of one number": ("grid_size", (12,), ValueError),
    "grid_size negative": ("grid_size", (-4, -3), ValueError),
    "z_anchors missing": ("z_anchors", None, ValueError),
    "average unknown": ("average", "mean", ValueError),
    "spatial_shapes missing": ("spatial_shapes", None, ValueError),
    "spatial_shapes of other maps": ("spatial_shapes", ((5, 7), (3, 5)), ValueError),
    "spatial_shapes negative": ("spatial_shapes", ((5, 7), (-3, -4)), ValueError),
    "spatial_shapes flat": ("spatial_shapes", (5, 7, 3, 4), (ValueError, TypeError)),
}
