# SPDX-License-Identifier: Apache-2.0
"""Ray casting of the generated street: camera images and a spinning LiDAR. NumPy only.

A solid is a box or an ellipsoid standing in the ego frame. A camera image is made in three layers: sky, the ground
looked up in the picture of `street`, and the solids from near to far with a depth buffer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import street

SUN = np.array([0.38, -0.42, 0.82], np.float32) / np.float32(np.sqrt(0.38**2 + 0.42**2 + 0.82**2))
EDGES = [(a, b) for a in range(8) for b in range(a + 1, 8) if (a ^ b) in (1, 2, 4)]


@dataclass(frozen=True)
class Solid:
    """round=False: box of full size `size`; round=True: ellipsoid of diameters `size`."""

    centre: tuple[float, float, float]
    size: tuple[float, float, float]
    yaw: float
    colour: tuple[float, float, float]
    material: str = "plain"  # plain | facade | body | cabin | leaves | stripes
    round: bool = False

    def corners(self) -> np.ndarray:
        unit = np.array([[(k >> i & 1) - 0.5 for i in range(3)] for k in range(8)])
        return self._to_ego(unit * self.size)

    def surface(self) -> np.ndarray:
        """Points whose hull is the solid."""
        if not self.round:
            return self.corners()
        a, b = np.meshgrid(np.linspace(0, 2 * np.pi, 16, endpoint=False), np.linspace(-1.4, 1.4, 7))
        unit = np.stack([np.cos(a) * np.cos(b), np.sin(a) * np.cos(b), np.sin(b)], -1).reshape(-1, 3) / 2
        return self._to_ego(unit * self.size)

    def _to_ego(self, p: np.ndarray) -> np.ndarray:
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        return np.stack([c * p[:, 0] - s * p[:, 1], s * p[:, 0] + c * p[:, 1], p[:, 2]], -1) + self.centre

    def intersect(self, origin: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rays origin + t d (d [n, 3]) -> hit [n], t [n], and d, origin in the solid's own axes as one array [n+1, 3]."""
        c, s = np.float32(math.cos(self.yaw)), np.float32(math.sin(self.yaw))
        turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], np.float32)
        o = (origin - np.array(self.centre)).astype(np.float32) @ turn
        v = d @ turn
        half = np.array(self.size, np.float32) / 2
        if self.round:
            a, b = v / half, o / half
            qa, qb, qc = (a * a).sum(1), a @ b, float(b @ b) - 1
            disc = qb * qb - qa * qc
            hit = disc > 0
            t = (-qb - np.sqrt(np.where(hit, disc, 0))) / qa
        else:
            inv = 1 / np.where(np.abs(v) < 1e-9, np.float32(1e-9), v)
            near = -o * inv
            reach = half * np.abs(inv)
            t, far = (near - reach).max(1), (near + reach).min(1)
            hit = t < far
        return hit & (t > 0.05), t, np.concatenate([v, o[None]])


