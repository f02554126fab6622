# SPDX-License-Identifier: Apache-2.0
"""The ground of the generated street as a picture from above: asphalt, markings, kerbs, pavement, grass, shadows.

Each element is a signed-distance or interval expression, anti-aliased over one texel, so that the picture is the truth
against which a bird's-eye view can be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

STEP = 0.05  # metres of one texel
X_RANGE = (-48.0, 62.0)
Y_RANGE = (-42.0, 42.0)
ROAD_Y = (-7.75, 9.0)  # kerb lines of the street along x
CROSS_X = (17.5, 27.5)  # kerb lines of the street along y
CORNER = 5.0  # radius of the kerb at the junction
LANE = 3.5
CENTRE_LINE = 1.75

WHITE = np.array([0.90, 0.90, 0.87], np.float32)
YELLOW = np.array([0.86, 0.66, 0.16], np.float32)

GLYPHS = {
    "B": ("####.", "#...#", "#...#", "####.", "#...#", "#...#", "####."),
    "U": ("#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."),
    "S": (".####", "#....", "#....", ".###.", "....#", "....#", "####."),
}


Span = tuple[float, float]
Shape = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (x, y) -> coverage in 0..1


class Canvas(NamedTuple):
    """Coordinates of the texel centres: x [1, nx], y [ny, 1]."""

    x: np.ndarray
    y: np.ndarray
    colour: np.ndarray


def _canvas() -> Canvas:
    x = np.arange(X_RANGE[0] + STEP / 2, X_RANGE[1], STEP, dtype=np.float32)[None, :]
    y = np.arange(Y_RANGE[0] + STEP / 2, Y_RANGE[1], STEP, dtype=np.float32)[:, None]
    return Canvas(x, y, np.zeros((y.shape[0], x.shape[1], 3), np.float32))


def _cover(distance: np.ndarray, soft: float = STEP) -> np.ndarray:
    """Coverage of a texel whose centre lies `distance` metres inside an edge (negative: outside)."""
    return np.clip(distance / soft + 0.5, 0.0, 1.0)


def _span(v: np.ndarray, lo: float, hi: float, soft: float = STEP) -> np.ndarray:
    return _cover(np.minimum(v - lo, hi - v), soft)


def _noise(rng: np.random.Generator, shape: tuple[int, int], cell: int) -> np.ndarray:
    """Smooth value noise in -1..1 with features of `cell` texels."""
    ny, nx = shape[0] // cell + 3, shape[1] // cell + 3
    grid = rng.uniform(-1, 1, (ny, nx)).astype(np.float32)

    def weights(n: int) -> tuple[np.ndarray, np.ndarray]:
        t = np.arange(n, dtype=np.float32) / cell
        i = t.astype(np.int64)
        f = t - i
        return i, f * f * (3 - 2 * f)

    i, fy = weights(shape[0])
    j, fx = weights(shape[1])
    rows = grid[i] * (1 - fy[:, None]) + grid[i + 1] * fy[:, None]
    return rows[:, j] * (1 - fx) + rows[:, j + 1] * fx


def depth_in_block(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(metres from the kerb into the block, negative on the road; metres along the kerb)."""
    px = np.abs(x - sum(CROSS_X) / 2) - (CROSS_X[1] - CROSS_X[0]) / 2
    py = np.abs(y - sum(ROAD_Y) / 2) - (ROAD_Y[1] - ROAD_Y[0]) / 2
    qx, qy = CORNER - px, CORNER - py
    corner = (qx > 0) & (qy > 0)
    depth = np.where(corner, CORNER - np.hypot(qx, qy), np.minimum(px, py))
    along = np.where(corner, np.arctan2(qy, qx) * CORNER, np.where(px > py, x + 0 * y, y + 0 * x))
    return depth, along


def _paint(colour: np.ndarray, coverage: np.ndarray, paint: np.ndarray, strength: float = 1.0) -> None:
    a = (coverage * strength)[..., None]
    colour += a * (paint - colour)


def _paint_patch(c: Canvas, x: Span, y: Span, shape: Shape, paint: np.ndarray, strength: float = 1.0) -> None:
    """Paint `shape(x, y)` (a coverage) inside a rectangle of the canvas only."""
    i = slice(*np.searchsorted(c.x[0], (x[0] - 0.2, x[1] + 0.2)))
    j = slice(*np.searchsorted(c.y[:, 0], (y[0] - 0.2, y[1] + 0.2)))
    _paint(c.colour[j, i], shape(c.x[:, i], c.y[j]), paint, strength)


def _rectangle(c: Canvas, x: Span, y: Span, paint: np.ndarray, strength: float = 1.0) -> None:
    _paint_patch(c, x, y, lambda u, v: _span(u, *x) * _span(v, *y), paint, strength)


