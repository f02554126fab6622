# SPDX-License-Identifier: Apache-2.0
"""Places at which a coordinate that is rounded too early, or once too often, is seen."""

from __future__ import annotations

import numpy as np
import torch
from muspace_core.testing.cases import FLOATING


def middle_moved_by(kind: str, width: int) -> float:
    """The pixel coordinate midway between two pixels that a location stored in this 16-bit type misses by the most."""
    middles = np.arange(130.5, 180.5)
    moved = torch.from_numpy((middles + 0.5) / width).to(FLOATING[kind]).double().numpy() * width - 0.5 - middles
    assert np.abs(moved).max() > 0.04, "this 16-bit type holds the place, so the test would show nothing"
    return float(middles[np.abs(moved).argmax()])


def places_that_tell_one_rounding_from_two() -> list[tuple[int, float, int]]:
    """(width, x, pixel): x*w - 0.5 in one rounding to fp32 lies just left of the pixel, in two on it."""
    found = []
    for pixel in (64, 128, 256, 512):
        for width in range(pixel + 3, 2 * pixel, 7):
            x = np.float32((pixel + 0.5) / width)
            for candidate in (x, np.nextafter(x, np.float32(0))):
                once = np.float32(np.float64(candidate) * width - 0.5)
                twice = np.float32(candidate * np.float32(width)) - np.float32(0.5)
                if once < pixel <= twice:
                    found.append((width, float(candidate), pixel))
    assert len(found) >= 6
    return found[:: max(1, len(found) // 8)]
