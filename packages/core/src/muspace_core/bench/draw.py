# SPDX-License-Identifier: Apache-2.0
"""Seeded random tensors: functions of a name and a shape alone, drawn on the host for every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

SEED: Final = 20261130
#: A large tensor repeats this many numbers (a prime, so that rows do not repeat): drawing them all would outlast the timing.
PERIOD: Final = 4194301


def generator(name: str) -> torch.Generator:
    """A generator on the host, seeded by the name."""
    return torch.Generator().manual_seed(SEED + sum(ord(letter) * (place + 1) for place, letter in enumerate(name)))


def normal(
    name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32, deviation: float = 1.0
) -> torch.Tensor:
    """Normally distributed numbers around zero."""
    count = math.prod(shape)
    drawn = torch.randn(min(count, PERIOD), generator=generator(name)).mul_(deviation).to(device, dtype)
    if count > PERIOD:
        drawn = drawn.repeat(-(-count // PERIOD))[:count]
    return drawn.view(*shape)


def uniform(name: str, shape: Sequence[int], low: float, high: float, device: torch.device) -> torch.Tensor:
    """Evenly distributed fp32 numbers of ``[low, high)``."""
    return (torch.rand(*shape, generator=generator(name)) * (high - low) + low).to(device)


def depth_distribution(name: str, images: int, bins: int, height: int, width: int, device: torch.device) -> torch.Tensor:
    """``[images, bins, height, width]`` fp32: a softmax over the bins, peaked at one of them as a trained network's is."""
    peak = uniform(f"{name} peak", (images, 1, height, width), 0, bins, device)
    bin_ = torch.arange(bins, device=device).view(1, bins, 1, 1)
    bump = (4 - 0.5 * ((bin_ - peak) / 3) ** 2).clamp(-4, 4)
    return (normal(name, (images, bins, height, width), device) + bump).softmax(1)
