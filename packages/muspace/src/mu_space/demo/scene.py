# SPDX-License-Identifier: Apache-2.0
"""The street that the package renders itself: what stands where, six cameras, a LiDAR, and the known truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from . import raycast, street
from .frame import Boxes, Camera, Frame, Truth
from .raycast import Solid

SEED = 20261130
# name, heading in degrees from straight ahead (left positive), position in the ego frame, focal length at 1600 px
RIG = (
    ("CAM_FRONT", 0.0, (1.70, 0.02, 1.51), 1266.0),
    ("CAM_FRONT_RIGHT", -56.0, (1.55, -0.49, 1.50), 1260.0),
    ("CAM_FRONT_LEFT", 56.0, (1.52, 0.49, 1.51), 1272.0),
    ("CAM_BACK", 180.0, (0.03, 0.00, 1.57), 809.0),
    ("CAM_BACK_LEFT", 109.0, (1.04, 0.48, 1.58), 1256.0),
    ("CAM_BACK_RIGHT", -110.0, (1.01, -0.48, 1.56), 1259.0),
)
LIDAR_ORIGIN = (0.94, 0.0, 1.84)
PAINTS = (
    (0.72, 0.10, 0.10), (0.15, 0.28, 0.55), (0.86, 0.86, 0.85), (0.20, 0.21, 0.23), (0.80, 0.64, 0.15),
    (0.58, 0.60, 0.63), (0.13, 0.38, 0.32), (0.90, 0.45, 0.12),
)  # fmt: skip


class _Street:
    """Solids and their annotated boxes, collected while the street is furnished."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.solids: list[Solid] = []
        self.rows: list[tuple[float, ...]] = []
        self.labels: list[str] = []

    def annotate(self, label: str, x: float, y: float, size: tuple[float, float, float], yaw: float) -> None:
        self.rows.append((x, y, size[2] / 2, *size, yaw))
        self.labels.append(label)

    def car(self, x: float, y: float, heading: float, paint: int) -> None:
        yaw, colour = math.radians(heading), PAINTS[paint % len(PAINTS)]
        length, width = 4.5 + 0.3 * self.rng.uniform(-1, 1), 1.85
        back = -0.25
        self.solids.append(Solid((x, y, 0.56), (length, width, 0.76), yaw, colour, "body"))
        cx, cy = x + back * math.cos(yaw), y + back * math.sin(yaw)
        self.solids.append(Solid((cx, cy, 1.22), (length * 0.52, width * 0.88, 0.56), yaw, colour, "cabin"))
        self.annotate("car", x, y, (length, width, 1.5), yaw)

    def lorry(self, x: float, y: float, heading: float, colour: tuple[float, float, float], label: str = "truck") -> None:
        yaw = math.radians(heading)
        length, height = (7.6, 3.1) if label == "truck" else (11.2, 3.0)
        self.solids.append(Solid((x, y, 0.30 + height / 2), (length, 2.45, height), yaw, colour, "body"))
        if label == "bus":
            self.solids.append(Solid((x, y, 2.1), (length + 0.02, 2.47, 1.1), yaw, colour, "cabin"))
        self.annotate(label, x, y, (length, 2.5, height + 0.3), yaw)

    def person(self, x: float, y: float, top: tuple[float, float, float]) -> None:
        self.solids.append(Solid((x, y, 0.42), (0.28, 0.28, 0.84), 0.0, (0.16, 0.18, 0.28)))
        self.solids.append(Solid((x, y, 1.12), (0.40, 0.50, 0.78), 0.0, top, round=True))
        self.solids.append(Solid((x, y, 1.60), (0.23, 0.23, 0.27), 0.0, (0.72, 0.52, 0.40), round=True))
        self.annotate("pedestrian", x, y, (0.55, 0.6, 1.75), 0.0)

    def tree(self, x: float, y: float) -> None:
        r = self.rng
        height, spread = r.uniform(3.0, 4.0), r.uniform(3.0, 4.2)
        self.solids.append(Solid((x, y, height / 2), (0.26, 0.26, height), 0.3, (0.34, 0.26, 0.18)))
        green = (0.20 + r.uniform(0, 0.06), 0.36 + r.uniform(0, 0.08), 0.14)
        for _ in range(3):
            dx, dy, dz = r.uniform(-0.7, 0.7, 3)
            size = (spread, spread, spread * 0.8)
            self.solids.append(Solid((x + dx, y + dy, height + 0.9 + dz * 0.6), size, 0.0, green, "leaves", True))

    def post(self, x: float, y: float, height: float, arm: float = 0.0) -> None:
        self.solids.append(Solid((x, y, height / 2), (0.14, 0.14, height), 0.0, (0.42, 0.44, 0.46)))
        if arm:
            self.solids.append(Solid((x, y + arm / 2, height), (0.12, abs(arm), 0.10), 0.0, (0.42, 0.44, 0.46)))

    def barrier(self, x: float, y: float, heading: float) -> None:
        yaw = math.radians(heading)
        self.solids.append(Solid((x, y, 0.45), (1.8, 0.4, 0.9), yaw, (0.85, 0.28, 0.10), "stripes"))
        self.annotate("barrier", x, y, (1.8, 0.4, 0.9), yaw)


