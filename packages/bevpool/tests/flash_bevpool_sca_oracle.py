# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool_sca in NumPy, written from the formula and from nothing else; imports NumPy only, float64 throughout.

query q = y * X + x stands at a cell centre; anchor a is the point (centre, z_anchors[a])
(u', v', d) = P (x, y, z, 1); reference = (u' / max(d, eps) / image width, v' / max(d, eps) / image height)
camera n is hit by (b, q) iff some anchor has d > eps and 0 < reference < 1 in both coordinates, strictly
sample k of a hit camera stands at anchor k % A, moved by its offset in pixels of the level, visible or not:
    location = reference + offset / (w, h);  X = location * w - 0.5;  corners outside the map are zero
out[b,q] = sum over hit cameras, levels and k of  weight * bilinear(level, X, Y), divided by max(1, hit cameras)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class View:
    """The call without its tensors."""

    image_size: Sequence[float]
    roi_range: Sequence[float]
    grid_size: Sequence[int]
    z_anchors: Sequence[float] | None = None
    spatial_shapes: Sequence[Sequence[int]] | None = None
    eps: float = 1e-5
    average: str = "hit_cameras"

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> View:
        """That of a call, by the names of its arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    @property
    def anchors(self) -> np.ndarray:
        """Heights of the anchors: given, or the centres of the cells along z."""
        if self.z_anchors is not None:
            return np.asarray(self.z_anchors, np.float64)
        low, high = (float(v) for v in self.roi_range[4:6])
        count = int(self.grid_size[2])
        return low + (np.arange(count) + 0.5) * ((high - low) / count)


@dataclass(frozen=True)
class Result:
    output: np.ndarray
    grad_feats: np.ndarray
    grad_offsets: np.ndarray
    grad_weights: np.ndarray


def references(projections: np.ndarray, view: View) -> tuple[np.ndarray, np.ndarray]:
    """Normalised image places [B,N,Q,A,2] and depths [B,N,Q,A] of the anchors."""
    x_count, y_count = int(view.grid_size[0]), int(view.grid_size[1])
    x_min, x_max, y_min, y_max = (float(v) for v in view.roi_range[:4])
    x = x_min + (np.arange(x_count) + 0.5) * ((x_max - x_min) / max(x_count, 1))
    y = y_min + (np.arange(y_count) + 0.5) * ((y_max - y_min) / max(y_count, 1))
    at = np.stack([np.tile(x, y_count), np.repeat(y, x_count)], -1)
    heights = view.anchors
    points = np.concatenate(
        [
            np.broadcast_to(at[:, None], (len(at), len(heights), 2)),
            np.broadcast_to(heights[None, :, None], (len(at), len(heights), 1)),
            np.ones((len(at), len(heights), 1)),
        ],
        -1,
    )
    with np.errstate(all="ignore"):
        seen = np.einsum("bnij,qaj->bnqai", np.asarray(projections, np.float64)[:, :, :3], points)
        depth = seen[..., 2]
        place = seen[..., :2] / np.maximum(depth, view.eps)[..., None]
        return place / np.array([view.image_size[1], view.image_size[0]], np.float64), depth


def hits(projections: np.ndarray, view: View, slack: float = 0.0) -> np.ndarray:
    """[B,N,Q]: which camera sees which pillar.  ``slack`` widens (or narrows) the test."""
    place, depth = references(projections, view)
    with np.errstate(invalid="ignore"):
        visible = (depth > view.eps - slack) & ((place > -slack) & (place < 1 + slack)).all(-1)
    return visible.any(-1)


def levels_of(image_feats: np.ndarray, view: View) -> list[tuple[int, int, int]]:
    """(h, w, first row) of every level."""
    if view.spatial_shapes is None:
        return [(image_feats.shape[2], image_feats.shape[3], 0)]
    areas = [int(h) * int(w) for h, w in view.spatial_shapes]
    return [(int(h), int(w), sum(areas[:i])) for i, (h, w) in enumerate(view.spatial_shapes)]


def completed(image_feats, offsets, weights, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features as [B,N,S,C], offsets and weights with what None stands for: zeros, and equal shares."""
    batch, cameras, channels = *image_feats.shape[:2], image_feats.shape[-1]
    feats = image_feats.reshape(batch, cameras, int(np.prod(image_feats.shape[2:-1])), channels).astype(np.float64)
    levels = len(levels_of(image_feats, view))
    queries = int(view.grid_size[0]) * int(view.grid_size[1])
    given = weights if offsets is None else offsets
    heads, points = (1, len(view.anchors)) if given is None else (given.shape[2], given.shape[4])
    shape = (batch, queries, heads, levels, points)
    if offsets is None:
        offsets = np.zeros((*shape, 2))
    if weights is None:
        weights = np.full(shape, 1.0 / max(levels * points, 1))
    return feats, offsets.astype(np.float64), weights.astype(np.float64)


