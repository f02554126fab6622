# SPDX-License-Identifier: Apache-2.0
"""The oracle of flash_bevpool against cases worked out by hand and its own numerical derivative."""

from __future__ import annotations

import math

import numpy as np
import pytest
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_oracle")
inputs = load_sibling(__file__, "flash_bevpool_inputs")


def _forward(arguments):
    feats, depth, projections = (arguments[k] for k in ("image_feats", "depth_params", "projection_matrices"))
    return oracle.forward(feats, depth, projections, oracle.View.of(arguments))


def _params(h, w, mean=1.0, sigma=1.0):
    return np.broadcast_to(np.array([mean, sigma]), (h, w, 2))


def test_places_by_hand():
    """Pixel centres on integers: u = 0 is the first pixel, u = 1.5 between two, the last one reaches up to the width."""
    features = np.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1)
    call = inputs.flat(features, _params(1, 4), (-0.75, 4.75, 11), (0.0, 0.5, 1), epsilon=0.0)
    output, count = _forward(call)
    u = -0.5 + 0.5 * np.arange(11)  # cell centres
    expected = np.where((u >= 0) & (u < 4), np.interp(np.clip(u, 0, 3), range(4), [1, 2, 4, 8]), 0.0)
    assert output[0, 0, :, 0].tolist() == expected.tolist()
    assert count[0, 0].tolist() == [0] + [1] * 8 + [0, 0]


@pytest.mark.parametrize(
    ("distribution", "weight"), [(0, lambda z, s: math.exp(-z * z / 2) / s), (1, lambda z, s: math.exp(-abs(z)) / (2 * s))]
)
def test_weights_by_hand(distribution, weight):
    """One pixel of depth 1 with mean 3, sigma 1.5 and epsilon 0.5: s = 2, z = -1."""
    call = inputs.flat(
        np.ones((1, 1, 1)), _params(1, 1, 3.0, 1.5), (0, 1, 1), (0, 1, 1), depth_distribution=distribution, epsilon=0.5
    )
    output, _ = _forward(call)
    assert abs(output.item() - weight(-1.0, 2.0)) < 1e-15


def test_the_mean_is_over_the_samples_that_count():
    """Two cameras of equal weight: their average, and a third one that sees nothing changes nothing."""
    call = inputs.flat(np.full((1, 1, 1), 2.0), _params(1, 1), (0, 1, 1), (0, 1, 1), epsilon=0.0)
    away = inputs.FLAT + np.array([[0, 0, 0, 9], [0] * 4, [0] * 4], np.float32)
    call["image_feats"] = np.stack([np.full((1, 1, 1), v) for v in (2.0, 6.0, 100.0)])[None]
    call["depth_params"] = np.broadcast_to(call["depth_params"], (1, 3, 1, 1, 2))
    call["projection_matrices"] = np.stack([inputs.FLAT, inputs.FLAT, away])[None]
    output, count = _forward(call)
    assert output.item() == 4.0 and count.item() == 2


@pytest.mark.parametrize("name", ["tiny", "laplace", "threshold", "rectangular"])
def test_against_the_numerical_derivative(name):
    arguments = next(c for c in inputs.CASES if c.name == name).build()
    feats, depth, projections = (arguments[k] for k in ("image_feats", "depth_params", "projection_matrices"))
    random = np.random.default_rng(5)
    view = oracle.View.of(arguments)
    g = random.standard_normal(_forward(arguments)[0].shape)
    _, grad_feats, grad_depth = oracle.backward(g, feats, depth, projections, view)
    step = 1e-6
    for which, gradient in ((0, grad_feats), (1, grad_depth)):
        direction = random.standard_normal(gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [a + sign * step * direction if i == which else a for i, a in enumerate((feats, depth))]
            ends.append((g * oracle.forward(*moved, projections, view)[0]).sum())
        assert abs((ends[0] - ends[1]) / (2 * step) - (gradient * direction).sum()) < 1e-7 * np.abs(gradient).sum()


def test_the_wrong_gradient_of_upstream_is_another_one():
    """Upstream adds the same number to both depth channels; the derivative gives them different ones."""
    arguments = inputs.lift("tiny", batch=2)
    feats, depth, projections = (arguments[k] for k in ("image_feats", "depth_params", "projection_matrices"))
    output, _ = _forward(arguments)
    _, _, grad_depth = oracle.backward(np.ones(output.shape), feats, depth, projections, oracle.View.of(arguments))
    touched = (grad_depth != 0).any(-1)
    assert touched.any() and (np.abs(grad_depth[..., 0] - grad_depth[..., 1])[touched] > 1e-6).mean() > 0.9
