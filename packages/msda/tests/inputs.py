# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of multi_scale_deformable_attn as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase, ErrorCase
from muspace_core.testing.refusals import NARROW, STORAGE, number_at, wrong_device, wrong_shape, wrong_type, wrong_value

ARGUMENTS = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")


def starts(shapes: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([h * w for h, w in shapes])[:-1]]).astype(np.int64)


def attention(
    name: str,
    *,
    batch: int = 1,
    queries: int = 3,
    heads: int = 2,
    channels: int = 4,
    shapes: Sequence[tuple[int, int]] = ((4, 5), (2, 3)),
    points: int = 2,
    locations: Callable[[np.random.Generator, tuple[int, ...], Sequence[tuple[int, int]]], np.ndarray] | None = None,
) -> Arguments:
    """Arguments of a call; locations spread to 0.2 beyond the map on every side unless given."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    levels = len(shapes)
    rows = sum(h * w for h, w in shapes)
    extent = (batch, queries, heads, levels, points)
    spread = random.uniform(-0.2, 1.2, (*extent, 2)) if locations is None else locations(random, extent, shapes)
    return {
        "value": random.standard_normal((batch, rows, heads, channels)),
        "spatial_shapes": np.asarray(shapes, np.int64).reshape(-1, 2),
        "level_start_index": starts(shapes),
        "sampling_locations": spread,
        "attention_weights": random.uniform(-0.5, 1.0, extent),
    }


def at_pixels(x: np.ndarray, y: np.ndarray, shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Normalised locations of pixel coordinates given per level in axis -2 of [..., L, P]."""
    size = np.asarray(shapes, np.float64)
    return np.stack([(x + 0.5) / size[:, 1, None], (y + 0.5) / size[:, 0, None]], -1)