def pixels(place: np.ndarray, offset: np.ndarray, h: int, w: int) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        return place[..., 0] * w + offset[..., 0] - 0.5, place[..., 1] * h + offset[..., 1] - 0.5


def near_cell_boundary(projections, offsets, levels, view: View, distance: float = 1e-4) -> np.ndarray:
    """Shape of the weights: a hit camera's sample this close to a pixel centre, where its slope jumps."""
    place, _ = references(projections, view)
    hit = hits(projections, view)
    near = np.zeros(offsets.shape[:-1], bool)
    for n in range(hit.shape[1]):
        for level, (h, w, _) in enumerate(levels):
            for k in range(near.shape[-1]):
                at = place[:, n, :, None, k % place.shape[3]]
                for axis, size in zip(pixels(at, offsets[:, :, :, level, k], h, w), (w, h), strict=True):
                    inside = (axis > -1 - distance) & (axis < size + distance)
                    with np.errstate(invalid="ignore"):
                        near[:, :, :, level, k] |= hit[:, n, :, None] & inside & (np.abs(axis - np.rint(axis)) <= distance)
    return near


def backward(grad_output, image_feats, projections, offsets, weights, view: View) -> Result:
    """Output [B,Q,C] and the gradients of features, offsets and weights (of what None stands for, too)."""
    feats, offsets, weights = completed(image_feats, offsets, weights, view)
    batch, cameras, _, channels = feats.shape
    queries, heads, _, points = weights.shape[1:]
    width = channels // heads if heads else 0
    hit = hits(projections, view)
    place, _ = references(projections, view)
    share = 1.0 / np.maximum(hit.sum(1), 1) if view.average == "hit_cameras" else np.ones((batch, queries))
    g = np.asarray(grad_output, np.float64).reshape(batch, queries, heads, width) * share[..., None, None]
    output = np.zeros((batch, queries, heads, width))
    grad_offsets, grad_weights = np.zeros(offsets.shape), np.zeros(weights.shape)
    by_head = feats.reshape(batch, cameras, feats.shape[2], heads, width)
    of_feats = np.zeros(by_head.shape)
    for n in range(cameras):
        for level, (h, w, start) in enumerate(levels_of(image_feats, view)):
            for k in range(points):
                at = place[:, n, :, None, k % place.shape[3]]
                x, y = pixels(at, offsets[:, :, :, level, k], h, w)
                sample = (n, start, h, w, hit[:, n, :, None], x, y)
                value, along_x, along_y, corners = _bilinear(by_head, *sample)
                inside = corners[-1]
                weight = np.where(inside, weights[:, :, :, level, k], 0.0)
                output += weight[..., None] * value
                grad_weights[:, :, :, level, k] += np.where(inside, (g * value).sum(-1), 0.0)
                slopes = np.stack([(g * along_x).sum(-1), (g * along_y).sum(-1)], -1)
                grad_offsets[:, :, :, level, k] += np.where(inside[..., None], weight[..., None] * slopes, 0.0)
                for row, there, factor in zip(*corners[:3], strict=True):
                    b, _, head = np.indices(row.shape)
                    chosen = (b[there], n, row[there], head[there])
                    np.add.at(of_feats, chosen, ((factor * weight)[..., None] * g)[there])
    output = (output * share[..., None, None]).reshape(batch, queries, channels)
    return Result(output, of_feats.reshape(image_feats.shape), grad_offsets, grad_weights)


def _bilinear(by_head, n, start, h, w, hit, x, y):
    """Sample, its slopes, and (rows, there, factors, inside), over [B,Q,heads]."""
    with np.errstate(invalid="ignore"):
        inside = hit & (x > -1) & (x < w) & (y > -1) & (y < h)
    x, y = np.where(inside, x, 0.0), np.where(inside, y, 0.0)
    x0, y0 = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    fx, fy = x - x0, y - y0
    b, _, head = np.indices(x.shape)
    rows, there, factors, vectors = [], [], [], []
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        within = inside & (x0 + dx >= 0) & (x0 + dx < w) & (y0 + dy >= 0) & (y0 + dy < h)
        row = np.where(within, start + (y0 + dy) * w + x0 + dx, 0)
        rows.append(row)
        there.append(within)
        factors.append((fy if dy else 1 - fy) * (fx if dx else 1 - fx))
        found = by_head[b, n, row, head] if by_head.shape[2] else np.zeros((*x.shape, by_head.shape[-1]))
        vectors.append(np.where(within[..., None], found, 0.0))
    v00, v01, v10, v11 = vectors
    value = sum(f[..., None] * v for f, v in zip(factors, vectors, strict=True))
    along_x = (1 - fy)[..., None] * (v01 - v00) + fy[..., None] * (v11 - v10)
    along_y = (1 - fx)[..., None] * (v10 - v00) + fx[..., None] * (v11 - v01)
    return value, along_x, along_y, (rows, there, factors, inside)
