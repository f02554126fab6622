# SPDX-License-Identifier: Apache-2.0
"""Six pinhole cameras around a car, as nuScenes mounts them, and where their pixels look: geometry for realistic inputs.

Ego frame: x forward, y left, z up, ground near z = 0. Images are 1600 by 900, resized to the wanted width and, where the
wanted height is less, cropped at the top, as view-transform models do at test time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

IMAGE_HEIGHT, IMAGE_WIDTH = 900, 1600


@dataclass(frozen=True)
class Camera:
    """Heading in degrees, position in the ego frame (m), focal length and principal line (px)."""

    yaw: float
    position: tuple[float, float, float]
    focal: float
    line: float = 491.0

    def axes(self) -> np.ndarray:
        """Rows: the camera's right, down and forward axes in the ego frame."""
        cos, sin = math.cos(math.radians(self.yaw)), math.sin(math.radians(self.yaw))
        return np.array([[sin, -cos, 0], [0, 0, -1], [cos, sin, 0]])

    def intrinsics(self) -> np.ndarray:
        return np.array([[self.focal, 0, 816.0], [0, self.focal, self.line], [0, 0, 1]])


#: Front, front right and left, back, back left and right.
CAMERAS: Final = (
    Camera(0.0, (1.70, 0.02, 1.51), 1266.0),
    Camera(-55.0, (1.55, -0.49, 1.50), 1260.0),
    Camera(55.0, (1.52, 0.49, 1.51), 1272.0),
    Camera(180.0, (0.03, 0.00, 1.57), 809.0, 481.0),
    Camera(110.0, (1.04, 0.48, 1.56), 1256.0),
    Camera(-110.0, (1.01, -0.48, 1.56), 1259.0),
)


def resized(height: int, width: int) -> tuple[float, float]:
    """Scale from the camera's image and lines cropped at the top."""
    scale = width / IMAGE_WIDTH
    return scale, max(0.0, IMAGE_HEIGHT * scale - height) if height * 2 <= width else 0.0


def projections(height: int, width: int) -> np.ndarray:
    """``[6, 3, 4]`` matrices from the ego frame to pixels of the resized image."""
    scale, crop = resized(height, width)
    resize = np.array([[scale, 0, 0], [0, scale, -crop], [0, 0, 1.0]])
    matrices = []
    for camera in CAMERAS:
        axes = camera.axes()
        moved = np.concatenate([axes, (-axes @ np.array(camera.position))[:, None]], 1)
        matrices.append(resize @ camera.intrinsics() @ moved)
    return np.stack(matrices)


def frustum(height: int, width: int, stride: int, depths: Sequence[float] | np.ndarray) -> np.ndarray:
    """``[6, D, h, w, 3]`` fp32 ego coordinates of the points at ``depths`` along the ray of every feature pixel."""
    scale, crop = resized(height, width)
    columns = np.linspace(0, width - 1, width // stride) / scale
    lines = (np.linspace(0, height - 1, height // stride) + crop) / scale
    column, line = np.meshgrid(columns, lines)
    distance = np.asarray(depths, np.float64)[:, None, None, None]
    points = []
    for camera in CAMERAS:
        matrix = camera.intrinsics()
        across, down = ((value - matrix[axis, 2]) / camera.focal for axis, value in enumerate((column, line)))
        ray = np.stack([across, down, np.ones_like(column)], -1) @ camera.axes()
        points.append((distance * ray + np.array(camera.position)).astype(np.float32))
    return np.stack(points)


def cells(points: np.ndarray, low: Sequence[float], step: Sequence[float]) -> np.ndarray:
    """Integer cell ``[..., 3]`` of every point of a grid that begins at ``low``, rounded down in fp32."""
    return np.floor((points - np.array(low, np.float32)) / np.array(step, np.float32)).astype(np.int32)
