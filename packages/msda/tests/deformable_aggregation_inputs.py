# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of deformable_aggregation as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.refusals import NARROW, STORAGE, number_at, put, wrong_device, wrong_shape, wrong_type, wrong_value

ARGUMENTS = ("mc_ms_feat", "spatial_shape", "scale_start_index", "sampling_location", "weights")

#: (h, w) of every scale, camera by camera; no two alike, so that a mix-up of cameras, scales or axes is seen.
Maps = Sequence[Sequence[tuple[int, int]]]
TWO_CAMERAS: Maps = (((4, 5), (2, 3)), ((3, 6), (1, 4)))


def starts_of(shapes: np.ndarray) -> np.ndarray:
    areas = shapes.reshape(-1, 2).prod(1)
    return (np.cumsum(areas) - areas).reshape(shapes.shape[:2]).astype(np.int64)


def aggregation(
    name: str,
    *,
    batch: int = 1,
    anchors: int = 3,
    points: int = 2,
    channels: int = 8,
    groups: int = 2,
    maps: Maps = TWO_CAMERAS,
    locations: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None,
) -> Arguments:
    """Arguments of a call; half of the locations lie outside of the unit square unless given."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    shapes = np.asarray(maps, np.int64).reshape(len(maps), -1, 2)
    cameras, scales = shapes.shape[:2]
    rows = int(shapes.reshape(-1, 2).prod(1).sum())
    extent = (batch, anchors, points, cameras)
    return {
        "mc_ms_feat": random.standard_normal((batch, rows, channels)),
        "spatial_shape": shapes,
        "scale_start_index": starts_of(shapes),
        "sampling_location": random.uniform(-0.2, 1.2, (*extent, 2)) if locations is None else locations(random, extent),
        "weights": random.uniform(-0.5, 1.0, (*extent, scales, groups)),
    }


#: Places on and around the border of the unit square, and within half a pixel of it for maps of 4 and 8 pixels.
EDGES = np.array(
    [-1.0, -(2.0**-6), -0.0, 0.0, 2.0**-20, 2.0**-6, 0.0625, 0.125, 0.5, 0.875, 0.96875, 1 - 2.0**-20, 1.0, 1 + 2.0**-6, 3.0]
)


def border(random: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray:
    return random.choice(EDGES, (*extent, 2))


def inside(random: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray:
    return random.uniform(0.02, 0.98, (*extent, 2))


def one_cell(random: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray:
    """Every point of every anchor in the same cell of every map: the worst case of a scatter."""
    return np.broadcast_to(np.array([0.53, 0.47]), (*extent, 2)).copy()


def one_camera_each(random: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray:
    """Every point in sight of one camera and far beside the others, as a ring of cameras sees it."""
    at = random.uniform(0.05, 0.95, (*extent, 2))
    seen = random.integers(0, extent[-1], extent[:-1])
    hidden = np.arange(extent[-1]) != seen[..., None]
    return np.where(hidden[..., None], at + random.choice([-300.0, 7.0], (*extent, 1)), at)


def everywhere_but_inside(random: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray:
    at = random.uniform(0.1, 0.9, (*extent, 2))
    at[..., 0] += 1.0
    return at


RING: Maps = tuple(((6, 8), (3, 4), (2, 2), (1, 1)) for _ in range(6))
SMALL_RING: Maps = tuple(((4, 5), (2, 2)) for _ in range(3))
SQUARES: Maps = (((4, 8), (8, 4)),)


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    # The ordered backward sorts: its launches grow with the maps and groups, not with what is seen of them.
    budget = 2_000_000
    return Case(name, lambda: aggregation(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on, emu_budget=budget)


CASES = (
    _case("tiny", batch=2),
    _case("c256_g8", anchors=2, points=3, channels=256, groups=8, warp_sensitive=True),
    _case("c1_g1", anchors=5, channels=1, groups=1),
    _case("c3_g3", anchors=3, points=5, channels=3, groups=3),
    _case("c24_g3", batch=2, channels=24, groups=3, warp_sensitive=True),
    _case("c33_g3", batch=2, channels=33, groups=3, warp_sensitive=True),
    _case("c30_g1", channels=30, groups=1),
    _case("c16_g16", channels=16, groups=16, anchors=2),
    _case("c128_g4", anchors=2, channels=128, groups=4, points=3, warp_sensitive=True),
    _case("c136_g2", anchors=2, channels=136, groups=2, warp_sensitive=True),
    _case("c520_g8", anchors=1, channels=520, groups=8),
    _case("points_67", anchors=1, points=67, channels=16, groups=2, locations=inside, warp_sensitive=True),
    _case("border", anchors=8, points=4, channels=4, groups=2, maps=SQUARES, locations=border),
    _case("one_cell", anchors=7, points=4, channels=32, groups=4, locations=one_cell, warp_sensitive=True),
    _case("nothing_seen", anchors=3, locations=everywhere_but_inside),
    _case(
        "ring",
        batch=2,
        anchors=3,
        points=5,
        channels=32,
        groups=4,
        maps=SMALL_RING,
        locations=one_camera_each,
        warp_sensitive=True,
    ),
    _case("one_scale", maps=(((3, 5),), ((2, 2),), ((5, 3),)), channels=12, groups=4),
    _case("slivers", maps=(((1, 1), (1, 7)), ((5, 1), (2, 1))), channels=4, anchors=6),
    _case("c64_g64", channels=64, groups=64, anchors=2, skip_on=("emu",)),
    _case("many", batch=3, anchors=60, points=13, channels=64, groups=8, maps=RING, skip_on=("emu",)),
)


def _cut(axis: str) -> Callable[[Arguments], Arguments]:
    """Shrinks an axis to zero in every argument that has it; without maps there are no rows either."""
    where: dict[str, dict[str, int]] = {
        "batch": {"mc_ms_feat": 0, "sampling_location": 0, "weights": 0},
        "anchors": {"sampling_location": 1, "weights": 1},
        "points": {"sampling_location": 2, "weights": 2},
        "channels": {"mc_ms_feat": 2},
        "cameras": {"mc_ms_feat": 1, "spatial_shape": 0, "scale_start_index": 0, "sampling_location": 3, "weights": 3},
        "scales": {"mc_ms_feat": 1, "spatial_shape": 1, "scale_start_index": 1, "weights": 4},
    }

    def shrink(arguments: Arguments) -> Arguments:
        for name, dimension in where[axis].items():
            arguments[name] = np.take(arguments[name], range(0), axis=dimension)
        return arguments

    return shrink


EMPTY = tuple(EmptyCase(name, _cut(name)) for name in ("batch", "anchors", "points", "channels", "cameras", "scales"))


F, S, T, L, W = ARGUMENTS


_LOCATIONS, _WEIGHTS = "[B, A, P, cams, 2] = [2, 3, 2, 2, 2]", "[B, A, P, cams, scales, G] = [2, 3, 2, 2, 2, 2]"

#: Messages are exact; ``{device}`` is the device under test.
ERRORS = (
    wrong_shape("feat_rank", F, lambda t: t[0], "[B, F, C]", "[48, 8]"),
    wrong_shape("shape_rank", S, lambda t: t[0], "[cams, scales, 2]", "[2, 2]"),
    wrong_shape("shape_width", S, lambda t: t[..., :1], "[cams, scales, 2]", "[2, 2, 1]"),
    wrong_shape("starts_rank", T, lambda t: t[0], "[cams, scales] = [2, 2]", "[2]"),
    wrong_shape("starts_scales", T, lambda t: t[:, :1], "[cams, scales] = [2, 2]", "[2, 1]"),
    wrong_shape("location_rank", L, lambda t: t[0], "[B, A, P, cams, 2]", "[3, 2, 2, 2]"),
    wrong_shape("location_cameras", L, lambda t: t[:, :, :, :1], _LOCATIONS, "[2, 3, 2, 1, 2]"),
    wrong_shape("location_batch", L, lambda t: t[:1], _LOCATIONS, "[1, 3, 2, 2, 2]"),
    wrong_shape("location_last", L, lambda t: t[..., [0, 1, 1]], _LOCATIONS, "[2, 3, 2, 2, 3]"),
    wrong_shape("weights_rank", W, lambda t: t[0], "[B, A, P, cams, scales, G]", "[3, 2, 2, 2, 2]"),
    wrong_shape("weights_scales", W, lambda t: t[:, :, :, :, :1], _WEIGHTS, "[2, 3, 2, 2, 1, 2]"),
    wrong_shape("weights_anchors", W, lambda t: t[:, :2], _WEIGHTS, "[2, 2, 2, 2, 2, 2]"),
    # A kernel that divides C by G would give the last channels to a group that does not exist.
    wrong_value("groups_do_not_divide", W, lambda t: t[..., [0, 1, 1]], "a number of groups G that divides C = 8", "G = 3"),
    wrong_value("no_groups", W, lambda t: t[..., :0], "a number of groups G that divides C = 8", "G = 0"),
    wrong_type("feat_int", F, lambda t: t.int(), STORAGE, "int32"),
    wrong_type("feat_complex", F, lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("location_int", L, lambda t: t.long(), NARROW, "int64"),
    wrong_type("location_double", L, lambda t: t.double(), NARROW, "float64"),
    wrong_type("weights_int", W, lambda t: t.int(), NARROW, "int32"),
    wrong_type("weights_double", W, lambda t: t.double(), NARROW, "float64"),
    wrong_type("shape_float", S, lambda t: t.float(), "dtype int64, int32", "float32"),
    wrong_type("starts_float", T, lambda t: t.float(), "dtype int64, int32", "float32"),
    wrong_type("feat_array", F, lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    wrong_type("location_none", L, lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_type("weights_number", W, lambda t: 1.0, "a torch.Tensor", "float"),
    wrong_device("location_meta", L, F),
    wrong_device("weights_meta", W, F),
    wrong_device("shape_meta", S, F),
)

#: Contents that a cpu tensor, or any tensor under MUSPACE_CHECK=1, is refused for: the change, and what the message must name.
CONTENTS = {
    "negative_height": (put(S, number_at((0, 0, 0), -4)), S),
    "zero_width": (put(S, number_at((1, 0, 1), 0)), S),
    "too_tall": (put(S, number_at((1, 1, 0), 40)), T),
    "beyond_the_rows": (put(T, number_at((1, 1), 46)), T),
    "negative_start": (put(T, number_at((0, 1), -1)), T),
    "overflowing": (put(S, number_at((0, 0), 1 << 31)), S),
}
