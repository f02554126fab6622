# SPDX-License-Identifier: Apache-2.0
"""What LiDAR points say about the attention weights: which view of the road is blocked, and how high a cell is.

A ray through a car shows the car, not the road behind it. Points above the road give each camera a coarse depth image;
a sample far behind it gets almost no weight, so that another camera decides the cell if one sees it, and the small sum of
weights tells the picture that the cell is hidden.
"""

from __future__ import annotations

import numpy as np

from .frame import Camera, Frame
from .grid import Grid

LOW, HIGH = 0.35, 4.0  # metres above the road: what counts as standing on it
HEIGHTS = np.array([0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.6, 3.2])  # of a pillar
HIDDEN = 0.004  # weight of a sample behind an obstacle, against 1 in the open


def ground_height(frame: Frame, xy: np.ndarray) -> np.ndarray:
    """Height of the road plane at xy [..., 2]."""
    a, b, c = frame.ground
    return a * xy[..., 0] + b * xy[..., 1] + c


def own_vehicle(points: np.ndarray) -> np.ndarray:
    """Mask [n] of points [n, 3] on the vehicle itself."""
    return (np.abs(points[:, 1]) < 1.2) & (points[:, 0] > -1.5) & (points[:, 0] < 4.0)


def _above_road(frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """(points [n, 3] that stand on the road, their height above it [n])."""
    points = frame.points[:, :3].astype(np.float64)
    height = points[:, 2] - ground_height(frame, points)
    keep = (height > LOW) & ~own_vehicle(points)
    return points[keep], height[keep]


class DepthImage:
    """Least depth of the obstacle points in bins of an image about as large as the gaps between LiDAR beams."""

    BINS = (32, 160)  # rows, columns

    def __init__(self, camera: Camera, points: np.ndarray) -> None:
        self.size = camera.size
        depths = np.full(self.BINS, np.inf)
        uv, depth = camera.project(points)
        with np.errstate(invalid="ignore"):
            keep = (depth > 0.5) & (uv >= 0).all(1) & (uv[:, 0] < self.size[1]) & (uv[:, 1] < self.size[0])
        np.minimum.at(depths, self._bin(uv[keep]), depth[keep])
        # Beams are one or two rows of bins apart: spread by a row. Single columns without a return are closed.
        depths = self._neighbours(depths, 0, np.minimum)
        self.depths = self._neighbours(self._neighbours(depths, 1, np.minimum), 1, np.maximum)

    @staticmethod
    def _neighbours(image: np.ndarray, axis: int, least: np.ufunc) -> np.ndarray:
        """`least` (minimum or maximum) of each bin and its two neighbours along an axis."""
        padded = np.pad(image, [(1, 1) if k == axis else (0, 0) for k in (0, 1)], mode="edge")
        n = image.shape[axis]
        before, after = (np.take(padded, np.arange(k, k + n), axis) for k in (0, 2))
        return least(least(before, after), image)

    def _bin(self, uv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row = (uv[..., 1] / self.size[0] * self.BINS[0]).astype(np.int64)
        column = (uv[..., 0] / self.size[1] * self.BINS[1]).astype(np.int64)
        return np.clip(row, 0, self.BINS[0] - 1), np.clip(column, 0, self.BINS[1] - 1)

    def openness(self, uv: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """1 in front of the obstacles or among them, HIDDEN behind them; uv [..., 2] must be finite."""
        limit = self.depths[self._bin(uv)] * 1.04 + 0.8
        return np.where(depth < limit, 1.0, HIDDEN)


def depth_images(frame: Frame) -> list[DepthImage] | None:
    """One depth image per camera, or None without LiDAR."""
    if not len(frame.points):
        return None
    points, _ = _above_road(frame)
    return [DepthImage(camera, points) for camera in frame.cameras]


def pillar_share(frame: Frame, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """(share [cells, heights] of a pillar's heights, mask [cells] of cells with an obstacle).

    Heights count as often as LiDAR points are near them; a cell without points is road: all weight on height 0.
    Without LiDAR every height counts alike, which gives the plain pillar mean.
    """
    nx, ny = grid.shape
    if not len(frame.points):
        return np.full((nx * ny, len(HEIGHTS)), 1 / len(HEIGHTS), np.float32), np.zeros(nx * ny, bool)
    points, height = _above_road(frame)
    points, height = points[height < HIGH], height[height < HIGH]
    level = np.interp(height, HEIGHTS, np.arange(len(HEIGHTS)))
    split = np.maximum(0, 1 - np.abs(level[:, None] - np.arange(len(HEIGHTS))))
    share = np.zeros((nx, ny, len(HEIGHTS)), np.float32)
    i = np.floor((points[:, 0] - grid.x_range[0]) / grid.cell).astype(np.int64)
    j = np.floor((points[:, 1] - grid.y_range[0]) / grid.cell).astype(np.int64)
    for di in (-1, 0, 1):  # a point stands for a disc of one cell around it
        for dj in (-1, 0, 1):
            a, b = i + di, j + dj
            ok = (a >= 0) & (a < nx) & (b >= 0) & (b < ny)
            np.add.at(share, (a[ok], b[ok]), split[ok] * (1.0 if di == dj == 0 else 0.25))
    rows = share.reshape(nx * ny, len(HEIGHTS))
    total = rows.sum(1)
    obstacle = total > 0
    rows[obstacle] /= total[obstacle, None]
    rows[~obstacle, 0] = 1
    return rows, obstacle