def _face(solid: Solid, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outward normal in the solid's axes [n, 3] and the index of the face's axis [n]."""
    half = np.array(solid.size, np.float32) / 2
    if solid.round:
        n = p / (half * half)
        return n / np.linalg.norm(n, axis=1, keepdims=True), np.full(len(p), 2)
    axis = np.abs(np.abs(p) / half - 1).argmin(1)
    n = np.zeros_like(p)
    rows = np.arange(len(p))
    n[rows, axis] = np.sign(p[rows, axis])
    return n, axis


def _material(solid: Solid, p: np.ndarray, axis: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """Albedo [n, 3] at points p in the solid's axes."""
    half = np.array(solid.size, np.float32) / 2
    colour = np.tile(np.array(solid.colour, np.float32), (len(p), 1))
    up = p[:, 2] + half[2]  # above the solid's foot
    along = np.where(axis == 0, p[:, 1], p[:, 0])
    if solid.material == "facade":
        u, v = (along + 300) % 3.0 / 3.0, (up - 0.6) % 3.2 / 3.2
        glass = (axis != 2) & (u > 0.18) & (u < 0.86) & (v > 0.30) & (v < 0.80) & (up > 0.6)
        tone = 0.30 + 0.10 * np.sin(((along + 300) // 3) * 12.9 + (up // 3.2) * 78.2)
        colour[glass] = tone[glass, None] * np.array([0.75, 0.95, 1.15], np.float32)
        colour[(axis != 2) & (up % 3.2 < 0.12)] *= 0.8
    elif solid.material == "body":
        side = axis == 1
        wheel = np.hypot(np.abs(p[:, 0]) - 0.31 * solid.size[0], up - 0.16)
        colour[side & (wheel < 0.34)] = (0.06, 0.06, 0.065)
        colour[side & (wheel < 0.19)] = (0.55, 0.55, 0.57)
        end = axis == 0
        colour[end & (up < 0.22)] *= 0.35
        lamp = end & (np.abs(p[:, 1]) > half[1] * 0.55) & (up > 0.42) & (up < 0.62)
        colour[lamp & (sign > 0)] = (0.98, 0.97, 0.90)
        colour[lamp & (sign < 0)] = (0.75, 0.05, 0.05)
        plate = end & (np.abs(p[:, 1]) < 0.27) & (up > 0.25) & (up < 0.38)
        colour[plate] = (0.9, 0.9, 0.85)
    elif solid.material == "cabin":
        wide = np.where(axis == 0, half[1], half[0])
        window = (axis != 2) & (np.abs(along) < wide - 0.10) & (up > 0.05) & (up < solid.size[2] - 0.07)
        window &= (axis == 0) | (np.abs(along + 0.1) > 0.06)
        colour[window] = (0.10, 0.13, 0.16)
    elif solid.material == "leaves":
        rough = np.sin(p[:, 0] * 9.1) * np.sin(p[:, 1] * 8.3 + 1) * np.sin(p[:, 2] * 9.7 + 2)
        rough += 0.6 * np.sin(p[:, 0] * 23 + p[:, 2] * 19) * np.sin(p[:, 1] * 21)
        colour *= (1 + 0.30 * rough)[:, None]
    elif solid.material == "stripes":
        colour[((along + up + 50) // 0.35).astype(int) % 2 == 0] = (0.92, 0.92, 0.90)
    return colour


def shade(solid: Solid, rays: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Colour [n, 3] where rays (directions [n, 3] and, last, the origin, in the solid's axes) meet the solid at t [n]."""
    p = rays[:-1] * t[:, None] + rays[-1]
    normal, axis = _face(solid, p)
    c, s = math.cos(solid.yaw), math.sin(solid.yaw)
    sun = np.array([c * SUN[0] + s * SUN[1], -s * SUN[0] + c * SUN[1], SUN[2]], np.float32)
    sign = normal[np.arange(len(p)), axis]
    light = 0.50 + 0.12 * normal[:, 2] + 0.55 * np.maximum(normal @ sun, 0)
    return np.clip(_material(solid, p, axis, sign) * light[:, None], 0, 1)


def _window(
    solid: Solid, rotation: np.ndarray, origin: np.ndarray, cam2img: np.ndarray, size: tuple[int, int]
) -> tuple[slice, slice, float] | None:
    """Rows and columns (slices) of an image that can show the solid and its least depth there, or None."""
    local = (solid.corners() - origin) @ rotation
    near = 0.1
    points = [p for p in local if p[2] >= near]
    for a, b in EDGES:
        za, zb = local[a, 2], local[b, 2]
        if (za < near) != (zb < near):
            points.append(local[a] + (local[b] - local[a]) * (near - za) / (zb - za))
    if not points:
        return None
    least = max(near, min(float(p[2]) for p in points))
    pixel = np.array(points) @ cam2img.T
    uv = pixel[:, :2] / pixel[:, 2:]
    (u0, v0), (u1, v1) = np.floor(uv.min(0)) - 1, np.ceil(uv.max(0)) + 1
    h, w = size
    u0, u1, v0, v1 = (int(np.clip(k, 0, n)) for k, n in ((u0, w), (u1, w), (v0, h), (v1, h)))
    return (slice(v0, v1), slice(u0, u1), least) if u1 > u0 and v1 > v0 else None


def _sky(d: np.ndarray) -> np.ndarray:
    """Colour of directions [n, 3] above the horizon: a gradient with a few flat clouds."""
    up = d[:, 2] / np.linalg.norm(d, axis=1)
    t = np.clip(up / 0.45, 0, 1)[:, None] ** 0.6
    colour = np.array([0.86, 0.91, 0.96], np.float32) * (1 - t) + np.array([0.36, 0.58, 0.86], np.float32) * t
    a = np.arctan2(d[:, 1], d[:, 0])
    q = 1 / np.maximum(up, 0.04)
    cloud = np.sin(3 * a + 0.6 * q) + 0.7 * np.sin(7 * a - 0.9 * q + 1) + 0.5 * np.sin(13 * a + 1.7 * q)
    a = (np.clip(cloud - 0.4, 0, 1) * np.clip(up * 8, 0, 1) * 0.7)[:, None]
    return colour * (1 - a) + a * np.array([0.97, 0.97, 0.97], np.float32)


class GroundPicture:
    """Bilinear look-up in the picture of the ground, in two resolutions (far rays read the coarse one)."""

    def __init__(self, picture: np.ndarray) -> None:
        ny, nx = picture.shape[0] // 4 * 4, picture.shape[1] // 4 * 4
        coarse = picture[:ny, :nx].reshape(ny // 4, 4, nx // 4, 4, 3).mean((1, 3))
        self.levels = [(picture, street.STEP), (np.ascontiguousarray(coarse), street.STEP * 4)]

    def __call__(self, x: np.ndarray, y: np.ndarray, level: int) -> np.ndarray:
        picture, step = self.levels[level]
        ny, nx = picture.shape[:2]
        fx = np.clip((x - street.X_RANGE[0]) / step - 0.5, 0, nx - 1.001)
        fy = np.clip((y - street.Y_RANGE[0]) / step - 0.5, 0, ny - 1.001)
        i, j = fx.astype(np.int32), fy.astype(np.int32)
        fx, fy = (fx - i)[:, None], (fy - j)[:, None]
        flat = picture.reshape(-1, 3)
        k = j * nx + i
        top = flat[k] * (1 - fx) + flat[k + 1] * fx
        return top * (1 - fy) + (flat[k + nx] * (1 - fx) + flat[k + nx + 1] * fx) * fy


def render(
    cam2img: np.ndarray, cam2ego: np.ndarray, size: tuple[int, int], ground: GroundPicture, solids: list[Solid]
) -> tuple[np.ndarray, np.ndarray]:
    """Image uint8 [h, w, 3] and the mask [h, w] of pixels that show the ground."""
    h, w = size
    rotation, origin = cam2ego[:3, :3], cam2ego[:3, 3]
    u = ((np.arange(w) + 0.5 - cam2img[0, 2]) / cam2img[0, 0]).astype(np.float32)
    v = ((np.arange(h) + 0.5 - cam2img[1, 2]) / cam2img[1, 1]).astype(np.float32)
    r = rotation.astype(np.float32)
    d = u[None, :, None] * r[:, 0] + v[:, None, None] * r[:, 1] + r[:, 2]  # [h, w, 3], depth along the axis = t
    colour = np.empty((h, w, 3), np.float32)
    depth = np.full((h, w), np.inf, np.float32)
    down = d[..., 2] < -1e-4
    depth[down] = -np.float32(origin[2]) / d[..., 2][down]
    owner = np.full((h, w), -1, np.int32)
    hits = {}
    centres = np.array([s.centre for s in solids])
    for k in np.argsort(np.linalg.norm(centres - origin, axis=1)):
        window = _window(solids[k], rotation, origin, cam2img, size)
        if window is None:
            continue
        rows, columns, least = window
        index = np.flatnonzero(depth[rows, columns] > least)
        hit, t, rays = solids[k].intersect(origin, d[rows, columns].reshape(-1, 3)[index])
        hit &= t < depth[rows, columns].reshape(-1)[index]
        jj, ii = np.divmod(index[hit], columns.stop - columns.start)
        jj, ii = jj + rows.start, ii + columns.start
        depth[jj, ii], owner[jj, ii] = t[hit], k
        hits[int(k)] = (jj, ii, t[hit], np.concatenate([rays[:-1][hit], rays[-1:]]))
    for k, (jj, ii, t, rays) in hits.items():
        keep = owner[jj, ii] == k
        colour[jj[keep], ii[keep]] = shade(solids[k], rays[np.append(keep, True)], t[keep])
    seen = down & (owner < 0)
    sky = ~down & (owner < 0)
    colour[sky] = _sky(d[sky])
    for level, part in ((0, seen & (depth < 22)), (1, seen & (depth >= 22))):
        reached = d[part][:, :2] * depth[part][:, None] + origin[:2].astype(np.float32)
        colour[part] = ground(reached[:, 0], reached[:, 1], level)
    return (np.clip(colour, 0, 1) * 255 + 0.5).astype(np.uint8), seen


def lidar(origin: np.ndarray, solids: list[Solid], seed: int, beams: int = 32, azimuths: int = 1084) -> np.ndarray:
    """Points [n, 3] (ego frame) of one turn of a 32-beam sensor at `origin`, with 15 mm range noise and drop-outs."""
    rng = np.random.default_rng(seed)
    elevation = np.radians(np.linspace(-30.67, 10.67, beams))
    a, e = np.meshgrid(np.linspace(-np.pi, np.pi, azimuths, endpoint=False), elevation, indexing="ij")
    d = np.stack([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)], -1).reshape(-1, 3).astype(np.float32)
    reach = np.where(d[:, 2] < -1e-3, -origin[2] / np.minimum(d[:, 2], -1e-3), np.inf)
    heading = a.reshape(-1)
    for solid in solids:
        offset = np.array(solid.centre[:2]) - origin[:2]
        distance, radius = float(np.hypot(*offset)), math.hypot(*solid.size[:2]) / 2
        index = np.arange(len(d))
        if distance > radius + 0.1:
            away = np.abs((heading - math.atan2(offset[1], offset[0]) + np.pi) % (2 * np.pi) - np.pi)
            index = np.flatnonzero(away < math.asin(radius / distance) + 0.01)
        hit, t, _ = solid.intersect(origin, d[index])
        closer = hit & (t < reach[index])
        reach[index[closer]] = t[closer]
    keep = (reach > 1.0) & (reach < 80) & (rng.uniform(size=len(d)) > 0.03 + 0.2 * np.clip((reach - 40) / 40, 0, 1))
    reach = reach[keep] + rng.normal(0, 0.015, int(keep.sum()))
    return (d[keep] * reach[:, None] + origin).astype(np.float32)