def _arrow(c: Canvas, x: float, y: float, heading: int, turn: int) -> None:
    """A lane arrow, 5 m long, tail at x; heading +1 / -1 along x; turn: 0 straight, +1 also left, -1 also right."""

    def shape(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        a, b = (u - x) * heading, (v - y) * heading
        stem = _span(a, 0, 3.2) * _span(b, -0.1, 0.1)
        head = _cover(np.minimum(a - 3.0, (5.0 - a) * 0.30 - np.abs(b)))
        out = np.maximum(stem, head)
        if turn:
            t = b * turn
            arm = _span(a - 0.55 * t, 0.9, 1.25) * _span(t, 0.0, 0.75)
            tip = _cover(np.minimum(t - 0.6, 0.62 - np.abs(a - 1.45) - (t - 0.6) * 0.85))
            out = np.maximum(out, np.maximum(arm, tip))
        return out

    span = (x, x + 5.0) if heading > 0 else (x - 5.0, x)
    _paint_patch(c, span, (y - 1.5, y + 1.5), shape, WHITE, 0.95)


def _word(c: Canvas, text: str, x: float, y: float) -> None:
    """Letters 3.2 m tall, to be read by a driver heading along +x."""
    width, height = 0.22, 3.2 / 7
    for k, letter in enumerate(text):
        left = y + (len(text) * 6 - 1) * width / 2 - k * 6 * width
        for row, line in enumerate(GLYPHS[letter]):
            for column, dot in enumerate(line):
                if dot == "#":
                    x0, y1 = x + (6 - row) * height, left - column * width
                    _rectangle(c, (x0 - 0.01, x0 + height + 0.01), (y1 - width - 0.01, y1 + 0.01), WHITE, 0.92)


def _dashes(c: Canvas, y: float, spans: list[tuple[float, float]], paint: np.ndarray = WHITE) -> None:
    for lo, hi in spans:
        _rectangle(c, (lo, hi), (y - 0.08, y + 0.08), paint, 0.95)


def _road_markings(c: Canvas) -> None:
    before, after = (X_RANGE[0], 10.6), (34.4, X_RANGE[1])
    for lo, hi in (before, after):
        for side in (-0.14, 0.14):
            _rectangle(c, (lo, hi), (CENTRE_LINE + side - 0.055, CENTRE_LINE + side + 0.055), YELLOW)
        starts = np.arange(lo + 1.0, hi - 2.0, 5.0)
        for y in (CENTRE_LINE - LANE, CENTRE_LINE + LANE):
            _dashes(c, y, [(s, s + 2.2) for s in starts])
        _rectangle(c, (lo, hi), (-5.33, -5.19), WHITE, 0.9)
        _rectangle(c, (lo, hi), (8.62, 8.74), YELLOW, 0.9)
    for edge in np.arange(-46.0, 9.0, 5.6):  # parking bays
        _rectangle(c, (edge, edge + 0.1), (-7.6, -5.26), WHITE, 0.85)
    _rectangle(c, (10.6, 11.0), (-5.2, CENTRE_LINE - 0.2), WHITE)
    _rectangle(c, (34.0, 34.4), (CENTRE_LINE + 0.2, 8.6), WHITE)
    for lo in (12.3, 29.2):  # zebra crossings
        for y in np.arange(ROAD_Y[0] + 0.45, ROAD_Y[1] - 0.5, 1.0):
            _rectangle(c, (lo, lo + 3.2), (y, y + 0.5), WHITE, 0.96)
    for x in np.arange(CROSS_X[0] + 0.5, CROSS_X[1] - 0.5, 1.0):
        _rectangle(c, (x, x + 0.5), (-13.2, -10.4), WHITE, 0.94)
    middle = sum(CROSS_X) / 2
    for lo, hi in ((Y_RANGE[0], -15.0), (14.5, Y_RANGE[1])):
        for s in np.arange(lo, hi - 2.0, 4.0):
            _rectangle(c, (middle - 0.07, middle + 0.07), (s, s + 2.2), WHITE, 0.95)
    for x, y, heading, turn in (
        (4.4, 0.0, 1, 0), (4.4, -3.5, 1, -1), (-9.5, 0.0, 1, 0), (-9.5, -3.5, 1, -1), (-24.0, 0.0, 1, 0),
        (1.5, 3.5, -1, -1), (1.5, 7.0, -1, 0), (-17.5, 3.5, -1, 0), (-17.5, 7.0, -1, 0), (48.0, 3.5, -1, 0),
    ):  # fmt: skip
        _arrow(c, x, y, heading, turn)
    _word(c, "BUS", -15.5, -3.5)


def _surfaces(c: Canvas, rng: np.random.Generator) -> None:
    shape = c.colour.shape[:2]
    coarse, fine, grain = _noise(rng, shape, 90), _noise(rng, shape, 14), rng.normal(0, 1, shape).astype(np.float32)
    asphalt = np.array([0.335, 0.335, 0.345], np.float32)
    c.colour[:] = asphalt + (0.022 * coarse + 0.012 * fine + 0.010 * grain)[..., None]
    for lane in (-3.5, 0.0, 3.5, 7.0):  # tyre tracks
        for side in (-0.8, 0.8):
            track = np.exp(-(((c.y - lane - side) / 0.28) ** 2)) + 0 * c.x
            _paint(c.colour, track, asphalt * 0.8, 0.30)
    for x, y in (((-21.0, -16.2), (-1.6, 1.5)), ((1.2, 3.3), (-7.7, -2.0)), ((5.5, 13.0), (5.4, 8.5))):  # mended asphalt
        _rectangle(c, x, y, asphalt * 0.72, 0.8)
    depth, along = depth_in_block(c.x, c.y)
    grass = np.array([0.27, 0.40, 0.16], np.float32) * (1 + 0.22 * fine + 0.16 * coarse + 0.10 * grain)[..., None]
    plaza = np.array([0.60, 0.55, 0.48], np.float32) * (1 + 0.05 * coarse)[..., None]
    tile = np.array([0.66, 0.63, 0.58], np.float32) * (1 + 0.04 * coarse + 0.02 * grain)[..., None]
    joint = np.minimum(np.abs((c.x + 100) % 0.8 - 0.4), np.abs((c.y + 100) % 0.8 - 0.4))
    tile *= (1 - 0.25 * _cover(0.04 - joint))[..., None]
    for inside, surface in ((0.3, tile), (3.4, grass), (8.6, plaza)):
        a = _cover(depth - inside)[..., None]
        c.colour[:] = c.colour * (1 - a) + surface * a
    block = ((along + 200.0) // 1.0).astype(np.int32) % 2
    kerb = np.where(block[..., None] == 0, WHITE, np.array([0.13, 0.13, 0.14], np.float32))
    a = (_cover(depth) * _cover(0.3 - depth))[..., None]
    c.colour[:] = c.colour * (1 - a) + kerb * a
    for u, v in ((-3.0, 0.9), (8.3, -2.6), (-13.0, 4.4), (22.5, 0.3)):
        _manhole(c, u, v)


def _manhole(c: Canvas, x: float, y: float) -> None:
    iron = np.array([0.17, 0.16, 0.16], np.float32)
    around = (x - 0.4, x + 0.4), (y - 0.4, y + 0.4)
    _paint_patch(c, *around, lambda u, v: _cover(0.36 - np.hypot(u - x, v - y)), iron, 0.9)


def convex_hull(points: np.ndarray) -> np.ndarray:
    """Corners of the convex hull of points [n, 2], counter-clockwise."""
    order = sorted(map(tuple, points))

    def chain(sequence: list) -> list:
        out: list = []
        for p in sequence:
            while len(out) > 1 and (
                (out[-1][0] - out[-2][0]) * (p[1] - out[-2][1]) - (out[-1][1] - out[-2][1]) * (p[0] - out[-2][0]) <= 0
            ):
                out.pop()
            out.append(p)
        return out[:-1]

    return np.array(chain(order) + chain(order[::-1]))


def _shadow(c: Canvas, shade: np.ndarray, outline: np.ndarray, strength: float, soft: float) -> None:
    hull = convex_hull(outline)
    lo, hi = hull.min(0) - soft, hull.max(0) + soft
    i = slice(*np.searchsorted(c.x[0], (lo[0], hi[0])))
    j = slice(*np.searchsorted(c.y[:, 0], (lo[1], hi[1])))
    x, y = c.x[:, i], c.y[j]
    inside = np.full((y.shape[0], x.shape[1]), np.inf, np.float32)
    for p, q in zip(hull, np.roll(hull, -1, 0), strict=True):
        e = (q - p) / max(float(np.hypot(*(q - p))), 1e-9)
        inside = np.minimum(inside, e[0] * (y - p[1]) - e[1] * (x - p[0]))
    np.minimum(shade[j, i], 1 - strength * _cover(inside, soft), out=shade[j, i])


def paint_ground(outlines: list[tuple[np.ndarray, float, float]], seed: int) -> np.ndarray:
    """Ground picture [ny, nx, 3] in 0..1 over X_RANGE x Y_RANGE.

    outlines: (points [n, 2] whose convex hull is a shadow on the ground, strength 0..1, softness in metres).
    """
    rng = np.random.default_rng(seed)
    c = _canvas()
    _surfaces(c, rng)
    _road_markings(c)
    wear = _noise(rng, c.colour.shape[:2], 7)
    colour = c.colour
    colour *= (1 + 0.025 * wear)[..., None]
    shade = np.ones(c.colour.shape[:2], np.float32)
    for outline, strength, soft in outlines:
        _shadow(c, shade, outline, strength, soft)
    colour *= shade[..., None] ** np.array([1.05, 1.0, 0.9], np.float32)  # shade is bluish
    return np.clip(colour, 0, 1, out=colour)