def _furnish(s: _Street) -> None:
    for k, x in enumerate((-43.4, -37.8, -26.6, -21.0, -15.4, -9.8)):  # parked in bays of 5.6 m
        s.car(x, -6.45, 0 if k % 3 else 180, k)
    s.car(-17.0, 0.1, 0, 5)
    s.car(-22.6, -3.5, 0, 1)
    s.car(21.8, 3.5, 180, 0)
    s.car(-12.5, 7.0, 180, 4)
    s.car(-31.0, 3.5, 180, 7)
    s.car(20.2, 18.5, -90, 2)
    s.car(25.0, -15.5, 90, 6)
    s.car(38.5, 3.4, 180, 3)
    s.car(46.0, -0.1, 0, 1)
    s.lorry(41.0, 7.0, 180, (0.83, 0.82, 0.78))
    s.lorry(-33.5, -3.4, 0, (0.62, 0.14, 0.16), "bus")
    s.person(13.2, -2.6, (0.75, 0.20, 0.20))
    s.person(14.4, 5.2, (0.20, 0.45, 0.70))
    s.person(-4.0, -9.4, (0.80, 0.75, 0.30))
    s.person(3.0, 10.6, (0.30, 0.60, 0.40))
    s.person(-16.0, 11.2, (0.70, 0.70, 0.72))
    s.person(20.5, -11.8, (0.50, 0.30, 0.60))
    for x in (-43, -34, -25, -16, -7, 2, 34, 43, 52):
        s.tree(x, -12.2)
        s.tree(x + 3.5, 13.6)
    for y in (18, 27, 36, -20, -29, -38):
        s.tree(31.5, y)
        s.tree(13.4, y + 3)
    for x in (-36, -12, 8.5, 36):
        s.post(x, -8.3, 7.0, 2.2)
        s.post(x - 9, 9.6, 7.0, -2.2)
    for k in range(3):
        s.barrier(10.0 + 0.4 * k, -10.1 - 2.0 * k, 100)
    _build(s)


def _build(s: _Street) -> None:
    walls = ((0.66, 0.60, 0.52), (0.55, 0.36, 0.29), (0.70, 0.71, 0.72), (0.48, 0.52, 0.56), (0.76, 0.70, 0.58))
    k = 0
    for side, edge in ((-1, street.ROAD_Y[0] - 10.5), (1, street.ROAD_Y[1] + 10.5)):
        for lo, hi in ((-90.0, 8.0), (37.0, 130.0)):
            x = lo
            while x < hi - 6:
                length = min(float(s.rng.uniform(10, 22)), hi - x)
                height = float(s.rng.uniform(7, 20))
                depth = 14.0
                s.solids.append(
                    Solid((x + length / 2, edge + side * depth / 2, height / 2), (length - 0.6, depth, height), 0.0,
                          walls[k % len(walls)], "facade")
                )  # fmt: skip
                x, k = x + length, k + 1
    for y in (70.0, -70.0):
        s.solids.append(Solid((22.5, y, 7.0), (40.0, 8.0, 14.0), 0.0, walls[2], "facade"))
    s.solids.append(Solid((150.0, 0.6, 9.0), (8.0, 60.0, 18.0), 0.0, walls[3], "facade"))
    s.solids.append(Solid((-120.0, 0.6, 9.0), (8.0, 60.0, 18.0), 0.0, walls[0], "facade"))


def _shadows(solids: list[Solid]) -> list[tuple[np.ndarray, float, float]]:
    out = []
    for solid in solids:
        p = solid.surface()
        cast = p[:, :2] - raycast.SUN[:2] / raycast.SUN[2] * np.maximum(p[:, 2:], 0)
        out.append((cast, 0.42 if solid.material == "leaves" else 0.50, 0.25 if solid.round else 0.12))
        if solid.material == "body":  # the darkness right under a vehicle
            out.append((p[p[:, 2] < solid.centre[2]][:, :2], 0.80, 0.35))
    return out


def calibration(size: tuple[int, int]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, cam2img [3, 3], cam2ego [4, 4]) of the six cameras for images of (height, width)."""
    h, w = size
    out = []
    for name, heading, position, focal in RIG:
        a = math.radians(heading)
        c, s = math.cos(a), math.sin(a)
        cam2ego = np.eye(4)
        cam2ego[:3, :3] = np.stack([[s, -c, 0], [0, 0, -1], [c, s, 0]], 1)
        cam2ego[:3, 3] = position
        f = focal * w / 1600
        cam2img = np.array([[f, 0, 0.51 * w], [0, f, 0.546 * h], [0, 0, 1.0]])
        out.append((name, cam2img, cam2ego))
    return out


def generate(
    size: tuple[int, int] = (900, 1600), seed: int = SEED, progress: Callable[[str], None] = lambda text: None
) -> Frame:
    """Render the street: a `Frame` with six images of (height, width), LiDAR points, boxes and the truth.

    The result depends on `size` and `seed` alone.
    """
    progress("painting the ground")
    s = _Street(seed)
    _furnish(s)
    picture = street.paint_ground(_shadows(s.solids), seed)
    ground = raycast.GroundPicture(picture)
    cameras, seen = [], []
    for name, cam2img, cam2ego in calibration(size):
        progress(f"rendering {name}")
        image, mask = raycast.render(cam2img, cam2ego, size, ground, s.solids)
        cameras.append(Camera(name, image, cam2img, cam2ego))
        seen.append(mask)
    progress("casting LiDAR rays")
    points = raycast.lidar(np.array(LIDAR_ORIGIN), s.solids, seed)
    rows = np.array(s.rows)
    boxes = Boxes(rows[:, :3], rows[:, 3:6], rows[:, 6], tuple(s.labels))
    truth = Truth(picture, (street.X_RANGE[0], street.Y_RANGE[0]), street.STEP, tuple(seen))
    return Frame(f"generated street, seed {seed}", tuple(cameras), boxes, points, truth=truth)
