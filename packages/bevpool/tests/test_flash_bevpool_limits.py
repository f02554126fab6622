# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool and flash_bevpool_sca with features of more than 2**31 elements, in memory that is barely touched."""

from __future__ import annotations

import pytest
import torch
from muspace_bevpool import flash_bevpool, flash_bevpool_sca
from muspace_core.testing import large

pytestmark = pytest.mark.backends("cpu", "cuda", "hip")
SIDE, CHANNELS = 1500, 1024


def _features(device: str) -> torch.Tensor:
    """fp32 zeros whose pages the system provides on first use; the last pixel holds ones."""
    large.needs(12, device)
    feats = large.zeros((1, 1, SIDE, SIDE, CHANNELS), torch.float32, device)
    assert feats.numel() > 2**31
    feats[..., -1, -1, :] = 1.0
    return feats


def _camera(at: float, device: str) -> torch.Tensor:
    """Every cell is seen at this place of both axes, one metre away."""
    return torch.tensor([[[[0, 0, 0, at], [0, 0, 0, at], [0, 0, 0, 1]]]], dtype=torch.float32, device=device)


def test_flash_bevpool(backend: str, device: str) -> None:
    depth = torch.ones(1, 1, 1, 1, 2, device=device).expand(1, 1, SIDE, SIDE, 2).contiguous()
    output = flash_bevpool(
        _features(device), depth, _camera(SIDE - 0.5, device), None, (SIDE, SIDE), (0, 1, 0, 1, 0, 1), (1, 1, 1)
    )
    assert output.shape == (1, 1, 1, CHANNELS) and ((output - 1).abs() <= 1e-5).all()  # 1 / (1 + epsilon)


def test_flash_bevpool_sca(backend: str, device: str) -> None:
    output = flash_bevpool_sca(
        _features(device), _camera(SIDE - 0.5, device), image_size=(SIDE, SIDE), roi_range=(0, 1, 0, 1), grid_size=(1, 1),
        z_anchors=(0.0,),
    )  # fmt: skip
    assert output.shape == (1, 1, CHANNELS) and ((output.float() - 1).abs() <= 1e-2).all()
