# SPDX-License-Identifier: Apache-2.0
"""Compares a fused picture of the road with the known one, where the cameras really show road."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .frame import Frame
from .grid import Grid
from .obstacles import ground_height

MARGIN = 8  # pixels around a sample that must show road too: the support of the pyramid's first two levels
NEAR = 12.0


@dataclass(frozen=True)
class Comparison:
    """Peak signal-to-noise ratio (dB, peak 1) and mean absolute error of colours in 0..1 over `cells` cells."""

    psnr: float
    mean_absolute_error: float
    psnr_near: float  # of the cells within NEAR metres of the origin
    cells: int
    share: float  # of the grid's cells


def top_view(frame: Frame, grid: Grid) -> np.ndarray:
    """The true ground averaged over the cells of `grid`, [cells, 3]; NaN outside the known area."""
    truth = frame.truth
    assert truth is not None
    ny, nx = truth.ground.shape[:2]
    side = max(1, round(grid.cell / truth.step))
    k = ((np.arange(side) + 0.5) / side - 0.5) * grid.cell
    centres, total = grid.centres(), np.zeros((math.prod(grid.shape), 3))
    for dx in k:
        for dy in k:
            i = np.floor((centres[:, 0] + dx - truth.origin[0]) / truth.step).astype(np.int64)
            j = np.floor((centres[:, 1] + dy - truth.origin[1]) / truth.step).astype(np.int64)
            known = (i >= 0) & (i < nx) & (j >= 0) & (j < ny)
            total += np.where(known[:, None], truth.ground[np.clip(j, 0, ny - 1), np.clip(i, 0, nx - 1)], np.nan)
    return total / side**2


def psnr(error: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of differences of colours in 0..1; NaN of nothing."""
    return float(-10 * np.log10(max(float((error**2).mean()), 1e-12))) if error.size else float("nan")


def eroded(mask: np.ndarray, radius: int) -> np.ndarray:
    """True where the square of 2 * radius + 1 pixels around is True; outside the image counts as True."""
    hole = np.pad((~mask).astype(np.int32), ((radius + 1, radius), (radius + 1, radius))).cumsum(0).cumsum(1)
    n = 2 * radius + 1
    return (hole[n:, n:] - hole[:-n, n:] - hole[n:, :-n] + hole[:-n, :-n]) == 0


def visible(frame: Frame, grid: Grid) -> np.ndarray:
    """Cells [cells] that some camera has in view, and that every camera which has them in view shows as road."""
    xy = grid.centres()
    points = np.column_stack([xy, ground_height(frame, xy)])
    assert frame.truth is not None
    seen, blocked = np.zeros(len(xy), bool), np.zeros(len(xy), bool)
    for camera, mask in zip(frame.cameras, frame.truth.ground_seen, strict=True):
        uv, depth = camera.project(points)
        with np.errstate(invalid="ignore"):
            inside = (depth > 0) & (uv > 0).all(1) & (uv[:, 0] < camera.size[1]) & (uv[:, 1] < camera.size[0])
        pixel = uv[inside].astype(np.int64)
        road = eroded(mask, MARGIN)[pixel[:, 1], pixel[:, 0]]
        seen |= inside
        blocked[np.flatnonzero(inside)[~road]] = True
    return seen & ~blocked


def compare(frame: Frame, grid: Grid, colour: np.ndarray, valid: np.ndarray) -> Comparison:
    """Fused colour [cells, 3] with weight `valid` [cells] against the true top view; no visible cell gives NaN."""
    expected = top_view(frame, grid)
    mask = visible(frame, grid) & (valid > 1e-4) & np.isfinite(expected).all(1)
    error = colour[mask] - expected[mask]
    near = np.hypot(*grid.centres()[mask].T) < NEAR
    mean = float(np.abs(error).mean()) if error.size else float("nan")
    return Comparison(psnr(error), mean, psnr(error[near]), int(mask.sum()), float(mask.mean()))
