# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs of flash_bevpool as NumPy arrays, smallest first, and the calls it must refuse."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from muspace_core.testing.cases import Arguments, Case, EmptyCase
from muspace_core.testing.refusals import NARROW, STORAGE, wrong_device, wrong_shape, wrong_type

GAUSSIAN, LAPLACE = 0, 1
IMAGE = (64, 96)
ROI = (-6.0, 6.0, -5.0, 5.0, -1.5, 1.5)


def camera(yaw: float, position: Sequence[float], focal: float = 40.0, image: Sequence[int] = IMAGE) -> np.ndarray:
    """Ego to pixel, [3,4]: a pinhole at ``position`` that looks along ``yaw`` in a world of x, y and z upwards."""
    forward = np.array([math.cos(yaw), math.sin(yaw), 0.0])
    right = np.array([math.sin(yaw), -math.cos(yaw), 0.0])
    rotation = np.stack([right, [0.0, 0.0, -1.0], forward])
    intrinsics = np.array([[focal, 0.0, image[1] / 2], [0.0, focal, image[0] / 2], [0.0, 0.0, 1.0]])
    return intrinsics @ np.concatenate([rotation, -(rotation @ np.asarray(position, np.float64))[:, None]], 1)


def rig(random: np.random.Generator, batch: int, cameras: int, turn: float | None = None) -> np.ndarray:
    """[B,N,3,4] float32: cameras around the car (or ``turn`` apart), every batch item with a calibration of its own."""
    matrices = np.empty((batch, cameras, 3, 4), np.float32)
    for b in range(batch):
        for n in range(cameras):
            yaw = 0.3 + n * (2 * math.pi / cameras if turn is None else turn) + random.normal(0, 0.15)
            matrices[b, n] = camera(yaw, random.normal(0, 0.3, 3), 38.0 + 6 * random.random())
    return matrices


