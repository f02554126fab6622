# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool in NumPy, written from the formula and from nothing else; imports NumPy only, float64 throughout.

cell centre x = x_min + (i + 0.5) * (x_max - x_min) / X, likewise y and z
(u', v', d) = P (x, y, z, 1); counts only if d > 0;  u = u' / max(d, eps), v likewise
fu = u / image width * W, fv = v / image height * H; counts only if 0 <= fu < W and 0 <= fv < H
bilinear with pixel centres on integers, the last row and column repeated: mean, sigma and features
s = sigma + eps, z = (d - mean) / s;  gaussian (0): w = exp(-z*z/2) / s;  laplace (1): w = exp(-|z|) / (2*s)
counts only if w >= threshold;  out = (sum of w * features over cameras and heights) / number of samples that count
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

GAUSSIAN, LAPLACE = 0, 1


@dataclass(frozen=True)
class View:
    """The call without its tensors."""

    image_size: Sequence[float]
    roi_range: Sequence[float]
    grid_size: Sequence[int]
    distribution: int = GAUSSIAN
    epsilon: float = 1e-6
    threshold: float = 1e-6

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> View:
        """That of a call, by the names of its arguments."""
        names = ("image_size", "roi_range", "grid_size", "depth_distribution", "epsilon", "depth_weight_threshold")
        return cls(*[arguments[name] for name in names])


@dataclass(frozen=True)
class Samples:
    """All cells of one image and height, arrays of shape [Y,X] ([4,Y,X] for the corners)."""

    batch: int
    camera: int
    rows: np.ndarray
    columns: np.ndarray
    factors: np.ndarray
    #: (d - mean) / s, s, and the weight.
    score: np.ndarray
    spread: np.ndarray
    weight: np.ndarray
    counts: np.ndarray


def centres(low: float, high: float, count: int) -> np.ndarray:
    return low + (np.arange(count) + 0.5) * ((high - low) / count) if count else np.zeros(0)


