# SPDX-License-Identifier: Apache-2.0
"""BEVDepth's two poolings in NumPy, written from the formulas and from nothing else; imports NumPy only.

    train:     out[b, :, y, x] = sum of the features of the points at (x, y, any z inside) of item b
    inference: the same with  depth[b*N + n, d, h, w] * context[b*N + n, :, h, w]  as a point's features

A point counts iff 0 <= x < X, 0 <= y < Y and 0 <= z < Z; z is summed away.  Sums run in float64.
"""

from __future__ import annotations

import numpy as np


def cells(geom_xyz, voxel_num) -> tuple[np.ndarray, np.ndarray]:
    """Flat numbers of the points inside, and for each of them its cell (b*Y + y)*X + x."""
    geom = np.asarray(geom_xyz).astype(np.int64)
    X, Y, Z = (int(n) for n in voxel_num)
    places = geom.reshape(-1, 3)
    chosen = np.flatnonzero(((places >= 0) & (places < np.array([X, Y, Z]))).all(1))
    per_item = max(places.shape[0] // max(geom.shape[0], 1), 1)
    x, y, _ = places[chosen].T
    return chosen, (chosen // per_item * Y + y) * X + x


def memo(geom_xyz, voxel_num) -> np.ndarray:
    """[B, points, 3]: (b, y, x) of every point inside, -1 elsewhere."""
    geom = np.asarray(geom_xyz)
    X, Y, _ = (int(n) for n in voxel_num)
    chosen, cell = cells(geom, voxel_num)
    found = np.full((geom.size // 3, 3), -1, np.int64)
    found[chosen] = np.stack([cell // (X * Y), cell // X % Y, cell % X], 1)
    return found.reshape(geom.shape[0], -1, 3)


def _summed(features, chosen, cell, batch: int, voxel_num) -> np.ndarray:
    """[B, C, Y, X] from rows [points, C]."""
    X, Y = int(voxel_num[0]), int(voxel_num[1])
    flat = np.zeros((batch * Y * X, features.shape[1]))
    np.add.at(flat, cell, features[chosen])
    return np.moveaxis(flat.reshape(batch, Y, X, features.shape[1]), -1, 1)


def _rows(array) -> np.ndarray:
    return np.asarray(array, np.float64).reshape(int(np.prod(np.shape(array)[:-1])), np.shape(array)[-1])


def train(geom_xyz, input_features, voxel_num) -> np.ndarray:
    chosen, cell = cells(geom_xyz, voxel_num)
    return _summed(_rows(input_features), chosen, cell, np.shape(geom_xyz)[0], voxel_num)


def train_backward(grad_output, geom_xyz, input_features, voxel_num) -> dict[str, np.ndarray]:
    chosen, cell = cells(geom_xyz, voxel_num)
    found = np.zeros(_rows(input_features).shape)
    found[chosen] = _rows(np.moveaxis(np.asarray(grad_output), 1, -1))[cell]
    return {"input_features": found.reshape(np.shape(input_features))}


def _pixels(depth_features, chosen) -> tuple[np.ndarray, np.ndarray]:
    """Image and pixel of the chosen points, which are numbered like ``depth_features``."""
    _, bins, height, width = np.shape(depth_features)
    return chosen // max(bins * height * width, 1), chosen % max(height * width, 1)


def inference(geom_xyz, depth_features, context_features, voxel_num) -> np.ndarray:
    chosen, cell = cells(geom_xyz, voxel_num)
    image, pixel = _pixels(depth_features, chosen)
    images, channels = np.shape(context_features)[:2]
    context = np.asarray(context_features, np.float64).reshape(images, channels, int(np.prod(np.shape(context_features)[2:])))
    products = np.zeros((np.size(depth_features), channels))
    products[chosen] = np.asarray(depth_features, np.float64).reshape(-1)[chosen, None] * context[image, :, pixel]
    return _summed(products, chosen, cell, np.shape(geom_xyz)[0], voxel_num)


def inference_backward(grad_output, geom_xyz, depth_features, context_features, voxel_num) -> dict[str, np.ndarray]:
    chosen, cell = cells(geom_xyz, voxel_num)
    image, pixel = _pixels(depth_features, chosen)
    images, channels = np.shape(context_features)[:2]
    context = np.asarray(context_features, np.float64).reshape(images, channels, int(np.prod(np.shape(context_features)[2:])))
    g = _rows(np.moveaxis(np.asarray(grad_output), 1, -1))[cell]
    weights = np.asarray(depth_features, np.float64).reshape(-1)
    of_depth, of_context = np.zeros(weights.shape), np.zeros(context.shape)
    of_depth[chosen] = (g * context[image, :, pixel]).sum(1)
    np.add.at(of_context, (image, slice(None), pixel), weights[chosen, None] * g)
    return {
        "depth_features": of_depth.reshape(np.shape(depth_features)),
        "context_features": of_context.reshape(np.shape(context_features)),
    }