def lift(
    name: str,
    *,
    batch: int = 1,
    cameras: int = 2,
    size: tuple[int, int] = (5, 7),
    channels: int = 4,
    grid: tuple[int, int, int] = (6, 5, 2),
    roi: Sequence[float] = ROI,
    distribution: int = GAUSSIAN,
    epsilon: float = 1e-6,
    threshold: float = 1e-6,
) -> Arguments:
    """Arguments of a call, hints of upstream's kernels included; depths of 2 to 8 m with a spread of 1 to 2.5 m."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    h, w = size
    depth = np.stack([random.uniform(2, 8, (batch, cameras, h, w)), random.uniform(1, 2.5, (batch, cameras, h, w))], -1)
    return {
        "image_feats": random.standard_normal((batch, cameras, h, w, channels)),
        "depth_params": depth,
        "projection_matrices": rig(random, batch, cameras),
        "feature_size": None,
        "image_size": IMAGE,
        "roi_range": tuple(float(v) for v in roi),
        "grid_size": tuple(grid),
        "depth_distribution": distribution,
        "use_shared_memory": True,
        "optimize_z_precompute": True,
        "use_warp_kernel": False,
        "use_vectorized_load": False,
        "epsilon": epsilon,
        "depth_weight_threshold": threshold,
    }


#: A camera of one metre's depth everywhere whose pixel is the cell's place: u = x, v = y, all of it exact in fp32.
FLAT = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], np.float32)


def flat(
    features: np.ndarray, depth: np.ndarray, x: tuple[float, float, int], y: tuple[float, float, int], **changes: Any
) -> Arguments:
    """One image seen by ``FLAT``: features [H,W,C], depth parameters [H,W,2], ``(low, high, count)`` of x and y."""
    h, w = features.shape[:2]
    return {
        "image_feats": np.asarray(features, np.float64)[None, None],
        "depth_params": np.asarray(depth, np.float64)[None, None],
        "projection_matrices": FLAT[None, None].copy(),
        "feature_size": None,
        "image_size": (h, w),
        "roi_range": (*x[:2], *y[:2], -1.0, 1.0),
        "grid_size": (x[2], y[2], 1),
        "depth_distribution": GAUSSIAN,
        "use_shared_memory": True,
        "optimize_z_precompute": True,
        "use_warp_kernel": False,
        "use_vectorized_load": False,
        "epsilon": 2.0**-20,
        "depth_weight_threshold": 0.0,
    } | changes


def _case(name: str, *, warp_sensitive: bool = False, skip_on: tuple[str, ...] = (), **sizes: Any) -> Case:
    return Case(name, lambda: lift(name, **sizes), warp_sensitive=warp_sensitive, skip_on=skip_on, emu_budget=1_000_000)


_ROW = {"cameras": 1, "grid": (9, 1, 1), "roi": (1.0, 8.0, -0.5, 0.5, -0.5, 0.5)}

CASES = (
    _case("tiny", batch=2),
    _case("laplace", batch=2, distribution=LAPLACE, threshold=0.01),
    _case("c1", channels=1),
    _case("c3", channels=3, distribution=LAPLACE),
    _case("c32", channels=32, warp_sensitive=True),
    _case("c33", channels=33, grid=(4, 5, 2), warp_sensitive=True),
    _case("c64", channels=64, grid=(4, 5, 2), distribution=LAPLACE, warp_sensitive=True),
    _case("c130", channels=130, grid=(4, 3, 2), warp_sensitive=True),
    _case("c520", channels=520, grid=(2, 2, 1)),
    # More (camera, height) pairs than a warp has lanes, on wave64 too.
    _case("pairs_80", cameras=4, grid=(3, 3, 20), warp_sensitive=True),
    _case("threshold", batch=2, threshold=0.12),
    _case("no_threshold", threshold=0.0),
    _case("epsilon", epsilon=0.25),
    _case("rectangular", batch=2, cameras=3, size=(3, 9), grid=(3, 8, 2), roi=(-3.0, 7.0, -8.0, 2.0, -1.0, 3.0)),
    _case("one_row", size=(1, 8), channels=8, **_ROW),
    _case("one_column", size=(8, 1), channels=8, **_ROW),
    _case("one_pixel", size=(1, 1), channels=8, **_ROW),
    _case("nothing_seen", roi=(-9.0, -6.0, -1.0, 1.0, 40.0, 44.0)),
    _case("ring", batch=2, cameras=6, size=(8, 12), channels=16, grid=(20, 18, 4), skip_on=("emu",)),
)


def _cut(axis: str) -> Callable[[Arguments], Arguments]:
    tensors: dict[str, dict[str, int]] = {
        "batch": {"image_feats": 0, "depth_params": 0, "projection_matrices": 0},
        "cameras": {"image_feats": 1, "depth_params": 1, "projection_matrices": 1},
        "rows": {"image_feats": 2, "depth_params": 2},
        "columns": {"image_feats": 3, "depth_params": 3},
        "channels": {"image_feats": 4},
    }
    cells = {"grid_x": 0, "grid_y": 1, "grid_z": 2}

    def shrink(arguments: Arguments) -> Arguments:
        for name, dimension in tensors.get(axis, {}).items():
            arguments[name] = np.take(arguments[name], range(0), axis=dimension)
        if axis in cells:
            arguments["grid_size"] = tuple(0 if i == cells[axis] else n for i, n in enumerate(arguments["grid_size"]))
        return arguments

    return shrink


EMPTY = tuple(
    EmptyCase(name, _cut(name)) for name in ("batch", "cameras", "rows", "columns", "channels", "grid_x", "grid_y", "grid_z")
)


F, D, P = "image_feats", "depth_params", "projection_matrices"


_DEPTH = "[B, N, H, W, 2] = [2, 2, 5, 7, 2]"
_PROJECTION = "[B, N, 3 or 4, 4] with B = 2, N = 2"

#: Messages are exact; ``{device}`` is the device under test.
ERRORS = (
    wrong_shape("feats_rank", F, lambda t: t[0], "[B, N, H, W, C]", "[2, 5, 7, 4]"),
    wrong_shape("depth_rank", D, lambda t: t[0], "[B, N, H, W, 2]", "[2, 5, 7, 2]"),
    wrong_shape("depth_channels", D, lambda t: t[..., :1], _DEPTH, "[2, 2, 5, 7, 1]"),
    wrong_shape("depth_batch", D, lambda t: t[:1], _DEPTH, "[1, 2, 5, 7, 2]"),
    wrong_shape("depth_columns", D, lambda t: t[..., :6, :], _DEPTH, "[2, 2, 5, 6, 2]"),
    wrong_shape("projection_rank", P, lambda t: t[0], _PROJECTION, "[2, 3, 4]"),
    wrong_shape("projection_columns", P, lambda t: t[..., :3], _PROJECTION, "[2, 2, 3, 3]"),
    wrong_shape("projection_cameras", P, lambda t: t[:, :1], _PROJECTION, "[2, 1, 3, 4]"),
    wrong_type("feats_int", F, lambda t: t.int(), STORAGE, "int32"),
    wrong_type("feats_complex", F, lambda t: t.to(torch.complex64), STORAGE, "complex64"),
    wrong_type("depth_int", D, lambda t: t.long(), NARROW, "int64"),
    wrong_type("depth_double", D, lambda t: t.double(), NARROW, "float64"),
    wrong_type("projection_int", P, lambda t: t.long(), f"{NARROW}, float64", "int64"),
    wrong_type("feats_array", F, lambda t: t.cpu().numpy(), "a torch.Tensor", "ndarray"),
    wrong_type("depth_none", D, lambda t: None, "a torch.Tensor", "NoneType"),
    wrong_type("projection_list", P, lambda t: t.tolist(), "a torch.Tensor", "list"),
    wrong_device("depth_meta", D, F),
    wrong_device("projection_meta", P, F),
)

#: Host values that are refused: argument, value, the class of the error.
VALUES: dict[str, tuple[str, Any, type[Exception] | tuple[type[Exception], ...]]] = {
    "image_size of one number": ("image_size", (64,), ValueError),
    "image_size zero": ("image_size", (64, 0), ValueError),
    "image_size negative": ("image_size", (-64, 96), ValueError),
    "image_size none": ("image_size", None, (ValueError, TypeError)),
    "image_size text": ("image_size", "64x96", (ValueError, TypeError)),
    "roi_range of four numbers": ("roi_range", (-6.0, 6.0, -5.0, 5.0), ValueError),
    "roi_range NaN": ("roi_range", (-6.0, 6.0, -5.0, float("nan"), -1.5, 1.5), ValueError),
    "grid_size of two numbers": ("grid_size", (6, 5), ValueError),
    "grid_size negative": ("grid_size", (6, -5, 2), ValueError),
    "grid_size fractional": ("grid_size", (6.5, 5, 2), (ValueError, TypeError)),
    "depth_distribution unknown": ("depth_distribution", 2, ValueError),
    "feature_size of other maps": ("feature_size", [[[5, 7], [5, 7]], [[5, 7], [7, 5]]], ValueError),
    "feature_size of one camera": ("feature_size", [[[5, 7]], [[5, 7]]], ValueError),
}
