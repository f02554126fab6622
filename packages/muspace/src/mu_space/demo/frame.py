# SPDX-License-Identifier: Apache-2.0
"""One moment of a vehicle: calibrated camera images, LiDAR points and boxes, all in the ego frame.

Ego frame: x forward, y left, z up, metres; the road surface is near z = 0.
Camera frame: x right, y down, z forward. A pixel (u, v) counts from the top-left corner of the top-left pixel,
so the centre of that pixel is (0.5, 0.5).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


class FrameError(ValueError):
    """An input frame cannot be used; the text is one sentence naming the file or key, what was expected and what came."""


@dataclass(frozen=True)
class Camera:
    """A pinhole camera without distortion: image uint8 [h, w, 3], cam2img [3, 3], cam2ego [4, 4]."""

    name: str
    image: np.ndarray
    cam2img: np.ndarray
    cam2ego: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.image.shape[0], self.image.shape[1]

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ego points [..., 3] -> pixels [..., 2] and depth [...]; pixels of points behind the camera are not finite."""
        rotation, origin = self.cam2ego[:3, :3], self.cam2ego[:3, 3]
        local = (points - origin) @ rotation
        image = local @ self.cam2img.T
        depth = local[..., 2]
        scale = np.where(depth > 0, image[..., 2], np.nan)
        return image[..., :2] / scale[..., None], depth

    def unproject(self, uv: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """Pixels [..., 2] and depth along the optical axis [...] -> ego points [..., 3]."""
        ray = np.concatenate([uv, np.ones_like(uv[..., :1])], -1) @ np.linalg.inv(self.cam2img).T
        return (ray * depth[..., None]) @ self.cam2ego[:3, :3].T + self.cam2ego[:3, 3]

    @property
    def projection(self) -> np.ndarray:
        """[3, 4]: homogeneous ego points -> (u * depth, v * depth, depth)."""
        rotation, origin = self.cam2ego[:3, :3], self.cam2ego[:3, 3]
        return self.cam2img @ np.column_stack([rotation.T, -rotation.T @ origin])


@dataclass(frozen=True)
class Boxes:
    """Annotated boxes: centre [n, 3], size [n, 3] (along heading, across, up), yaw [n] about ego z, label text [n]."""

    centre: np.ndarray
    size: np.ndarray
    yaw: np.ndarray
    label: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.label)

    def footprint(self) -> np.ndarray:
        """Corners [n, 4, 2] of the boxes as seen from above, counter-clockwise, front-left first."""
        half = self.size[:, None, :2] / 2 * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], np.float64)
        c, s = np.cos(self.yaw)[:, None], np.sin(self.yaw)[:, None]
        turned = np.stack([c * half[..., 0] - s * half[..., 1], s * half[..., 0] + c * half[..., 1]], -1)
        return turned + self.centre[:, None, :2]


@dataclass(frozen=True)
class Truth:
    """What is known about a generated street: its ground as seen from above, and which pixels show ground.

    ground [ny, nx, 3] in 0..1, cell (j, i) centred at (x0 + (i + .5) * step, y0 + (j + .5) * step);
    ground_seen: one boolean image [h, w] per camera, False where an object hides the ground.
    """

    ground: np.ndarray
    origin: tuple[float, float]
    step: float
    ground_seen: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Frame:
    """Everything the demo needs of one moment. `ground` = (a, b, c): the road is z = a x + b y + c."""

    source: str
    cameras: tuple[Camera, ...]
    boxes: Boxes
    points: np.ndarray
    ground: tuple[float, float, float] = (0.0, 0.0, 0.0)
    truth: Truth | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def road2ego(self) -> np.ndarray:
        """[4, 4]: x, y and height above the road -> ego point."""
        shear = np.eye(4)
        shear[2] = (*self.ground[:2], 1.0, self.ground[2])
        return shear


def no_boxes() -> Boxes:
    return Boxes(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0), ())


def fit_ground(points: np.ndarray, reach: float = 25.0) -> tuple[float, float, float]:
    """Plane z = a x + b y + c through the road points of a LiDAR cloud [n, >=3]; (0, 0, 0) if there are too few.

    The road tilts against the vehicle by a fraction of a degree, which displaces a marking 20 m away by decimetres.
    A least-squares plane is fitted to points near the last plane, and the band narrows from 0.4 m to 0.1 m.
    """
    near = points[np.hypot(points[:, 0], points[:, 1]) < reach][:, :3].astype(np.float64)
    plane = np.zeros(3)
    for band in (0.4, 0.3, 0.2, 0.15, 0.1, 0.1):
        residual = near[:, 2] - (near[:, :2] @ plane[:2] + plane[2])
        road = near[np.abs(residual) < band]
        if len(road) < 50:
            return 0.0, 0.0, 0.0
        design = np.column_stack([road[:, :2], np.ones(len(road))])
        plane = np.linalg.lstsq(design, road[:, 2], rcond=None)[0]
    return float(plane[0]), float(plane[1]), float(plane[2])
