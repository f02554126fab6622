# SPDX-License-Identifier: Apache-2.0
"""Every cell asks: `multi_scale_deformable_attn` samples the images where the calibration puts the cell."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import fuse as calls, lift, obstacles
from ..frame import Frame
from ..grid import Grid
from ..pyramid import Pyramid
from ..view import View, Views

OPERATOR, FAMILY = "multi_scale_deformable_attn", "msda"
SIZE = "B·Q queries, H×L×P"


def default_cell(reach: float) -> float:
    """Sampling leaves no gaps, however small the cell."""
    return 0.1


def _view(name: str, frame: Frame, levels: Pyramid, pillars: lift.Pillars, backend: str) -> View:
    blocked = obstacles.depth_images(frame)
    lifted = lift.lift(frame.cameras, levels.extent, pillars, blocked)
    out, call = calls.sample(name, levels, lifted, backend)
    colour, valid = calls.gather(out, lifted, len(pillars.ground))
    weight = valid.sum(1)
    mean = (colour * valid[..., None]).sum(1) / np.maximum(weight, 1e-6)[:, None]
    # A border of an image weighs FLOOR, an obstructed view HIDDEN times that: scale so that both ends are told apart.
    openness = np.clip(weight / (2 * lift.FLOOR), 0, 1)
    shape = pillars.grid.shape
    return View(pillars.grid, mean.reshape(*shape, 3), openness.reshape(shape), weight.reshape(shape), call)


def road(frame: Frame, grid: Grid, levels: Pyramid, backend: str) -> View:
    """The road plane alone."""
    height = obstacles.ground_height(frame, grid.centres())
    flat = lift.Pillars(grid, height, np.zeros(1), np.ones((len(height), 1), np.float32), side=2)
    return _view("ground plane", frame, levels, flat, backend)


def fuse(frame: Frame, grid: Grid, levels: Pyramid, backend: str, stage: Callable[[str, str], None]) -> Views:
    """Road plane and pillars, an operator call each."""
    stage("pyramid", "fusing the road")
    ground = road(frame, grid, levels, backend)
    stage("ground", "fusing pillars")
    share, _ = obstacles.pillar_share(frame, grid)
    height = obstacles.ground_height(frame, grid.centres())
    standing = lift.Pillars(grid, height, obstacles.HEIGHTS, share)
    pillars = _view("pillars of heights", frame, levels, standing, backend)
    stage("pillars", "")
    return Views(ground, pillars)
