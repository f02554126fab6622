# SPDX-License-Identifier: Apache-2.0
"""Compares two pictures of the road where both must show the same: near the LiDAR's returns from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .frame import Frame
from .grid import Grid
from .obstacles import LOW, ground_height
from .truth import eroded, psnr
from .view import View

RADIUS = 0.5  # metres around a return
FLAT = 0.12  # metres: what counts as lying in the road plane, by which both place their samples
OPEN = 0.9


@dataclass(frozen=True)
class Agreement:
    """PSNR (dB, peak 1) and mean absolute difference of colours in 0..1 over `cells` cells, a `share` of the grid."""

    psnr: float
    mean_absolute_difference: float
    cells: int
    share: float


def near_returns(frame: Frame, grid: Grid) -> np.ndarray:
    """Cells [nx, ny] near a LiDAR return from the road, and away from anything that stands on it."""
    points = frame.points[:, :3].astype(np.float64)
    height = points[:, 2] - ground_height(frame, points)

    def around(mask: np.ndarray) -> np.ndarray:
        hit = np.zeros(grid.shape, bool)
        index = np.floor((points[mask, :2] - (grid.x_range[0], grid.y_range[0])) / grid.cell).astype(np.int64)
        index = index[((index >= 0) & (index < grid.shape)).all(1)]
        hit[index[:, 0], index[:, 1]] = True
        return ~eroded(~hit, max(1, round(RADIUS / grid.cell)))

    return around(np.abs(height) < FLAT) & ~around(height > LOW)


def compare(frame: Frame, view: View, baseline: View) -> Agreement:
    """Of the cells near a return those that both pictures show openly; none of them gives NaN."""
    mask = near_returns(frame, view.grid) & (view.openness > OPEN) & (baseline.openness > OPEN)
    error = view.colour[mask].astype(np.float64) - baseline.colour[mask]
    mean = float(np.abs(error).mean()) if error.size else float("nan")
    return Agreement(psnr(error), mean, int(mask.sum()), float(mask.mean()))
