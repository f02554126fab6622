# SPDX-License-Identifier: Apache-2.0
"""Every pixel tells: `bev_pool_v2` lifts the images by a distribution over depth and sums what falls into a cell.

The feature maps are the images at 1/8. A feature pixel sees LiDAR depth at several places of each of its image rows; each is
one-hot over bins of depth, and the pixel holds their mean: one bin near the vehicle, a run of bins where it sees metres of
road. The frustum of bins depends on the calibration alone, so its ranks and their plan are made once; a frame brings depth
and features.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import depth as lidar, fuse as calls
from ..frame import Frame
from ..grid import Grid
from ..obstacles import LOW, ground_height
from ..pyramid import CHANNELS, Pyramid
from ..view import Views, of_sums

OPERATOR, FAMILY = "bev_pool_v2", "bevpool"
SIZE = "N×D×fH×fW, points → X×Y×Z"
STRIDE = 8
LINES = 4  # places in an image row: so many that one row far away still meets every bin that it crosses
SLAB = 2 * LOW  # height of a voxel; the lowest lies about the road
SLABS = 6
FIRST = 1.0  # metres in front of the camera
FRUSTUM = 20_000_000  # most points of all frustums
CHECKED_CELLS = 6000
LEAST, FULL = 0.03, 0.06  # of a feature pixel: what counts as something in a cell, and as openly seen
STANDING = 0.3  # of a feature pixel: what covers the road in the second picture


def default_cell(reach: float) -> float:
    """200 x 200 cells: smaller ones would show the gaps between feature pixels."""
    return min(1.0, max(0.1, reach / 100))


def bins_of(grid: Grid, pixels: int) -> np.ndarray:
    """Edges [D + 1] of depth bins as wide as a cell, wider where the frustums of `pixels` pixels would grow too large."""
    last = math.hypot(*(max(map(abs, r)) for r in (grid.x_range, grid.y_range))) + 2.0
    count = max(1, min(math.ceil((last - FIRST) / grid.cell), FRUSTUM // pixels))
    return np.linspace(FIRST, last, count + 1)


def distribution(rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Depth of places in image rows [N, height * LINES, fW] -> shares [N, D, fH, fW] float32 of each bin of depth.

    Places of unknown depth count nowhere, so the shares of a pixel add up to one or less.
    """
    cameras, height, width = rows.shape
    places = STRIDE * LINES
    count, lines = len(edges) - 1, height // places
    step = (edges[-1] - edges[0]) / count
    out = np.zeros((cameras, count, lines, width), np.float32)
    with np.errstate(invalid="ignore"):
        n, v, u = np.nonzero((rows >= edges[0]) & (rows < edges[-1]))
    k = np.minimum(((rows[n, v, u] - edges[0]) / step).astype(np.int64), count - 1)
    np.add.at(out, (n, k, v // places, u), np.float32(1 / places))
    return out


def frustum(frame: Frame, grid: Grid, edges: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Points [N, D, fH, fW, 3] float32: x, y and height above the road of bin centres; NaN below the grid.

    A coordinate is truncated toward zero, so what lies below the grid by less than a cell would count as its first cell.
    """
    middle = (edges[1:] + edges[:-1]) / 2
    v, u = np.meshgrid(*((np.arange(n) + 0.5) * STRIDE for n in shape), indexing="ij")
    uv = np.stack([u, v], -1)
    low = np.array([grid.x_range[0], grid.y_range[0], -LOW])
    out = np.empty((len(frame.cameras), len(middle), *shape, 3), np.float32)
    for camera, points in zip(frame.cameras, out, strict=True):
        ego = camera.unproject(uv, middle[:, None, None])
        ego[..., 2] -= ground_height(frame, ego)
        points[:] = np.where((ego >= low).all(-1, keepdims=True), ego, np.nan)
    return out


def pool(frame: Frame, grid: Grid, levels: Pyramid, backend: str) -> tuple[np.ndarray, calls.Call]:
    """Sums [Z, nx, ny, 4] of (colour * share, share) per voxel, and the record of the call."""
    import torch

    from mu_space import ops

    features = levels.features(STRIDE)[None]
    cameras, lines, width = features.shape[1:4]
    edges = bins_of(grid, cameras * lines * width)
    rows = lidar.of_cameras(frame, STRIDE, levels.extent, LINES)
    weights = torch.from_numpy(distribution(rows, edges))[None].to(features.device)
    points = torch.from_numpy(frustum(frame, grid, edges, (lines, width)))[None].to(features.device)
    nx, ny = grid.shape
    low, size = (grid.x_range[0], grid.y_range[0], -LOW), (grid.cell, grid.cell, SLAB)
    bev, at_depth, at_pixel, starts, lengths = ops.bev_pool_v2_ranks(points, low, size, (nx, ny, SLABS))
    del points
    shape, ranks = (1, SLABS, ny, nx, CHANNELS), (at_depth, at_pixel, bev)
    plan = ops.bev_pool_v2_plan(*ranks, shape, starts, lengths, depth_shape=weights.shape, backend=backend)

    def call() -> torch.Tensor:
        return ops.bev_pool_v2(weights, features, None, None, None, shape, None, None, plan=plan, backend=backend)

    out, dispatch, ms = calls.timed(call, features.device)
    step = max(1, len(starts) // CHECKED_CELLS)
    some = starts[::step].contiguous(), lengths[::step].contiguous()
    expected = ops.bev_pool_v2(weights, features, *ranks, shape, *some, backend="reference")
    cells = bev[some[0].long()].long()
    got, want = (x.reshape(CHANNELS, -1)[:, cells] for x in (out, expected))
    peak = float(want.abs().max()) if want.numel() else 0.0
    deviation = float((got - want).abs().max()) / (peak or 1.0) if want.numel() else 0.0
    sizes = {"N": cameras, "D": len(edges) - 1, "fH": lines, "fW": width, "C": CHANNELS, "points": len(bev)}
    sizes |= {"X": nx, "Y": ny, "Z": SLABS}
    text = f"{cameras}×{len(edges) - 1}×{lines}×{width}, {len(bev) / 1e6:.1f}M → {nx}×{ny}×{SLABS}"
    name = "voxels"
    record = calls.Call(name, sizes, text, dispatch, ms, calls.check(name, dispatch, deviation), len(cells))
    return out[0].permute(1, 3, 2, 0).cpu().numpy(), record


def fuse(frame: Frame, grid: Grid, levels: Pyramid, backend: str, stage: Callable[[str, str], None]) -> Views:
    """Both pictures from one call: the lowest voxels are the road, those above are what stands on it."""
    stage("pyramid", "lifting the images by LiDAR depth")
    sums, call = pool(frame, grid, levels, backend)
    road, standing = sums[0], sums[1:].sum(0)
    upper = np.where(standing[..., 3:] >= STANDING, standing, road)
    stage("lift", "")
    return Views(of_sums(grid, road, LEAST, FULL, call), of_sums(grid, upper, LEAST, FULL, call))
