# SPDX-License-Identifier: Apache-2.0
"""BEVDet's second pooling in NumPy, written from the formula and from nothing else; imports NumPy only.

    out[cell] = sum of  depth[ranks_depth[k]] * feat[ranks_feat[k], :]  over the points k of intervals with ranks_bev[k] = cell

A point counts as often as intervals hold it; a point with a rank outside its array is dropped.  Sums run in float64.
"""

from __future__ import annotations

import numpy as np


def covered(interval_starts, interval_lengths, points: int) -> np.ndarray:
    """Point numbers in the order of the intervals; what an interval holds beyond the points is left out."""
    parts = [np.zeros(0, np.int64)]
    for start, length in zip(np.asarray(interval_starts).tolist(), np.asarray(interval_lengths).tolist(), strict=True):
        # Python integers: no sum wraps.
        parts.append(np.arange(min(max(start, 0), points), min(max(start + length, 0), points), dtype=np.int64))
    return np.concatenate(parts)


def kept(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths):
    """Ranks (depth, feat, bev) of the points that count, int64."""
    cells = int(np.prod(bev_feat_shape[:4]))
    limits = (np.size(depth), int(np.prod(np.shape(feat)[:-1])), cells)
    chosen = covered(interval_starts, interval_lengths, len(ranks_bev))
    ranks = [np.asarray(r).astype(np.int64)[chosen] for r in (ranks_depth, ranks_feat, ranks_bev)]
    inside = np.ones(len(chosen), bool)
    for rank, limit in zip(ranks, limits, strict=True):
        inside &= (rank >= 0) & (rank < limit)
    return [rank[inside] for rank in ranks]


def forward(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths) -> np.ndarray:
    rd, rf, rb = kept(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths)
    rows = np.asarray(feat, np.float64).reshape(int(np.prod(np.shape(feat)[:-1])), np.shape(feat)[-1])
    flat = np.zeros((int(np.prod(bev_feat_shape[:4])), rows.shape[1]))
    np.add.at(flat, rb, np.asarray(depth, np.float64).reshape(-1)[rd, None] * rows[rf])
    return np.ascontiguousarray(np.moveaxis(flat.reshape(*bev_feat_shape[:4], rows.shape[1]), -1, 1))


def backward(
    grad_output, depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths
) -> dict[str, np.ndarray]:
    """Both gradients accumulate: a depth number or a feature row may be used by many points."""
    rd, rf, rb = kept(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths)
    channels = np.shape(feat)[-1]
    rows = np.asarray(feat, np.float64).reshape(int(np.prod(np.shape(feat)[:-1])), channels)
    weights = np.asarray(depth, np.float64).reshape(-1)
    g = np.moveaxis(np.asarray(grad_output, np.float64), 1, -1).reshape(int(np.prod(bev_feat_shape[:4])), channels)
    grad_depth, grad_rows = np.zeros(weights.shape), np.zeros(rows.shape)
    np.add.at(grad_depth, rd, (g[rb] * rows[rf]).sum(1))
    np.add.at(grad_rows, rf, weights[rd, None] * g[rb])
    return {"depth": grad_depth.reshape(np.shape(depth)), "feat": grad_rows.reshape(np.shape(feat))}


def ranks(points, lower_bound, interval, grid_size) -> tuple[np.ndarray, ...]:
    """Ranks of frustum points [B, N, D, fH, fW, 3]: coordinates in float32, truncated toward zero, then integers only."""
    points = np.asarray(points, np.float32)
    cameras, bins, height, width = points.shape[1:5]
    X, Y, Z = (int(n) for n in grid_size)
    with np.errstate(invalid="ignore", over="ignore"):
        place = np.trunc((points - np.asarray(lower_bound, np.float32)) / np.asarray(interval, np.float32))
        inside = ((place >= 0) & (place < np.array([X, Y, Z]))).all(-1).reshape(-1)  # -0.0 counts as 0, NaN never
    x, y, z = np.where(inside[:, None], place.reshape(-1, 3), 0).astype(np.int64).T
    number = np.arange(points[..., 0].size, dtype=np.int64)
    item = number // max(cameras * bins * height * width, 1)
    cell = ((item * Z + z) * Y + y) * X + x
    camera, pixel = number // max(bins * height * width, 1), number % max(height * width, 1)
    feat = camera * (height * width) + pixel
    chosen = np.flatnonzero(inside)
    chosen = chosen[np.argsort(cell[chosen], kind="stable")]
    cell = cell[chosen]
    starts = np.flatnonzero(np.r_[True, cell[1:] != cell[:-1]]) if len(cell) else np.zeros(0, np.int64)
    lengths = np.diff(np.r_[starts, len(cell)])
    return cell, chosen, feat[chosen], starts, lengths
