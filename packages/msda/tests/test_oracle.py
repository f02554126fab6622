# SPDX-License-Identifier: Apache-2.0
"""The oracle against cases worked out by hand and against its own numerical derivative: it owes nothing to the operator."""

from __future__ import annotations

import numpy as np
import pytest
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")


def _one(value, shape, x, y, weight=1.0):
    """One head, channel, level, query and point."""
    return {
        "value": np.asarray(value, np.float64).reshape(1, -1, 1, 1), "shapes": np.array([shape]), "level_starts": None,
        "locations": np.array([x, y], np.float64).reshape(1, 1, 1, 1, 1, 2), "weights": np.full((1, 1, 1, 1, 1), weight),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (0.25, 0.25, 1.0),  # centre of the first pixel
        (0.75, 0.25, 2.0),
        (0.25, 0.75, 3.0),
        (0.5, 0.5, 2.5),  # between all four
        (0.0, 0.25, 0.5),  # on the left edge: half of the pixel, half of nothing
        (1.0, 0.75, 2.0),
        (-0.25, 0.25, 0.0),  # X = -1 exactly: outside
        (1.25, 0.25, 0.0),  # X = w exactly: outside
        (-0.125, 0.25, 0.25),
        (float("nan"), 0.25, 0.0),
        (float("inf"), 0.25, 0.0),
        (0.25, float("-inf"), 0.0),
        (1e38, 0.25, 0.0),
    ],
)
def test_by_hand(x, y, expected):
    got = oracle.forward(**_one([1, 2, 3, 4], (2, 2), x, y))
    assert got.shape == (1, 1, 1) and got[0, 0, 0] == expected


def test_gradient_by_hand():
    """value 1 2 / 3 4 at X = 0.25, Y = 0.5, weight 2, upstream gradient 3."""
    case = _one([1, 2, 3, 4], (2, 2), 0.375, 0.5, weight=2.0)
    result = oracle.backward(np.full((1, 1, 1), 3.0), **case)
    assert result.output[0, 0, 0] == 2 * (0.5 * 1.25 + 0.5 * 3.25)
    assert result.grad_weights.item() == 3 * 2.25
    assert result.grad_value.reshape(-1).tolist() == [6 * 0.375, 6 * 0.125, 6 * 0.375, 6 * 0.125]
    assert result.grad_locations.reshape(-1).tolist() == [3 * 2 * 2 * 1.0, 3 * 2 * 2 * 2.0]


def test_the_level_and_axis_order():
    """Rows are y, columns x, levels follow each other; distinct sizes make any mix-up visible."""
    value = np.arange(2 * 3 + 1 * 4, dtype=np.float64).reshape(1, -1, 1, 1)
    shapes = np.array([[2, 3], [1, 4]])
    locations = np.array([[2.5 / 3, 1.5 / 2], [1.5 / 4, 0.5]]).reshape(1, 1, 1, 2, 1, 2)
    got = oracle.forward(value, shapes, None, locations, np.array([1.0, 100.0]).reshape(1, 1, 1, 2, 1))
    assert abs(got.item() - (5 + 100 * 7)) < 1e-3


def test_heads_and_batches_stay_apart():
    arguments = inputs.attention("apart", batch=3, heads=4)
    whole = oracle.forward(*arguments.values()).reshape(3, 3, 4, 4)
    value, shapes, level_starts, locations, weights = arguments.values()
    for b in range(3):
        for head in range(4):
            one = np.s_[b : b + 1, :, head : head + 1]
            alone = oracle.forward(value[one], shapes, level_starts, locations[one], weights[one])
            np.testing.assert_allclose(alone[0], whole[b, :, head], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["value", "sampling_locations", "attention_weights"])
def test_gradients_are_the_derivative(name):
    arguments = inputs.attention("derivative", batch=2, queries=2)
    # Away from cell boundaries, where the derivative exists on both sides.
    assert not oracle.near_boundary(arguments["sampling_locations"], arguments["spatial_shapes"], 1e-4).any()
    grad_output = np.random.default_rng(5).standard_normal((2, 2, 8))
    result = oracle.backward(grad_output, *arguments.values(), geometry=np.float64)
    found = {
        "value": result.grad_value, "sampling_locations": result.grad_locations, "attention_weights": result.grad_weights,
    }[name]  # fmt: skip
    step, numeric = 1e-5, np.zeros_like(found)
    for at in np.ndindex(found.shape):
        sides = []
        for sign in (step, -step):
            moved = dict(arguments)
            moved[name] = arguments[name].copy()
            moved[name][at] += sign
            sides.append((oracle.forward(*moved.values(), geometry=np.float64) * grad_output).sum())
        numeric[at] = (sides[0] - sides[1]) / (2 * step)
    assert_close(found, numeric, 1e-9, name)


def test_right_hand_derivative_at_a_pixel_centre():
    """At an integer X the floor cell decides, so the slope is that towards the next pixel."""
    centre = _one([1, 5, 7], (1, 3), 0.5, 0.5)
    result = oracle.backward(np.ones((1, 1, 1)), **centre)
    assert result.grad_locations.reshape(-1)[0] == 3 * (7 - 5)


def test_window_next_to_infinity():
    """A corner outside the map adds nothing, whatever lies in the neighbouring level or carries the weight."""
    inf = float("inf")
    arguments = {
        "value": np.array([inf, 1.0, inf]).reshape(1, 3, 1, 1), "shapes": np.array([[1, 1]]), "level_starts": np.array([1]),
        "locations": np.array([[0.5, 0.5], [0.0, 0.5], [9.0, 9.0]]).reshape(1, 1, 1, 1, 3, 2),
        "weights": np.array([1.0, 1.0, inf]).reshape(1, 1, 1, 1, 3),
    }  # fmt: skip
    result = oracle.backward(np.ones((1, 1, 1)), **arguments)
    assert result.output.item() == 1.5
    assert all(np.isfinite(g).all() for g in (result.grad_value, result.grad_locations, result.grad_weights))


def test_coordinates_round_once():
    """float64 arithmetic and one cast equals a fused multiply-add in float32, and differs from two roundings."""
    x = np.random.default_rng(0).random(20000).astype(np.float32)
    locations = np.stack([x, x], -1).reshape(1, -1, 1, 1, 1, 2)
    once, _ = oracle.coordinates(locations, np.array([[1, 200]]))
    twice = (x * np.float32(200)).astype(np.float32) - np.float32(0.5)
    exact = x.astype(np.longdouble) * 200 - np.longdouble(0.5)
    assert (once.reshape(-1) == exact.astype(np.float32)).all()
    assert (once.reshape(-1) != twice).any()


def test_legacy_alias_reads_a_prefix():
    locations = np.arange(2 * 3 * 2 * 4 * 2 * 2, dtype=np.float64).reshape(2, 3, 2, 4, 2, 2)
    weights = np.arange(2 * 3 * 2 * 4 * 2, dtype=np.float64).reshape(2, 3, 2, 4, 2)
    alias_locations, alias_weights = oracle.legacy_alias(locations, weights, 1)
    assert alias_locations.shape == (2, 3, 2, 1, 2, 2) and alias_weights.shape == (2, 3, 2, 1, 2)
    # Group s of P points for (b, q, head) number s: the second query's first head reads the first query's third level.
    assert (alias_weights[0, 1, 0, 0] == weights.reshape(-1, 2)[2]).all()
    assert (alias_locations[1, 2, 1, 0] == locations.reshape(-1, 2, 2)[11]).all()
