# SPDX-License-Identifier: Apache-2.0
"""Depth-weighted voxel pooling in NumPy, written from the formula and from nothing else; imports NumPy only.

    out[cb, n, x, y, z, :] += img_feats[b, s*N + n, :, h, w] * img_depth[(b*S + s)*N + n, d, h, w]   for every masked point

with (cb, x, y, z) the point's coordinates: column 0, not the loop index, picks the batch item.  Sweeps are summed, cameras
kept, or summed as well.  A masked point with a coordinate outside is dropped.  Sums run in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Points:
    """The points that count: flat depth index, image, pixel and cell ((cb*cameras + n)*X + x)*Y*Z + y*Z + z."""

    depth: np.ndarray
    image: np.ndarray
    pixel: np.ndarray
    cell: np.ndarray


def points(voxel_coords, mask, B, X, Y, Z, reduce_cams: bool) -> Points:
    coords = np.asarray(voxel_coords).astype(np.int64)
    _, _, cameras, bins, height, width, _ = coords.shape
    places = coords.reshape(-1, 4)
    inside = ((places >= 0) & (places < np.array([B, X, Y, Z]))).all(1) & np.asarray(mask, bool).reshape(-1)
    chosen = np.flatnonzero(inside)
    b, x, y, z = places[chosen].T
    image = chosen // max(bins * height * width, 1)
    column = np.zeros_like(image) if reduce_cams else image % max(cameras, 1)
    cell = (((b * (1 if reduce_cams else cameras) + column) * X + x) * Y + y) * Z + z
    return Points(chosen, image, chosen % max(height * width, 1), cell)


def _feats(img_feats) -> np.ndarray:
    """[images, C, pixels]; an image is (b*S + s)*N + n for the depth and, flattened, for the features too."""
    batch, images, channels, height, width = np.shape(img_feats)
    return np.asarray(img_feats, np.float64).reshape(batch * images, channels, height * width)


def forward(img_feats, img_depth, voxel_coords, mask, B, X, Y, Z, reduce_cams: bool = False) -> np.ndarray:
    at = points(voxel_coords, mask, B, X, Y, Z, reduce_cams)
    feats = _feats(img_feats)
    cameras = 1 if reduce_cams else np.shape(voxel_coords)[2]
    flat = np.zeros((B * cameras * X * Y * Z, feats.shape[1]))
    np.add.at(flat, at.cell, np.asarray(img_depth, np.float64).reshape(-1)[at.depth, None] * feats[at.image, :, at.pixel])
    return flat.reshape(B, cameras, X, Y, Z, feats.shape[1])


def backward(
    grad_output, img_feats, img_depth, voxel_coords, mask, B, X, Y, Z, reduce_cams: bool = False
) -> dict[str, np.ndarray]:
    at = points(voxel_coords, mask, B, X, Y, Z, reduce_cams)
    feats = _feats(img_feats)
    weights = np.asarray(img_depth, np.float64).reshape(-1)
    g = np.asarray(grad_output, np.float64)
    g = g.reshape(int(np.prod(g.shape[:-1])), g.shape[-1])[at.cell]
    of_feats, of_depth = np.zeros(feats.shape), np.zeros(weights.shape)
    np.add.at(of_feats, (at.image, slice(None), at.pixel), weights[at.depth, None] * g)
    of_depth[at.depth] = (g * feats[at.image, :, at.pixel]).sum(1)
    return {"img_feats": of_feats.reshape(np.shape(img_feats)), "img_depth": of_depth.reshape(np.shape(img_depth))}
