# SPDX-License-Identifier: Apache-2.0
"""The oracle of deformable_aggregation against cases worked out by hand and its own numerical derivative."""

from __future__ import annotations

import numpy as np
import pytest
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")


def _one(values, shape, x, y, weight=1.0):
    """One image, anchor, point, camera, scale, group and channel."""
    return {
        "feat": np.asarray(values, np.float64).reshape(1, -1, 1), "shapes": np.array([[shape]]), "starts": np.array([[0]]),
        "locations": np.array([x, y], np.float64).reshape(1, 1, 1, 1, 2), "weights": np.full((1, 1, 1, 1, 1, 1), weight),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (0.25, 0.25, 1.0),  # centre of the first pixel
        (0.75, 0.25, 2.0),
        (0.25, 0.75, 3.0),
        (0.5, 0.5, 2.5),  # between all four
        (0.125, 0.25, 0.75),  # a quarter of a pixel beside the first centre, over the edge of the map
        (0.0, 0.25, 0.0),  # exactly on the edge: outside, where a zero-padded sample would still be half of a pixel
        (1.0, 0.25, 0.0),
        (0.25, 0.0, 0.0),
        (0.25, 1.0, 0.0),
        (-0.0625, 0.25, 0.0),  # the half-pixel band that grid_sample accepts
        (1.0625, 0.25, 0.0),
        (float("nan"), 0.25, 0.0),
        (0.25, float("inf"), 0.0),
        (float("-inf"), 0.25, 0.0),
    ],
)
def test_by_hand(x, y, expected):
    got = oracle.forward(**_one([1, 2, 3, 4], (2, 2), x, y))
    assert got.shape == (1, 1, 1) and got.item() == expected


def test_gradient_by_hand():
    """Values 1 2 / 3 4 at X = 0.25, Y = 0.5, weight 2, upstream gradient 3."""
    result = oracle.backward(np.full((1, 1, 1), 3.0), **_one([1, 2, 3, 4], (2, 2), 0.375, 0.5, weight=2.0))
    assert result.output.item() == 2 * 2.25
    assert result.grad_weights.item() == 3 * 2.25
    assert result.grad_feat.reshape(-1).tolist() == [6 * 0.375, 6 * 0.125, 6 * 0.375, 6 * 0.125]
    assert result.grad_location.reshape(-1).tolist() == [3 * 2 * 2 * 1.0, 3 * 2 * 2 * 2.0]


def test_the_group_of_a_channel():
    """Channel c takes the weight of group c // (C / G), not c % G."""
    case = _one([0], (1, 1), 0.5, 0.5)
    case["feat"] = np.array([1.0, 10, 100, 1000, 10000, 100000]).reshape(1, 1, 6)
    case["weights"] = np.array([2.0, 3.0, 5.0]).reshape(1, 1, 1, 1, 1, 3)
    assert oracle.forward(**case).reshape(-1).tolist() == [2, 20, 300, 3000, 50000, 500000]


def test_cameras_and_scales_in_order():
    """The map of (camera, scale) starts where the table says, and (h, w) is rows by columns."""
    maps = np.array([[[2, 3], [1, 4]], [[1, 2], [3, 1]]])
    starts = oracle.starts_of(maps)
    assert starts.tolist() == [[0, 6], [10, 12]]
    feat = np.arange(15, dtype=np.float64).reshape(1, 15, 1)
    weights = np.zeros((1, 4, 1, 2, 2, 1))
    locations = np.full((1, 4, 1, 2, 2), 0.5)
    for anchor, (camera, scale, row, column) in enumerate([(0, 0, 1, 2), (0, 1, 0, 3), (1, 0, 0, 1), (1, 1, 2, 0)]):
        h, w = maps[camera, scale]
        weights[0, anchor, 0, camera, scale] = 1.0
        locations[0, anchor, 0, camera] = ((column + 0.5) / w, (row + 0.5) / h)
    assert_close(oracle.forward(feat, maps, starts, locations, weights, np.float64).reshape(-1), [5, 9, 11, 14], 1e-12)


def test_against_the_numerical_derivative():
    """Directional derivatives of every argument, in float64."""
    arguments = inputs.aggregation("numerical", batch=2, channels=6, groups=3)
    assert not oracle.near_cell_boundary(arguments["sampling_location"], arguments["spatial_shape"], 1e-5).any()
    random = np.random.default_rng(5)
    g = random.standard_normal((2, 3, 6))
    result = oracle.backward(g, *arguments.values(), geometry=np.float64)
    step = 1e-6
    for which, gradient in ((0, result.grad_feat), (3, result.grad_location), (4, result.grad_weights)):
        direction = random.standard_normal(gradient.shape)
        moved = [
            [a + sign * step * direction if i == which else a for i, a in enumerate(arguments.values())] for sign in (1, -1)
        ]
        up, down = ((g * oracle.forward(*m, geometry=np.float64)).sum() for m in moved)
        assert abs((up - down) / (2 * step) - (gradient * direction).sum()) < 1e-7 * np.abs(gradient).sum()


@pytest.mark.parametrize("case", inputs.CASES, ids=lambda c: c.name)
def test_the_cases_are_what_they_say(case):
    """Seen samples where a case is about sums, unseen ones where it is about borders: a test of nothing passes always."""
    arguments = case.build()
    seen = oracle.visible(arguments["sampling_location"]).mean()
    if case.name == "nothing_seen":
        assert seen == 0
    elif case.name in ("points_67", "one_cell"):
        assert seen == 1
    else:
        assert 0.05 < seen < 0.95
