# SPDX-License-Identifier: Apache-2.0
"""Depth of image rows from LiDAR points, in place of the depth that a model would predict.

Points are projected into the image and sorted into columns about as wide as the gap between two of them. Between two
points of a column the inverse depth is interpolated, which is exact on a plane, if both lie on the road or on one surface;
elsewhere the depth is unknown and the pixels are lifted nowhere.
"""

from __future__ import annotations

import numpy as np

from .frame import Camera, Frame, FrameError
from .obstacles import LOW, DepthImage, depth_images, ground_height, own_vehicle

GAP = 0.085  # of the image height: more than two beams of a sensor whose beams are 1.33 degrees apart
STEP = 0.12  # relative difference of depth up to which two points that are not both road are one surface
HOLD = 0.005  # of the image height: how far a point alone reaches
LEAST = 0.5  # metres


def _returns(camera: Camera, points: np.ndarray, blocked: DepthImage) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pixels [n, 2], depth [n], index [n]) of the points that the camera sees; the LiDAR looks over some obstacles."""
    uv, depth = camera.project(points)
    with np.errstate(invalid="ignore"):
        inside = (depth > LEAST) & (uv > 0).all(1) & (uv[:, 0] < camera.size[1]) & (uv[:, 1] < camera.size[0])
    index = np.flatnonzero(inside)
    index = index[blocked.openness(uv[index], depth[index]) == 1]
    return uv[index], depth[index], index


def _between(depth: np.ndarray) -> np.ndarray:
    """Close gaps of one or two columns in [height, columns] where the columns on both sides show one surface."""
    columns = depth.shape[1]
    padded = np.pad(depth, ((0, 0), (2, 2)), constant_values=np.nan)
    out = depth.copy()
    for a, b in ((1, 1), (1, 2), (2, 1)):  # distance to the left and to the right
        left, right = padded[:, 2 - a : 2 - a + columns], padded[:, 2 + b : 2 + b + columns]
        with np.errstate(invalid="ignore"):
            fill = np.isnan(out) & (np.abs(np.log(left / right)) < STEP)
        out[fill] = ((a + b) / (b / left + a / right))[fill]
    return out


def rows_of(
    camera: Camera, points: np.ndarray, on_road: np.ndarray, blocked: DepthImage, stride: int, lines: int = 1
) -> np.ndarray:
    """Depth [height * lines, columns] along the optical axis, at `lines` places of every image row, NaN where unknown.

    Columns are `stride` pixels wide; on_road [n]: which of the points [n, 3] lie on the road.
    """
    height, columns = camera.size[0], -(-camera.size[1] // stride)
    uv, depth, index = _returns(camera, points, blocked)
    if not len(index):
        return np.full((height * lines, columns), np.nan)
    column = (uv[:, 0] / stride).astype(np.int64)
    place = column * height + uv[:, 1]  # increases down a column and from column to column
    order = np.argsort(place)
    place, depth, column, road = place[order], depth[order], column[order], on_road[index][order]
    target = (np.arange(columns)[:, None] * height + (np.arange(height * lines) + 0.5) / lines).reshape(-1)
    own = np.repeat(np.arange(columns), height * lines)
    after = np.searchsorted(place, target)
    above, below = np.maximum(after - 1, 0), np.minimum(after, len(place) - 1)
    here = (after > 0) & (column[above] == own), (after < len(place)) & (column[below] == own)
    gap = place[below] - place[above]
    surface = (road[above] & road[below]) | (np.abs(np.log(depth[below] / depth[above])) < STEP)
    joined = here[0] & here[1] & (gap < GAP * height) & surface
    t = np.clip((target - place[above]) / np.maximum(gap, 1e-9), 0, 1)
    found = np.where(joined, 1 / ((1 - t) / depth[above] + t / depth[below]), np.nan)
    for near, present in ((above, here[0]), (below, here[1])):  # what is left: rows right beside a point
        held = np.isnan(found) & present & (np.abs(target - place[near]) < HOLD * height)
        found[held] = depth[near][held]
    return _between(found.reshape(columns, height * lines).T)


def of_cameras(frame: Frame, stride: int, extent: tuple[int, int], lines: int = 1) -> np.ndarray:
    """`rows_of` every camera, [cameras, height * lines, width / stride] of images padded to `extent` = (height, width).

    Raises FrameError for a frame without LiDAR points.
    """
    blocked = depth_images(frame)
    if blocked is None:
        raise FrameError(f"{frame.source}: the view transform takes depth from LiDAR points, and the frame has none")
    points = frame.points[:, :3].astype(np.float64)
    points = points[~own_vehicle(points)]
    on_road = np.abs(points[:, 2] - ground_height(frame, points)) < LOW
    out = np.full((len(frame.cameras), extent[0] * lines, extent[1] // stride), np.nan)
    for camera, behind, image in zip(frame.cameras, blocked, out, strict=True):
        rows = rows_of(camera, points, on_road, behind, stride, lines)
        image[: rows.shape[0], : rows.shape[1]] = rows
    return out