def projected(projection: np.ndarray, view: View, height: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(u', v', d) of the cell centres at one height, each [Y,X]."""
    x_min, x_max, y_min, y_max = (float(v) for v in view.roi_range[:4])
    x = centres(x_min, x_max, view.grid_size[0])[None, :]
    y = centres(y_min, y_max, view.grid_size[1])[:, None]
    matrix = np.asarray(projection, np.float64)[:3]
    with np.errstate(invalid="ignore", over="ignore"):
        u, v, d = (row[0] * x + row[1] * y + (row[2] * height + row[3]) for row in matrix)
    return u, v, d


def samples(depth_params, projections, view: View, slack: float = 0.0) -> Iterator[Samples]:
    """Every image and height.  ``slack`` widens (or, negative, narrows) every test: for a look at what is close to one."""
    batch, cameras, rows, columns = depth_params.shape[:4]
    if rows * columns == 0:
        return
    heights = centres(float(view.roi_range[4]), float(view.roi_range[5]), view.grid_size[2])
    for b in range(batch):
        for n in range(cameras):
            for height in heights:
                u, v, d = projected(projections[b, n], view, height)
                with np.errstate(all="ignore"):
                    fu = u / np.maximum(d, view.epsilon) / float(view.image_size[1]) * columns
                    fv = v / np.maximum(d, view.epsilon) / float(view.image_size[0]) * rows
                    counts = (d > -slack) & (fu >= -slack) & (fu < columns + slack) & (fv >= -slack) & (fv < rows + slack)
                yield _sample(depth_params[b, n].astype(np.float64), view, (b, n), counts, fu, fv, d, slack)


def _sample(depth, view: View, image: tuple[int, int], counts, fu, fv, d, slack: float) -> Samples:
    rows, columns = depth.shape[:2]
    fu = np.clip(np.where(counts, fu, 0.0), 0, np.nextafter(columns, 0))
    fv = np.clip(np.where(counts, fv, 0.0), 0, np.nextafter(rows, 0))
    u0, v0 = np.floor(fu).astype(np.int64), np.floor(fv).astype(np.int64)
    u1, v1 = np.minimum(u0 + 1, columns - 1), np.minimum(v0 + 1, rows - 1)
    a, b = fu - u0, fv - v0
    factors = np.stack([(1 - b) * (1 - a), (1 - b) * a, b * (1 - a), b * a])
    at_rows, at_columns = np.stack([v0, v0, v1, v1]), np.stack([u0, u1, u0, u1])
    with np.errstate(all="ignore"):
        mean, sigma = np.moveaxis((factors[..., None] * depth[at_rows, at_columns]).sum(0), -1, 0)
        s = sigma + view.epsilon
        z = (d - mean) / s
        weight = np.exp(-z * z / 2) / s if view.distribution == GAUSSIAN else 0.5 * np.exp(-np.abs(z)) / s
        # A comparison with NaN is false: a depth that is no number does not count, nor does a score beyond all numbers.
        counts = counts & np.isfinite(z) & (weight >= view.threshold * (1 - slack) - slack * 1e-3)
    return Samples(*image, at_rows, at_columns, factors, z, s, np.where(counts, weight, 0.0), counts)


def counted(depth_params, projections, view: View, slack: float = 0.0) -> np.ndarray:
    """Which samples count, [B, N, Z, Y, X]."""
    batch, cameras = depth_params.shape[:2]
    found = [sample.counts for sample in samples(depth_params, projections, view, slack)]
    return np.array(found, bool).reshape(batch, cameras, view.grid_size[2], view.grid_size[1], view.grid_size[0])


def close_calls(depth_params, projections, view: View, slack: float = 1e-4) -> int:
    """How many samples lie so close to a border, the threshold or the kink of laplace that fp32 may decide otherwise."""
    doubtful = counted(depth_params, projections, view, slack) != counted(depth_params, projections, view, -slack)
    kinks = 0
    if view.distribution == LAPLACE:
        kinks = sum(int((s.counts & (np.abs(s.score) < slack)).sum()) for s in samples(depth_params, projections, view))
    return int(doubtful.sum()) + kinks


def forward(image_feats, depth_params, projections, view: View) -> tuple[np.ndarray, np.ndarray]:
    """Output [B,Y,X,C] and the number of samples that count, [B,Y,X]."""
    batch, channels = image_feats.shape[0], image_feats.shape[-1]
    x, y = view.grid_size[:2]
    total, count = np.zeros((batch, y, x, channels)), np.zeros((batch, y, x), np.int64)
    for sample in samples(depth_params, projections, view):
        features = image_feats[sample.batch, sample.camera].astype(np.float64)
        corners = np.where(sample.counts[..., None], features[sample.rows, sample.columns], 0.0)
        total[sample.batch] += sample.weight[..., None] * (sample.factors[..., None] * corners).sum(0)
        count[sample.batch] += sample.counts
    return total / np.maximum(count, 1)[..., None], count


def backward(grad_output, image_feats, depth_params, projections, view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output and the gradients of features and depth parameters; the count and the threshold are constants."""
    output, count = forward(image_feats, depth_params, projections, view)
    grad_feats, grad_depth = np.zeros(image_feats.shape), np.zeros(depth_params.shape)
    for sample in samples(depth_params, projections, view):
        b, n, kept = sample.batch, sample.camera, sample.counts
        g = np.asarray(grad_output[b], np.float64) / np.maximum(count[b], 1)[..., None]
        features = image_feats[b, n].astype(np.float64)
        corners = np.where(kept[..., None], features[sample.rows, sample.columns], 0.0)
        along = (g * (sample.factors[..., None] * corners).sum(0)).sum(-1)
        z, s, w = (np.where(kept, value, 1.0) for value in (sample.score, sample.spread, sample.weight))
        if view.distribution == GAUSSIAN:
            of_mean, of_sigma = along * w * z / s, along * w * (z * z - 1) / s
        else:
            of_mean, of_sigma = along * w * np.sign(z) / s, along * w * (np.abs(z) - 1) / s
        for row, column, factor in zip(sample.rows, sample.columns, sample.factors, strict=True):
            place = (row[kept], column[kept])
            np.add.at(grad_feats[b, n], place, (factor * w)[kept][:, None] * g[kept])
            np.add.at(grad_depth[b, n], place, np.stack([factor * of_mean, factor * of_sigma], -1)[kept])
    return output, grad_feats, grad_depth
