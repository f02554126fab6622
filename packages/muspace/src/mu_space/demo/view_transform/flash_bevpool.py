# SPDX-License-Identifier: Apache-2.0
"""Every cell asks and the depth answers: `flash_bevpool` samples the images and trusts a pixel as far as its depth fits.

The feature maps are the images at 1/4. A pixel has a mean and a scale of depth: that of the LiDAR, and a few per cent of it.
Pixels of unknown depth have features of zero in every channel, the one of validity included. No frustum is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import depth as lidar, fuse as calls
from ..frame import Frame
from ..grid import Grid
from ..obstacles import LOW
from ..pyramid import Pyramid
from ..view import Views, of_sums

if TYPE_CHECKING:
    import torch

OPERATOR, FAMILY = "flash_bevpool", "bevpool"
SIZE = "N×fH×fW → X×Y×Z"
STRIDE = 4
COLUMNS = 8  # pixels: about the gap between LiDAR points
SCALE, LEAST_SCALE = 0.03, 0.12  # of the depth; metres
JUMP = 1.25  # ratio of the depths around a pixel that two surfaces have; the road has less up to 50 metres
FAR = 1e3  # metres: the depth of an image without LiDAR points
THRESHOLD = 0.02  # 1 / metres
ROAD_HEIGHTS = 5  # of a cell from -LOW to LOW: pavement and grass do not lie in the plane of the road
STANDING_TOP, STANDING_HEIGHTS = 3.85, 10  # metres; of a cell above LOW
FULL, STANDING = 0.1, 0.3  # 1 / metres: openly seen; what covers the road in the second picture
# A pixel rounded in fp32 times the slope of depth over its scale: the reference itself is up to 5e-5 from one in fp64.
TOLERANCE = 2e-4
CHECKED_CELLS = 20_000
DECISIONS = 1e-4  # share of the cells whose count rounding may decide


def default_cell(reach: float) -> float:
    """Sampling leaves no gaps, however small the cell."""
    return 0.1


def _filled(depth: np.ndarray, axis: int) -> np.ndarray:
    """Unknown depths replaced by the nearest known one along an axis; NaN where a whole line is unknown."""
    lines = np.moveaxis(depth, axis, -1)
    place, last = np.arange(lines.shape[-1]), lines.shape[-1] - 1
    known = np.isfinite(lines)
    before = np.maximum.accumulate(np.where(known, place, -1), -1)
    after = np.minimum.accumulate(np.where(known, place, 2 * last + 1)[..., ::-1], -1)[..., ::-1]
    nearest = np.where((before >= 0) & (place - before <= after - place), before, after)
    return np.moveaxis(np.take_along_axis(lines, np.minimum(nearest, last), -1), -1, axis)


def _jumps(depth: np.ndarray) -> np.ndarray:
    """Pixels [N, h, w] beside which another surface begins: they mix its colour, and a weight between the two is steep."""
    _, height, width = depth.shape
    padded = np.pad(depth, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = [padded[:, v : v + height, u : u + width] for v in range(3) for u in range(3)]
    return np.maximum.reduce(around) > np.minimum.reduce(around) * JUMP


def depth_params(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth of image rows [N, height, width / COLUMNS] -> (mean, scale) [N, fH, fW, 2] float32, and where it is known.

    Unknown pixels continue their neighbours, so that a sample next to them has a depth; that their features count for
    nothing is the caller's part.
    """
    cameras, height, width = rows.shape
    mean = rows.reshape(cameras, height // STRIDE, STRIDE, width).mean(2).repeat(COLUMNS // STRIDE, 2)
    known = np.isfinite(mean)
    mean = np.nan_to_num(_filled(_filled(mean, 1), 2), nan=FAR)
    known &= ~_jumps(mean)
    return np.stack([mean, np.maximum(SCALE * mean, LEAST_SCALE)], -1).astype(np.float32), known


def projections(frame: Frame) -> np.ndarray:
    """[N, 3, 4] float32: x, y and height above the road -> pixels, moved by half a feature pixel.

    The operator takes the centre of a feature pixel for an integer; that of an averaged block is half a block further.
    """
    shift = np.eye(3)
    shift[:2, 2] = -STRIDE / 2
    return np.stack([shift @ c.projection @ frame.road2ego for c in frame.cameras]).astype(np.float32)


class _Sampler:
    """The operator on one frame, for any range of heights."""

    def __init__(self, frame: Frame, grid: Grid, levels: Pyramid, backend: str) -> None:
        import torch

        features = levels.features(STRIDE)
        device = features.device
        params, known = depth_params(lidar.of_cameras(frame, COLUMNS, levels.extent))
        self.depth = torch.from_numpy(params)[None].to(device)
        self.features = (features * torch.from_numpy(known)[..., None].to(device))[None]
        self.projections = torch.from_numpy(projections(frame))[None].to(device)
        self.extent, self.grid, self.backend = levels.extent, grid, backend

    def run(self, heights: tuple[float, float], count: int, backend: str, lines: slice = slice(None)) -> torch.Tensor:
        """The call for `count` heights in a range, of some of the lines of cells along x."""
        from mu_space import ops

        (nx, ny), low, cell = self.grid.shape, self.grid.y_range[0], self.grid.cell
        first, last, _ = lines.indices(ny)
        roi = (*self.grid.x_range, low + first * cell, low + last * cell, *heights)
        size = (nx, last - first, count)
        return ops.flash_bevpool(
            self.features, self.depth, self.projections, None, self.extent, roi, size,
            depth_weight_threshold=THRESHOLD, backend=backend,
        )  # fmt: skip

    def __call__(self, name: str, heights: tuple[float, float], count: int) -> tuple[np.ndarray, calls.Call]:
        """Sums [nx, ny, 4] of (colour * weight, weight) over the heights, and the record of the call."""
        import torch

        out, dispatch, ms = calls.timed(lambda: self.run(heights, count, self.backend), self.features.device)
        nx, ny = self.grid.shape
        # The reference is slow: pairs of lines, evenly spaced.
        some = [slice(k, min(k + 2, ny)) for k in range(0, ny, max(2, 2 * ny * nx // CHECKED_CELLS))]
        expected = torch.cat([self.run(heights, count, "reference", lines) for lines in some], 1)
        deviation, checked = _deviation(torch.cat([out[:, lines] for lines in some], 1), expected)
        calls.check(name, dispatch, deviation, TOLERANCE)
        cameras, lines, width, channels = self.features.shape[1:]
        sizes = {"N": cameras, "fH": lines, "fW": width, "C": channels, "X": nx, "Y": ny, "Z": count}
        text = f"{cameras}×{lines}×{width} → {nx}×{ny}×{count}"
        return out[0].transpose(0, 1).cpu().numpy(), calls.Call(name, sizes, text, dispatch, ms, deviation, checked, TOLERANCE)


def _deviation(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """(difference from the reference, of its peak, that all cells with data but DECISIONS keep; how many have data).

    A sample on the border of an image or at the threshold is kept or dropped by rounding, which changes the count that the
    sum is divided by: one cell may do so, and one more of every 10 000.
    """
    peak = float(expected.abs().max()) or 1.0
    filled = ((out != 0) | (expected != 0)).any(-1)
    worst = ((out - expected)[filled].abs().amax(-1) / peak).sort().values
    if not len(worst):
        return 0.0, 0
    return float(worst[max(0, len(worst) - 2 - int(DECISIONS * len(worst)))]), len(worst)


def fuse(frame: Frame, grid: Grid, levels: Pyramid, backend: str, stage: Callable[[str, str], None]) -> Views:
    """Road plane and what stands on it, an operator call each."""
    stage("pyramid", "sampling the road")
    sampler = _Sampler(frame, grid, levels, backend)
    road, first = sampler("road", (-LOW, LOW), ROAD_HEIGHTS)
    stage("ground", "sampling above the road")
    standing, second = sampler("heights above it", (LOW, STANDING_TOP), STANDING_HEIGHTS)
    upper = np.where(standing[..., 3:] >= STANDING, standing, road)
    stage("pillars", "")
    least = THRESHOLD / 4
    return Views(of_sums(grid, road, least, FULL, first), of_sums(grid, upper, least, FULL, second))
