# SPDX-License-Identifier: Apache-2.0
"""BEVFusion's pooling in NumPy, written from the formula and from nothing else; imports NumPy only.

    out[b, :, d, h, w] = sum of the rows whose coordinates (h, w, d, b) are these; a row with any coordinate outside is dropped

Sums run in float64; integers are compared as they are, so no index wraps.
"""

from __future__ import annotations

import numpy as np


def cells(coords, B, D, H, W) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows inside, and for each of them its cell ((b*D + d)*H + h)*W + w."""
    coords = np.asarray(coords).astype(np.int64)
    limits = np.array([H, W, D, B], np.int64)
    rows = np.flatnonzero(((coords >= 0) & (coords < limits)).all(1))
    h, w, d, b = coords[rows].T
    return rows, ((b * D + d) * H + h) * W + w


def forward(feats, coords, B, D, H, W) -> np.ndarray:
    feats = np.asarray(feats, np.float64)
    rows, cell = cells(coords, B, D, H, W)
    flat = np.zeros((B * D * H * W, feats.shape[1]))
    np.add.at(flat, cell, feats[rows])
    return np.ascontiguousarray(np.moveaxis(flat.reshape(B, D, H, W, feats.shape[1]), -1, 1))


def backward(grad_output, feats, coords, B, D, H, W) -> dict[str, np.ndarray]:
    """The gradient of every row is the gradient of its cell; dropped rows get zero."""
    channels = np.shape(feats)[1]
    rows, cell = cells(coords, B, D, H, W)
    flat = np.moveaxis(np.asarray(grad_output, np.float64), 1, -1).reshape(B * D * H * W, channels)
    grad_feats = np.zeros(np.shape(feats))
    grad_feats[rows] = flat[cell]
    return {"feats": grad_feats}
