# SPDX-License-Identifier: Apache-2.0
"""Bird's-eye-view cells -> sampling locations and attention weights in the camera images.

A query is a cell of a grid on the road, a head is a height above it, and a point is a place inside the cell. The
projection through the calibration gives the location; the attention weight says how much the sample counts:

    weight = level share * border fade * openness * pillar share / points; 0 behind the camera or outside the image.

The level share picks the pyramid level whose pixels are as large as the point's area in the image (near cells cover many
pixels, far cells less than one). As value holds colour * validity and validity, the sum over cameras of the colour
channels divided by that of the validity channel is the weighted mean colour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .frame import Camera
from .grid import Grid
from .obstacles import DepthImage
from .pyramid import STRIDES

NEAR = 0.3  # metres in front of the camera
FADE = 0.05  # share of the image width over which a camera fades out towards its border
FLOOR = 0.02  # a border sample counts this much, so that a cell seen by one camera only keeps its colour


@dataclass(frozen=True)
class Lift:
    """Queries of each camera, padded to the largest count Q as a batch.

    locations [cameras, Q, heads, levels, points, 2], weights [cameras, Q, heads, levels, points] float32;
    cells: for each camera the grid cells of its first queries; the remaining queries have weight 0.
    """

    locations: np.ndarray
    weights: np.ndarray
    cells: tuple[np.ndarray, ...]


def _inside(camera: Camera, uv: np.ndarray, depth: np.ndarray) -> np.ndarray:
    h, w = camera.size
    with np.errstate(invalid="ignore"):
        return (depth > NEAR) & (uv[..., 0] > 0) & (uv[..., 0] < w) & (uv[..., 1] > 0) & (uv[..., 1] < h)


def _level_share(camera: Camera, centre: np.ndarray, side: float) -> np.ndarray:
    """Shares [..., levels] of the two levels whose pixel is nearest in size to a square of `side` metres seen there."""
    uv, _ = camera.project(centre)
    du, _ = camera.project(centre + np.array([side, 0.0, 0.0]))
    dv, _ = camera.project(centre + np.array([0.0, side, 0.0]))
    a, b = du - uv, dv - uv
    area = np.abs(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0])
    area = np.where(np.isfinite(area), area, 1.0)
    level = np.clip(0.5 * np.log2(np.maximum(area, 1e-6)) - np.log2(STRIDES[0]), 0, len(STRIDES) - 1)
    return np.maximum(0, 1 - np.abs(level[..., None] - np.arange(len(STRIDES))))


def _points(count: int, cell: float) -> np.ndarray:
    """`count` x `count` places inside a cell as offsets [count^2, 2] from its centre."""
    k = (np.arange(count) + 0.5) / count - 0.5
    return np.stack(np.meshgrid(k, k, indexing="ij"), -1).reshape(-1, 2) * cell


def _point_weights(camera: Camera, uv: np.ndarray, depth: np.ndarray, obstacles: DepthImage | None) -> np.ndarray:
    """Border fade times openness of samples; 0 where the camera does not see the point at all."""
    h, w = camera.size
    inside = _inside(camera, uv, depth)
    uv = np.where(inside[..., None], uv, 0.0)
    border = np.minimum(np.minimum(uv[..., 0], w - uv[..., 0]), np.minimum(uv[..., 1], h - uv[..., 1]) * 2)
    weight = np.clip(border / (FADE * w), FLOOR, 1)
    if obstacles is not None:
        weight = weight * obstacles.openness(uv, depth)
    return np.where(inside, weight, 0.0)


@dataclass(frozen=True)
class Pillars:
    """The queries of a grid: ground [cells], heights [heads] above it, share [cells, heads], side * side points a cell."""

    grid: Grid
    ground: np.ndarray
    heights: np.ndarray
    share: np.ndarray
    side: int = 1


def _one_camera(
    camera: Camera, extent: tuple[int, int], pillars: Pillars, obstacles: DepthImage | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cells [n], locations [n, heads, levels, points, 2], weights [n, heads, levels, points]) of one camera."""
    base = np.column_stack([pillars.grid.centres(), pillars.ground])
    rise = pillars.heights[:, None] * np.array([0.0, 0.0, 1.0])
    uv, depth = camera.project(base[:, None] + rise)
    cells = np.flatnonzero(((pillars.share > 0) & _inside(camera, uv, depth)).any(1))
    centre = base[cells, None] + rise  # [n, heads, 3]
    offset = _points(pillars.side, pillars.grid.cell)
    spread = np.concatenate([offset, np.zeros((len(offset), 1))], 1)
    uv, depth = camera.project(centre[:, :, None] + spread)  # [n, heads, points, 2]
    weight = _point_weights(camera, uv, depth, obstacles)
    weight = weight * pillars.share[cells][:, :, None] / len(offset)
    location = np.where(weight[..., None] > 0, uv / np.array([extent[1], extent[0]]), -1.0)
    level = _level_share(camera, centre, pillars.grid.cell / pillars.side)
    shape = (len(cells), len(pillars.heights), len(STRIDES), len(offset))
    locations = np.broadcast_to(location[:, :, None].astype(np.float32), (*shape, 2))
    return cells, locations, (level[..., None] * weight[:, :, None]).astype(np.float32)


def lift(
    cameras: tuple[Camera, ...], extent: tuple[int, int], pillars: Pillars, obstacles: list[DepthImage] | None = None
) -> Lift:
    """Sampling locations of every cell in every camera that sees it; `extent`: the (height, width) of location 1.0."""
    parts = [_one_camera(c, extent, pillars, obstacles[k] if obstacles else None) for k, c in enumerate(cameras)]
    most = max(1, *(len(cells) for cells, _, _ in parts))
    shape = (len(cameras), most, len(pillars.heights), len(STRIDES), pillars.side**2)
    locations, weights = np.full((*shape, 2), -1.0, np.float32), np.zeros(shape, np.float32)
    for k, (cells, location, weight) in enumerate(parts):
        locations[k, : len(cells)], weights[k, : len(cells)] = location, weight
    return Lift(locations, weights, tuple(cells for cells, _, _ in parts))
