# SPDX-License-Identifier: Apache-2.0
"""Products beyond 2**31: upstream counts its threads in 32 bits and fails from a batch of 12 on; memory is barely touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from muspace_core.testing import large
from muspace_msda import deformable_aggregation

pytestmark = pytest.mark.backends("cpu", "cuda", "hip")


def test_more_samples_times_channels_than_32_bits_count(backend: str, device: str) -> None:
    """batch * anchors * points * cameras * scales * channels > 2**31; one sample of them all is in sight, the last."""
    anchors, points, cameras, scales, channels = 900, 100, 6, 4, 1024
    assert anchors * points * cameras * scales * channels > 2**31
    maps = [[(2, 2), (1, 2), (2, 1), (1, 1)]] * cameras
    starts = (np.arange(cameras)[:, None] * 9 + np.array([0, 4, 6, 8])).tolist()
    feat = torch.zeros(1, 9 * cameras, channels, device=device)
    feat[:, -1] = torch.arange(channels, device=device) % 7
    locations = torch.full((1, anchors, points, cameras, 2), -3.0, device=device)
    locations[0, -1, -1, -1] = 0.5
    weights = torch.zeros(1, anchors, points, cameras, scales, 1, device=device)
    weights[0, -1, -1, -1, -1] = 2.0
    leaves = [t.requires_grad_() for t in (feat, locations, weights)]
    output = deformable_aggregation(leaves[0], maps, starts, leaves[1], leaves[2])
    assert (output[0, :-1] == 0).all() and (output[0, -1] == 2 * feat[0, -1]).all()
    of_feat, _, of_weights = torch.autograd.grad(output.sum(), leaves)
    assert (of_feat[0, -1] == 2).all() and (of_feat[0, :-1] == 0).all()
    assert float(of_weights[0, -1, -1, -1, -1]) == float(feat[0, -1].detach().sum())
    assert int((of_weights != 0).sum()) <= scales


@pytest.mark.parametrize("batch", [1, 3])
def test_features_beyond_32_bits(batch: int, backend: str, device: str) -> None:
    """bf16 features of more than 2**31 elements; the anchor looks at the last row."""
    large.needs(8, device)
    side, channels = (1500, 1024) if batch == 1 else (1000, 768)
    feat = large.zeros((batch, side * side, channels), torch.bfloat16, device)
    assert feat.numel() > 2**31
    feat[-1, -1] = 1.0
    locations = torch.full((batch, 2, 1, 1, 2), 0.25, device=device)
    locations[:, 1] = (side - 0.5) / side
    weights = torch.ones(batch, 2, 1, 1, 1, 8, device=device)
    output = deformable_aggregation(feat, [[(side, side)]], [[0]], locations, weights)
    expected = torch.zeros_like(output)
    expected[-1, 1] = 1.0
    assert (output.float() - expected.float()).abs().max() <= 1e-2
