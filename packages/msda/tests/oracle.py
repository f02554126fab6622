# SPDX-License-Identifier: Apache-2.0
"""Multi-scale deformable attention in NumPy, written from the formula and from nothing else; imports NumPy only.

    X = x*w - 0.5, Y = y*h - 0.5; a sample counts iff -1 < X < w and -1 < Y < h
    out[b,q,head] = sum over levels and points of  A * bilinear(value of the level, X, Y), corners outside are zero

Sums run in float64.  Coordinates are computed in float64 and rounded once to ``geometry`` (float32: what the operator
promises; float64: the ideal), so that an inside/outside decision never depends on the order of two roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Distance to a cell boundary, in pixels, within which float32 and float64 coordinates may lie in different cells.
BOUNDARY = 3e-5


@dataclass(frozen=True)
class Result:
    """Output and, after ``backward``, the three gradients; everything float64."""

    output: np.ndarray
    grad_value: np.ndarray | None = None
    grad_locations: np.ndarray | None = None
    grad_weights: np.ndarray | None = None


def starts(shapes: np.ndarray) -> np.ndarray:
    """Exclusive cumulative sum of h*w."""
    areas = np.asarray(shapes, np.int64).reshape(-1, 2).prod(1)
    return np.concatenate([[0], np.cumsum(areas)[:-1]]).astype(np.int64)


def coordinates(locations: np.ndarray, shapes: np.ndarray, geometry: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """(X, Y) of every sample, float64 arrays holding values representable in ``geometry``."""
    size = np.asarray(shapes, np.float64)[:, None, :]
    wide = np.longdouble if geometry is np.float64 else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        x = locations[..., 0].astype(wide) * size[..., 1].astype(wide) - wide(0.5)
        y = locations[..., 1].astype(wide) * size[..., 0].astype(wide) - wide(0.5)
        return x.astype(geometry).astype(np.float64), y.astype(geometry).astype(np.float64)


def near_boundary(locations: np.ndarray, shapes: np.ndarray, distance: float = BOUNDARY) -> np.ndarray:
    """Samples so close to an integer coordinate that their location gradient may come from the neighbouring cell."""
    x, y = coordinates(locations, shapes, np.float64)
    with np.errstate(invalid="ignore"):
        return (np.abs(x - np.rint(x)) <= distance) | (np.abs(y - np.rint(y)) <= distance)


def _level(value, start, h, w, x, y):
    """Corner vectors of one level: (v00, v01, v10, v11, fx, fy, inside, corner list) for x, y of shape [B,Q,H,P]."""
    batch, _, heads, _ = value.shape
    grid = value[:, start : start + h * w].astype(np.float64)
    with np.errstate(invalid="ignore"):
        inside = (x > -1) & (x < w) & (y > -1) & (y < h)
    x, y = np.where(inside, x, 0.0), np.where(inside, y, 0.0)
    x0, y0 = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    b = np.arange(batch)[:, None, None, None]
    head = np.arange(heads)[None, None, :, None]
    corners = []
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        cx, cy = x0 + dx, y0 + dy
        there = inside & (cx >= 0) & (cx < w) & (cy >= 0) & (cy < h)
        row = np.where(there, cy * w + cx, 0)
        vector = np.where(there[..., None], grid[b, row, head], 0.0) if h * w else np.zeros((*x.shape, value.shape[-1]))
        corners.append((vector, there, start + row))
    return corners, x - x0, y - y0, inside


def _samples(value, shapes, level_starts, locations, geometry):
    """Yields (level, corners, corner weights, fx, fy, inside)."""
    shapes = np.asarray(shapes, np.int64).reshape(-1, 2)
    level_starts = starts(shapes) if level_starts is None else np.asarray(level_starts, np.int64)
    x, y = coordinates(locations, shapes, geometry)
    for level, (h, w) in enumerate(shapes):
        corners, fx, fy, inside = _level(value, int(level_starts[level]), int(h), int(w), x[..., level, :], y[..., level, :])
        factors = ((1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx)
        yield level, (int(h), int(w)), corners, factors, fx, fy, inside


def forward(value, shapes, level_starts, locations, weights, geometry: type = np.float32) -> np.ndarray:
    """Output [B,Q,H*D] in float64.  ``level_starts`` may be ``None``."""
    batch, queries, heads = locations.shape[:3]
    output = np.zeros((batch, queries, heads, value.shape[-1]))
    for level, _, corners, factors, _, _, inside in _samples(value, shapes, level_starts, locations, geometry):
        attention = np.where(inside, weights[..., level, :].astype(np.float64), 0.0)
        for (vector, there, _), factor in zip(corners, factors, strict=True):
            # A corner outside adds nothing, whatever the weight: 0 * Inf must not become NaN.
            scale = np.where(there, attention * factor, 0.0)
            output += (scale[..., None] * vector).sum(-2)
    return output.reshape(batch, queries, heads * value.shape[-1])


def backward(grad_output, value, shapes, level_starts, locations, weights, geometry: type = np.float32) -> Result:
    """Output and the gradients of value, locations and weights, all float64, shaped like their arguments."""
    batch, queries, heads = locations.shape[:3]
    g = np.asarray(grad_output, np.float64).reshape(batch, queries, heads, 1, value.shape[-1])
    grad_value = np.zeros(value.shape)
    grad_locations = np.zeros(locations.shape)
    grad_weights = np.zeros(weights.shape)
    b = np.arange(batch)[:, None, None, None]
    head = np.arange(heads)[None, None, :, None]
    for level, (h, w), corners, factors, fx, fy, inside in _samples(value, shapes, level_starts, locations, geometry):
        attention = np.where(inside, weights[..., level, :].astype(np.float64), 0.0)
        v00, v01, v10, v11 = (corner[0] for corner in corners)
        sample = sum(f[..., None] * corner[0] for f, corner in zip(factors, corners, strict=True))
        along_x = (1 - fy)[..., None] * (v01 - v00) + fy[..., None] * (v11 - v10)
        along_y = (1 - fx)[..., None] * (v10 - v00) + fx[..., None] * (v11 - v01)
        grad_weights[..., level, :] = np.where(inside, (g * sample).sum(-1), 0.0)
        grad_locations[..., level, :, 0] = np.where(inside, attention * w * (g * along_x).sum(-1), 0.0)
        grad_locations[..., level, :, 1] = np.where(inside, attention * h * (g * along_y).sum(-1), 0.0)
        for (_, there, row), factor in zip(corners, factors, strict=True):
            scale = np.where(there, attention * factor, 0.0)
            target = np.broadcast_arrays(b, row, head)
            chosen = np.nonzero(there)
            addend = (scale[..., None] * np.broadcast_to(g, (*scale.shape, g.shape[-1])))[chosen]
            np.add.at(grad_value, tuple(axis[chosen] for axis in target), addend)
    return Result(forward(value, shapes, level_starts, locations, weights, geometry), grad_value, grad_locations, grad_weights)


def legacy_alias(locations: np.ndarray, weights: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel reads that takes the number of levels from the shapes alone: a prefix of the flat buffers."""
    batch, queries, heads, _, points = weights.shape
    count = batch * queries * heads * levels
    shape = (batch, queries, heads, levels, points)
    return locations.reshape(-1, points, 2)[:count].reshape(*shape, 2), weights.reshape(-1, points)[:count].reshape(shape)
