# SPDX-License-Identifier: Apache-2.0
"""Lift-splat geometry of real models: where frustum points of six cameras fall in their grids, and the plain sum of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from muspace_core.bench import rig

FAMILY: Final = "bevpool"
CAMERAS: Final = len(rig.CAMERAS)

Range = tuple[float, float, float]


@dataclass(frozen=True)
class Lift:
    """Image size and stride of the features, depth bins and grid as (first, last, step) in metres.

    ``kept`` of the points lie in the grid: stated here so that naming a case does not take computing it.
    """

    image: tuple[int, int]
    stride: int
    depth: Range
    channels: int
    x: Range
    y: Range
    z: Range
    kept: int

    @property
    def height(self) -> int:
        return self.image[0] // self.stride

    @property
    def width(self) -> int:
        return self.image[1] // self.stride

    @property
    def depths(self) -> np.ndarray:
        return np.arange(*self.depth, dtype=np.float64)

    @property
    def bins(self) -> int:
        return len(self.depths)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cells along x, y, z."""
        X, Y, Z = (round((last - first) / step) for first, last, step in (self.x, self.y, self.z))
        return X, Y, Z

    @property
    def points(self) -> tuple[int, int, int, int]:
        """Frustum points: cameras, bins, lines, columns."""
        return CAMERAS, self.bins, self.height, self.width


_NUSCENES: Final = (-51.2, 51.2)
LIFTS: Final = {
    "bevfusion": Lift((256, 704), 8, (1, 60, 0.5), 80, (-54, 54, 0.3), (-54, 54, 0.3), (-10, 10, 20), 1_684_597),
    "bevdet_r50": Lift((256, 704), 16, (1, 60, 1), 64, (*_NUSCENES, 0.8), (*_NUSCENES, 0.8), (-5, 3, 8), 138_556),
    "bevdet_stbase": Lift((512, 1408), 16, (1, 60, 0.5), 80, (*_NUSCENES, 0.4), (*_NUSCENES, 0.4), (-5, 3, 8), 1_121_334),
    "flashocc_r50": Lift((256, 704), 16, (1, 45, 0.5), 64, (-40, 40, 0.4), (-40, 40, 0.4), (-1, 5.4, 6.4), 200_019),
    "bevdepth_r50": Lift((256, 704), 16, (2, 58, 0.5), 80, (*_NUSCENES, 0.8), (*_NUSCENES, 0.8), (-5, 3, 8), 265_140),
    "qwen_drive": Lift((512, 896), 16, (1, 60, 0.5), 256, (-50, 50, 0.5), (-50, 50, 0.5), (-5, 3, 0.5), 492_311),
}


@functools.lru_cache(maxsize=2)
def cells(name: str) -> np.ndarray:
    """``[cameras, D, h, w, 3]`` int32 (x, y, z) cell of every frustum point, inside the grid or not."""
    lift = LIFTS[name]
    points = rig.frustum(*lift.image, lift.stride, lift.depths)
    low, step = zip(*((axis[0], axis[2]) for axis in (lift.x, lift.y, lift.z)), strict=True)
    return rig.cells(points, low, step)


def inside(name: str) -> np.ndarray:
    """``[cameras, D, h, w]``: whether a frustum point lies in the grid."""
    found = cells(name)
    return ((found >= 0) & (found < np.array(LIFTS[name].grid))).all(-1)


@functools.lru_cache(maxsize=1)
def ranks(name: str) -> dict[str, np.ndarray]:
    """int32 ranks and intervals of the points inside the grid, sorted by cell as BEVDet prepares them."""
    lift = LIFTS[name]
    X, Y, _ = lift.grid
    place = np.nonzero(inside(name).reshape(-1))[0]
    x, y, z = cells(name).reshape(-1, 3)[place].astype(np.int64).T
    rank = (z * Y + y) * X + x
    order = np.argsort(rank, kind="stable")
    place, rank = place[order], rank[order]
    starts = np.nonzero(np.diff(rank, prepend=-1))[0]
    pixels = lift.height * lift.width
    found = {
        "ranks_depth": place,
        "ranks_feat": place // (lift.bins * pixels) * pixels + place % pixels,
        "ranks_bev": rank,
        "interval_starts": starts,
        "interval_lengths": np.diff(starts, append=len(rank)),
    }
    return {key: array.astype(np.int32) for key, array in found.items()}


def sum_rows(
    rows: torch.Tensor,
    cell: torch.Tensor,
    count: int,
    row: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[count, C]``: the sum per cell of rows, or of ``rows[row] * weights[weight]``, by one ``index_add``."""
    terms = rows if row is None else rows.index_select(0, row)
    if weights is not None and weight is not None:
        terms = terms * weights.index_select(0, weight)[:, None]
    return rows.new_zeros(count, rows.shape[1]).index_add(0, cell, terms)


def pixel_row(lift: Lift, place: torch.Tensor) -> torch.Tensor:
    """Feature row (image, line, column) of the frustum points with these places (image, bin, line, column)."""
    pixels = lift.height * lift.width
    return place // (lift.bins * pixels) * pixels + place % pixels
