# SPDX-License-Identifier: Apache-2.0
"""The oracle of flash_bevpool_sca against cases worked out by hand and its own numerical derivative."""

from __future__ import annotations

import numpy as np
import pytest
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_sca_oracle")
inputs = load_sibling(__file__, "flash_bevpool_sca_inputs")
TENSORS = ("image_feats", "projection_matrices", "sampling_offsets", "attention_weights")


def _backward(arguments, grad_output=None):
    view = oracle.View.of(arguments)
    shape = (arguments["image_feats"].shape[0], view.grid_size[0] * view.grid_size[1], arguments["image_feats"].shape[-1])
    grad_output = np.ones(shape) if grad_output is None else grad_output
    return oracle.backward(grad_output, *[arguments[name] for name in TENSORS], view)


def test_places_by_hand():
    """u = x on an image of four pixels; half a pixel from the edge the outside is zero; on the edge nothing is hit."""
    features = np.array([1.0, 2.0, 4.0, 8.0]).reshape(1, 4, 1)
    result = _backward(inputs.flat(features, (-0.25, 4.25, 9), (0.0, 1.0, 1)))
    x = 0.5 * np.arange(9)
    padded = np.interp(x - 0.5, range(-1, 5), [0, 1, 2, 4, 8, 0])
    assert result.output.reshape(-1).tolist() == np.where((x > 0) & (x < 4), padded, 0).tolist()


def test_all_anchors_of_a_hit_camera_contribute():
    """d = z: the anchor behind the camera hits nothing by itself, but counts once the one in front is seen."""
    matrix = np.array([[0, 0, 0, 1], [0, 0, 0, 0.5], [0, 0, 1, 0]])
    call = inputs.flat(np.array([[[1.0], [3.0]]]), (0, 1, 1), (0, 1, 1), matrix, z_anchors=(2.0, -1.0), eps=1.0)
    # In front X = 0 and Y = -0.25; behind both divide by 1 and X = 0.5, Y = 0; they share the weight.
    assert _backward(call).output.item() == 0.5 * 0.75 * 1.0 + 0.5 * 2.0
    assert _backward(call | {"z_anchors": (-1.0, -2.0)}).output.item() == 0.0


def test_the_mean_is_over_hit_cameras():
    call = inputs.flat(np.full((1, 1, 1), 2.0), (0, 1, 1), (0, 1, 1))
    away = inputs.FLAT - np.array([[0, 0, 0, 9], [0] * 4, [0] * 4], np.float32)
    call["image_feats"] = np.array([2.0, 6.0, 100.0]).reshape(1, 3, 1, 1, 1)
    call["projection_matrices"] = np.stack([inputs.FLAT, inputs.FLAT, away])[None]
    assert _backward(call).output.item() == 4.0
    assert _backward(call | {"average": "none"}).output.item() == 8.0


def test_points_take_anchors_in_turn():
    """Point k stands on anchor k % A: weights on one point at a time name the anchor."""
    matrix = np.array([[0, 0, 1, 0], [0, 0, 0, 0.5], [0, 0, 0, 1]])  # u = z
    call = inputs.flat(np.array([1.0, 10.0, 100.0]).reshape(1, 3, 1), (0, 1, 1), (0, 1, 1), matrix, z_anchors=(0.5, 1.5, 2.5))
    found = []
    for k in range(6):
        weights = np.zeros((1, 1, 1, 1, 6))
        weights[..., k] = 1.0
        found.append(_backward(call | {"attention_weights": weights}).output.item())
    assert found == [1, 10, 100, 1, 10, 100]


def test_offsets_are_pixels_of_the_level():
    """The same offset moves by one pixel of each level, whatever its size; queries are rows of y."""
    features = np.concatenate([np.arange(8.0).reshape(1, 8), 100 * np.arange(4.0).reshape(1, 4)], 1).reshape(1, 1, 12, 1)
    call = inputs.flat(np.zeros((1, 8, 1)), (0, 8, 1), (0, 1, 1), spatial_shapes=((1, 8), (1, 4)))
    call["image_feats"] = features
    weights = np.ones((1, 1, 1, 2, 1))
    moved = np.zeros((1, 1, 1, 2, 1, 2))
    still = _backward(call | {"attention_weights": weights, "sampling_offsets": moved}).output.item()
    assert still == 3.5 + 150.0
    moved[..., 0] = 1.0
    assert _backward(call | {"attention_weights": weights, "sampling_offsets": moved}).output.item() == 4.5 + 250.0


@pytest.mark.parametrize("name", ["tiny", "pyramid", "not_averaged", "three_points"])
def test_against_the_numerical_derivative(name):
    arguments = next(c for c in inputs.CASES if c.name == name).build()
    random = np.random.default_rng(5)
    g = random.standard_normal(_backward(arguments).output.shape)
    result = _backward(arguments, g)
    step = 1e-6
    pairs = (
        ("image_feats", result.grad_feats),
        ("sampling_offsets", result.grad_offsets),
        ("attention_weights", result.grad_weights),
    )
    for key, gradient in pairs:
        direction = random.standard_normal(gradient.shape)
        ends = [(g * _backward(arguments | {key: arguments[key] + sign * step * direction}).output).sum() for sign in (1, -1)]
        assert abs((ends[0] - ends[1]) / (2 * step) - (gradient * direction).sum()) < 1e-7 * np.abs(gradient).sum()
