# SPDX-License-Identifier: Apache-2.0
"""Deformable aggregation in NumPy, written from the formula and from nothing else; imports NumPy only.

    a (point, camera) counts iff 0 < x < 1 and 0 < y < 1, both strictly, whatever the scale
    X = x*w - 0.5, Y = y*h - 0.5; corners outside the map are zero
    out[b,a,c] = sum over points, cameras, scales of  weight[.., c // (C/G)] * bilinear(map of the camera and scale, X, Y)

Sums run in float64.  Coordinates are computed in float64 and rounded once to ``geometry`` (float32: what the operator
promises; float64: the ideal), so that the cell of a sample never depends on the order of two roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Result:
    """Output and, after ``backward``, the three gradients; everything float64."""

    output: np.ndarray
    grad_feat: np.ndarray
    grad_location: np.ndarray
    grad_weights: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One map's samples, arrays of shape [B,A,P]: four corners (row, inside, factor), the fractions and who counts."""

    rows: list[np.ndarray]
    there: list[np.ndarray]
    factors: list[np.ndarray]
    fx: np.ndarray
    fy: np.ndarray
    counts: np.ndarray


def coordinate(location: np.ndarray, size: int, geometry: type = np.float32) -> np.ndarray:
    """location * size - 0.5 with a single rounding to ``geometry``, as float64."""
    wide = np.longdouble if geometry is np.float64 else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        return (location.astype(wide) * wide(size) - wide(0.5)).astype(geometry).astype(np.float64)


def visible(locations: np.ndarray) -> np.ndarray:
    """[B,A,P,cams]: strictly inside the unit square; a NaN or infinite location is not."""
    with np.errstate(invalid="ignore"):
        return ((locations > 0) & (locations < 1)).all(-1)


def sample(locations: np.ndarray, h: int, w: int, start: int, geometry: type) -> Sample:
    """Corners of one camera and scale; ``locations`` [B,A,P,2]."""
    counts = visible(locations)
    x = np.where(counts, coordinate(locations[..., 0], w, geometry), 0.0)
    y = np.where(counts, coordinate(locations[..., 1], h, geometry), 0.0)
    x0, y0 = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    fx, fy = x - x0, y - y0
    rows, there, factors = [], [], []
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inside = counts & (x0 + dx >= 0) & (x0 + dx < w) & (y0 + dy >= 0) & (y0 + dy < h)
        rows.append(np.where(inside, start + (y0 + dy) * w + x0 + dx, 0))
        there.append(inside)
        factors.append((fy if dy else 1 - fy) * (fx if dx else 1 - fx))
    return Sample(rows, there, factors, fx, fy, counts)


def fits(h: int, w: int, start: int, rows: int) -> bool:
    """A map that lies inside the rows of the features; any other contributes nothing."""
    return h > 0 and w > 0 and start >= 0 and start + h * w <= rows


def backward(grad_output, feat, shapes, starts, locations, weights, geometry: type = np.float32) -> Result:
    """Output [B,A,C] and the gradients of features, locations and weights, shaped like their arguments."""
    batch, rows, channels = feat.shape
    anchors, points = locations.shape[1:3]
    cameras, scales = shapes.shape[:2]
    groups = weights.shape[-1]
    feat, weights = feat.astype(np.float64), weights.astype(np.float64)
    upstream = np.broadcast_to(np.asarray(grad_output, np.float64)[:, :, None], (batch, anchors, points, channels))
    result = Result(
        np.zeros((batch, anchors, channels)), np.zeros(feat.shape), np.zeros(locations.shape), np.zeros(weights.shape)
    )
    b = np.arange(batch)[:, None, None]
    for camera in range(cameras):
        for scale in range(scales):
            h, w, start = (int(v) for v in (*shapes[camera, scale], starts[camera, scale]))
            if not fits(h, w, start, rows) or channels == 0:
                continue
            at = sample(locations[..., camera, :], h, w, start, geometry)
            # A weight of a sample outside is not looked at: it may be infinite.
            weight = np.where(at.counts[..., None], weights[:, :, :, camera, scale], 0.0)
            spread = np.repeat(weight, channels // groups, -1)
            corners = [np.where(inside[..., None], feat[b, row], 0.0) for row, inside in zip(at.rows, at.there, strict=True)]
            value = sum(factor[..., None] * corner for factor, corner in zip(at.factors, corners, strict=True))
            result.output[...] += (spread * value).sum(2)
            products = (upstream * value).reshape(batch, anchors, points, groups, channels // groups).sum(-1)
            result.grad_weights[:, :, :, camera, scale] = np.where(at.counts[..., None], products, 0.0)
            v00, v01, v10, v11 = corners
            along_x = (1 - at.fy)[..., None] * (v01 - v00) + at.fy[..., None] * (v11 - v10)
            along_y = (1 - at.fx)[..., None] * (v10 - v00) + at.fx[..., None] * (v11 - v01)
            result.grad_location[:, :, :, camera, 0] += np.where(at.counts, w * (upstream * spread * along_x).sum(-1), 0.0)
            result.grad_location[:, :, :, camera, 1] += np.where(at.counts, h * (upstream * spread * along_y).sum(-1), 0.0)
            for row, inside, factor in zip(at.rows, at.there, at.factors, strict=True):
                addend = (factor[..., None] * spread * upstream)[inside]
                np.add.at(result.grad_feat, (np.broadcast_to(b, row.shape)[inside], row[inside]), addend)
    return result


def forward(feat, shapes, starts, locations, weights, geometry: type = np.float32) -> np.ndarray:
    """Output [B,A,C] in float64."""
    nothing = np.zeros((feat.shape[0], locations.shape[1], feat.shape[2]))
    return backward(nothing, feat, shapes, starts, locations, weights, geometry).output


def starts_of(shapes: np.ndarray) -> np.ndarray:
    """Row of the first pixel of every map when they follow each other, camera by camera, scale by scale."""
    areas = shapes.reshape(-1, 2).prod(1)
    return (np.cumsum(areas) - areas).reshape(shapes.shape[:2]).astype(np.int64)


def near_cell_boundary(locations: np.ndarray, shapes: np.ndarray, distance: float) -> np.ndarray:
    """[B,A,P,cams]: visible samples with a coordinate this close to a pixel centre at some scale, where the slope jumps."""
    near = np.zeros(locations.shape[:-1], bool)
    with np.errstate(invalid="ignore"):
        for camera, maps in enumerate(shapes):
            for h, w in maps:
                for axis, size in ((0, w), (1, h)):
                    at = coordinate(locations[..., camera, axis], int(size), np.float64)
                    near[..., camera] |= np.abs(at - np.rint(at)) <= distance
    return near & visible(locations)
