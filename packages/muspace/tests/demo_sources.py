# SPDX-License-Identifier: Apache-2.0
"""What the tests of the demo feed it: a camera made by hand, the recorded frame, a command line."""

from __future__ import annotations

import argparse
import math

import numpy as np
from mu_space import demo
from mu_space.demo.frame import Camera
from muspace_core.testing.golden import data_root

RECORDED = data_root(__file__) / "data" / "nuscenes_sample"


def downward_camera(image: np.ndarray) -> Camera:
    """Looks ahead and 25 degrees down from 2 m height."""
    h, w = image.shape[:2]
    a = math.radians(25)
    pose = np.eye(4)
    pose[:3, :3] = np.array([[0, -math.sin(a), math.cos(a)], [-1, 0, 0], [0, -math.cos(a), -math.sin(a)]])
    pose[2, 3] = 2.0
    return Camera("CAM_FRONT", image, np.array([[0.6 * w, 0, w / 2], [0, 0.6 * w, h / 2], [0, 0, 1.0]]), pose)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)