def border(random: np.random.Generator, extent: tuple[int, ...], shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Pixel coordinates on and around every edge of the window: -1, -0.5, 0, the last centre, the size, far outside."""
    size = np.asarray(shapes, np.float64)
    x, y = np.empty(extent), np.empty(extent)
    for level, (h, w) in enumerate(size):
        for axis, length in ((x, w), (y, h)):
            edges = np.array(
                [-2, -1, -1 + 1 / 64, -0.5, 0, 0.25, length - 1, length - 0.5, length - 1 / 64, length, length + 3]
            )
            axis[..., level, :] = random.choice(edges, axis[..., level, :].shape)
    return at_pixels(x, y, shapes)


def one_cell(random: np.random.Generator, extent: tuple[int, ...], shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Every point of every query in the same cell: the worst case of a scatter."""
    return at_pixels(np.full(extent, 1.25), np.full(extent, 0.75), shapes)


def grid_queries(random: np.random.Generator, extent: tuple[int, ...], shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """One query per value row, looking near its own place (what self-attention over a map does)."""
    centres = np.concatenate(
        [np.stack(np.meshgrid((np.arange(w) + 0.5) / w, (np.arange(h) + 0.5) / h), -1).reshape(-1, 2) for h, w in shapes]
    )
    return centres[None, :, None, None, None, :] + random.normal(0, 0.1, (*extent, 2))


SHAPE_EDGES = ((1, 1), (1, 7), (5, 1), (1, 2))
MAPS = ((8, 8), (4, 4), (2, 2), (1, 1))

CASES = (
    Case("tiny", lambda: attention("tiny", batch=2)),
    Case("d32", lambda: attention("d32", queries=5, channels=32, shapes=((6, 7),), points=4), warp_sensitive=True),
    Case("d32_p8_l4", lambda: attention("d32_p8_l4", queries=2, channels=32, shapes=MAPS, points=8), warp_sensitive=True),
    Case("d30_h3", lambda: attention("d30_h3", batch=2, queries=3, heads=3, channels=30, points=3), warp_sensitive=True),
    Case("d1", lambda: attention("d1", queries=11, heads=4, channels=1, shapes=((5, 9),), points=4), warp_sensitive=True),
    Case("d2", lambda: attention("d2", queries=3, channels=2, shapes=((6, 4), (3, 2)))),
    Case("d7_p5", lambda: attention("d7_p5", queries=4, heads=1, channels=7, points=5)),
    Case("d16", lambda: attention("d16", queries=4, channels=16, points=1), warp_sensitive=True),
    Case("d64", lambda: attention("d64", queries=3, channels=64, shapes=((3, 5),), points=4), warp_sensitive=True),
    Case("d71", lambda: attention("d71", queries=2, heads=1, channels=71)),
    Case("d128", lambda: attention("d128", queries=2, heads=1, channels=128, points=3), warp_sensitive=True),
    Case("d136", lambda: attention("d136", queries=2, heads=1, channels=136, points=3), warp_sensitive=True),
    Case("d1025", lambda: attention("d1025", queries=2, heads=1, channels=1025, shapes=((3, 4),), points=2)),
    Case("edges", lambda: attention("edges", queries=6, shapes=SHAPE_EDGES, points=2)),
    Case("border", lambda: attention("border", queries=16, heads=1, points=3, shapes=((4, 8), (2, 4)), locations=border)),
    Case("one_cell", lambda: attention("one_cell", queries=9, channels=32, points=3, locations=one_cell), warp_sensitive=True),
    Case(
        "self_attention",
        lambda: attention("self", queries=35, heads=1, channels=8, shapes=((5, 7),), points=2, locations=grid_queries),
        warp_sensitive=True,
    ),
    Case(
        "self_attention_pyramid",
        lambda: attention("selfp", queries=26, heads=1, channels=8, points=2, locations=grid_queries),
    ),
    # 80 and 96 images: neither divides by the upstream chunk of 64.
    Case(
        "batch80",
        lambda: attention("batch80", batch=80, queries=1, heads=1, channels=2, shapes=((2, 2),), points=1),
        emu_budget=1_000_000,
    ),
    Case(
        "batch96",
        lambda: attention("batch96", batch=96, queries=1, heads=1, channels=2, shapes=((2, 2),), points=1),
        emu_budget=1_000_000,
    ),
    Case(
        "wide",
        lambda: attention("wide", batch=2, queries=300, heads=8, channels=32, shapes=((58, 100), (29, 50), (15, 25)), points=4),
        skip_on=("emu",),
    ),
    # More output than 4096 blocks of 512 threads and more rows than 4096 blocks: past upstream's grid caps.
    Case(
        "many_queries",
        lambda: attention("many", queries=8300, heads=8, channels=32, shapes=((20, 20),), points=1),
        skip_on=("emu", "reference"),
    ),
    Case(
        "heads_and_points",
        lambda: attention("heads", batch=3, queries=50, heads=5, channels=12, shapes=((9, 4), (3, 8), (7, 7)), points=6),
        skip_on=("emu",),
    ),
)


def _cut(**axes: int) -> Callable[[Arguments], Arguments]:
    """Shrinks an axis to zero in every argument that has it."""
    where = {
        "batch": {"value": 0, "sampling_locations": 0, "attention_weights": 0},
        "queries": {"sampling_locations": 1, "attention_weights": 1},
        "heads": {"value": 2, "sampling_locations": 2, "attention_weights": 2},
        "channels": {"value": 3},
        "points": {"sampling_locations": 4, "attention_weights": 4},
        "levels": {"value": 1, "spatial_shapes": 0, "level_start_index": 0, "sampling_locations": 3, "attention_weights": 3},
    }

    def shrink(arguments: Arguments) -> Arguments:
        for axis, size in axes.items():
            for name, dimension in where[axis].items():
                arguments[name] = np.take(arguments[name], range(size), axis=dimension)
        return arguments

    return shrink


EMPTY = tuple(
    EmptyCase(name, _cut(**dict.fromkeys(name.split("_and_"), 0)))
    for name in ("batch", "queries", "heads", "channels", "points", "levels", "batch_and_queries")
)


def _levels(count: int) -> Callable[[Arguments], None]:
    """Keeps the first ``count`` levels of the shapes and of value, and leaves locations and weights as they are."""

    def apply(tensors: Arguments) -> None:
        rows = int(tensors["spatial_shapes"][:count].prod(1).sum())
        tensors["value"] = tensors["value"][:, :rows]
        tensors["spatial_shapes"] = tensors["spatial_shapes"][:count]
        tensors["level_start_index"] = tensors["level_start_index"][:count]

    return apply


L, W = "sampling_locations", "attention_weights"


_AXES, _SIZES = "[B, Q, H, L, P, 2]", "[B, Q, H, L, P, 2] = [2, 3, 2, 2, 2, 2]"
_WEIGHTS = "[B, Q, H, L, P] = [2, 3, 2, 2, 2]"
_ALIAS = "(legacy_level_alias=True reproduces checkpoints trained so)"

#: Messages are exact; ``{device}`` is the device under test.
ERRORS = (
    wrong_shape("value_rank", "value", lambda t: t[0], "[B, S, H, D]", "[26, 2, 4]"),
    wrong_shape("shapes_rank", "spatial_shapes", lambda t: t[0], "[L, 2]", "[2]"),
    wrong_shape("shapes_width", "spatial_shapes", lambda t: t[:, [0, 1, 1]], "[L, 2]", "[2, 3]"),
    wrong_shape("locations_rank", L, lambda t: t[0], _AXES, "[3, 2, 2, 2, 2]"),
    wrong_shape("locations_last", L, lambda t: t[..., [0, 1, 1]], _AXES, "[2, 3, 2, 2, 2, 3]"),
    wrong_shape("locations_batch", L, lambda t: t[:1], _SIZES, "[1, 3, 2, 2, 2, 2]"),
    wrong_shape("locations_heads", L, lambda t: t[:, :, :1], _SIZES, "[2, 3, 1, 2, 2, 2]"),
    wrong_shape("weights_rank", W, lambda t: t[0], _WEIGHTS, "[3, 2, 2, 2]"),
    wrong_shape("weights_points", W, lambda t: t[..., :1], _WEIGHTS, "[2, 3, 2, 2, 1]"),
    wrong_shape("weights_queries", W, lambda t: t[:, :2], _WEIGHTS, "[2, 2, 2, 2, 2]"),
    wrong_shape("starts_length", "level_start_index", lambda t: t[:1], "[L] = [2]", "[1]"),
    wrong_shape("starts_rank", "level_start_index", lambda t: t[None], "[L] = [2]", "[1, 2]"),
    # Both counts, by name: a kernel that takes L from the shapes would silently read other queries' points.
    ErrorCase(
        "fewer_levels_in_shapes",
        _levels(1),
        ValueError,
        f"{L}: expected L = 1 levels, the rows of spatial_shapes, got L = 2 levels {_ALIAS}",
    ),
    wrong_value(
        "fewer_levels_in_locations", L, lambda t: t[:, :, :, :1], "L = 2 levels, the rows of spatial_shapes", "L = 1 levels"
    ),
    wrong_type("value_int", "value", lambda t: t.int(), STORAGE, "int32"),
    wrong_type("value_bool", "value", lambda t: t > 0, STORAGE, "bool"),
    wrong_type("value_complex", "value", lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("value_float8", "value", lambda t: t.to(torch.float8_e4m3fn), STORAGE, "float8_e4m3fn"),
    wrong_type("locations_int", L, lambda t: t.long(), NARROW, "int64"),
    wrong_type("locations_complex", L, lambda t: t.to(torch.complex64), NARROW, "complex64"),
    wrong_type("locations_double", L, lambda t: t.double(), NARROW, "float64"),
    wrong_type("weights_int", W, lambda t: t.int(), NARROW, "int32"),
    wrong_type("weights_double", W, lambda t: t.double(), NARROW, "float64"),
    wrong_type("shapes_float", "spatial_shapes", lambda t: t.float(), "dtype int64, int32", "float32"),
    wrong_type("starts_float", "level_start_index", lambda t: t.float(), "dtype int64, int32", "float32"),
    wrong_type("value_array", "value", lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    wrong_type("value_none", "value", lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_type("locations_list", L, lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_type("weights_number", W, lambda t: 1.0, "a torch.Tensor", "float"),
    wrong_device("locations_meta", L, "value"),
    wrong_device("weights_meta", W, "value"),
    wrong_device("shapes_meta", "spatial_shapes", "value"),
    wrong_value("value_meta", "value", lambda t: t.to("meta"), "device meta (that of value)", "{device}", "spatial_shapes"),
)

_INSIDE = "rows inside the 26 rows of value"
#: Contents that a list or cpu tensor, or any tensor under MUSPACE_CHECK=1, is refused for.
CONTENTS = (
    wrong_value(
        "negative_height", "spatial_shapes", number_at((0, 0), -4), "positive height and width", "(-4, 5)", "spatial_shapes[0]"
    ),
    wrong_value(
        "too_tall", "spatial_shapes", number_at((0, 0), 40), f"a level of 40 x 5 {_INSIDE}", "start 0", "level_start_index[0]"
    ),
    wrong_value(
        "overflowing",
        "spatial_shapes",
        number_at(0, 1 << 32),
        "height and width up to 16777216",
        "(4294967296, 4294967296)",
        "spatial_shapes[0]",
    ),
    wrong_value(
        "negative_start",
        "level_start_index",
        number_at(1, -1),
        f"a level of 2 x 3 {_INSIDE}",
        "start -1",
        "level_start_index[1]",
    ),
    wrong_value(
        "late_start", "level_start_index", number_at(1, 21), f"a level of 2 x 3 {_INSIDE}", "start 21", "level_start_index[1]"
    ),
)
