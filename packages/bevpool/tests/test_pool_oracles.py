# SPDX-License-Identifier: Apache-2.0
"""The pooling oracles against cases worked out by hand, against loops, and against their own numerical derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling

v1 = load_sibling(__file__, "bev_pool_oracle")
v2 = load_sibling(__file__, "bev_pool_v2_oracle")
voxel = load_sibling(__file__, "voxel_pooling_oracle")
depth = load_sibling(__file__, "voxel_pool_depth_oracle")
INPUTS = {
    name: load_sibling(__file__, f"{name}_inputs")
    for name in ("bev_pool", "bev_pool_v2", "voxel_pooling_train", "voxel_pooling_inference", "voxel_pool_depth")
}

pytestmark = pytest.mark.backends("cpu")


def _summed(*arguments: Any, **named: Any) -> np.ndarray:
    return depth.forward(*arguments, **named, reduce_cams=True)


def _summed_backward(*arguments: Any, **named: Any) -> dict[str, np.ndarray]:
    return depth.backward(*arguments, **named, reduce_cams=True)


PAIRS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "bev_pool": ("bev_pool", v1.forward, v1.backward),
    "bev_pool_v2": ("bev_pool_v2", v2.forward, v2.backward),
    "voxel_pooling_train": ("voxel_pooling_train", voxel.train, voxel.train_backward),
    "voxel_pooling_inference": ("voxel_pooling_inference", voxel.inference, voxel.inference_backward),
    "voxel_pool_depth": ("voxel_pool_depth", depth.forward, depth.backward),
    "voxel_pool_depth, cameras summed": ("voxel_pool_depth", _summed, _summed_backward),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("case", ["first", "c3", "repeated", "sweeps"])
def test_gradients_are_the_derivative(name: str, case: str) -> None:
    """Every sum is linear in each floating argument, so a central difference is exact but for rounding."""
    family, forward, backward = PAIRS[name]
    cases = {c.name: c for c in INPUTS[family].CASES}
    if case not in cases and case != "first":
        pytest.skip("no such case of this operator")
    arguments = cases["tiny" if case == "first" else case].build()
    output = forward(**arguments)
    grad_output = np.random.default_rng(3).standard_normal(output.shape)
    found = backward(grad_output, **arguments)
    assert set(found) == {k for k, v in arguments.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
    random = np.random.default_rng(4)
    for argument, gradient in found.items():
        assert gradient.shape == arguments[argument].shape
        for _ in range(3):
            direction = random.standard_normal(gradient.shape)
            sides = [forward(**arguments | {argument: arguments[argument] + s * direction}) for s in (0.5, -0.5)]
            numeric = ((sides[0] - sides[1]) * grad_output).sum()
            scale = np.abs(gradient * direction).sum()
            assert abs((gradient * direction).sum() - numeric) <= 1e-12 * scale, argument


def test_bev_pool_by_hand() -> None:
    feats = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]])
    coords = np.array([[0, 1, 0, 0], [2, 0, 0, 1], [0, 1, 0, 0], [3, 0, 0, 0], [0, 0, 0, -1]])  # the last two outside
    output = v1.forward(feats, coords, 2, 1, 3, 2)
    assert output.shape == (2, 1, 1, 3, 2)
    assert output[0, 0, 0].tolist() == [[0, 5], [0, 0], [0, 0]] and output[1, 0, 0].tolist() == [[0, 0], [0, 0], [2, 0]]
    gradient = v1.backward(np.arange(12.0).reshape(output.shape), feats, coords, 2, 1, 3, 2)["feats"]
    assert gradient[:, 0].tolist() == [1, 10, 1, 0, 0]


def test_bev_pool_v2_by_hand() -> None:
    """A depth used twice, a feature used three times, a cell in two intervals, a point in none, a rank outside."""
    given = {
        "depth": np.array([1.0, 2, 3, 5]).reshape(1, 1, 4, 1, 1), "feat": np.array([7.0, 11]).reshape(1, 1, 1, 1, 2),
        "ranks_depth": [1, 1, 3, 0, 9], "ranks_feat": [0] * 5, "ranks_bev": [2, 2, 2, 0, 1], "bev_feat_shape": (1, 1, 1, 3, 2),
        "interval_starts": [0, 2, 4], "interval_lengths": [2, 1, 1],
    }  # fmt: skip
    output = v2.forward(**given)
    assert output.reshape(2, 3).tolist() == [[0, 0, 63], [0, 0, 99]]
    gradients = v2.backward(np.array([0.0, 0, 1, 0, 0, 10]).reshape(output.shape), **given)
    assert gradients["depth"].reshape(-1).tolist() == [0, 2 * (7 + 110), 0, 117]
    assert gradients["feat"].reshape(-1).tolist() == [9, 90]


def test_covered_points() -> None:
    assert v2.covered([1, 0], [2, 1], 3).tolist() == [1, 2, 0]
    assert v2.covered([-2, 2, 9, 0], [3, 5, 1, -1], 3).tolist() == [0, 2]
    assert v2.covered([2**31 - 1, 0], [2**31 - 1, 2**31 - 1], 2).tolist() == [0, 1]
    assert v2.covered([], [], 4).tolist() == []


def test_ranks_by_hand() -> None:
    points = np.array([[0.5, 0.5, 0.5], [1.5, 0.5, 0.5], [-0.9, 0.5, 0.5], [0.5, 2.5, 0.5], [np.nan, 0, 0], [1.5, 1.5, 0.5]])
    cell, of_depth, of_feat, starts, lengths = v2.ranks(points.reshape(1, 1, 2, 1, 3, 3), (0, 0, 0), (1, 1, 1), (2, 2, 1))
    assert cell.tolist() == [0, 0, 1, 3] and of_depth.tolist() == [0, 2, 1, 5] and of_feat.tolist() == [0, 2, 1, 2]
    assert starts.tolist() == [0, 2, 3] and lengths.tolist() == [2, 1, 1]


def test_voxel_pooling_by_hand() -> None:
    geom = np.array([[[0, 1, 0], [2, 1, 1], [0, 1, 1]], [[2, 0, 2], [1, 0, 0], [0, 2, 0]]])
    features = np.arange(1.0, 7).reshape(2, 3, 1)
    output = voxel.train(geom, features, (3, 2, 2))
    assert output.shape == (2, 1, 2, 3)
    assert output[0, 0].tolist() == [[0, 0, 0], [4, 0, 2]] and output[1, 0].tolist() == [[0, 5, 0], [0, 0, 0]]
    assert voxel.memo(geom, (3, 2, 2)).tolist() == [[[0, 1, 0], [0, 1, 2], [0, 1, 0]], [[-1] * 3, [1, 0, 1], [-1] * 3]]


@pytest.mark.parametrize("name", ["tiny", "odd_map", "borders"])
def test_inference_against_a_loop(name: str) -> None:
    arguments = next(c for c in INPUTS["voxel_pooling_inference"].CASES if c.name == name).build()
    geom, of_depth, context, (X, Y, Z) = arguments.values()
    wanted = np.zeros((geom.shape[0], context.shape[1], Y, X))
    for b, n, d, h, w in np.ndindex(geom.shape[:-1]):
        x, y, z = (int(v) for v in geom[b, n, d, h, w])
        if 0 <= x < X and 0 <= y < Y and 0 <= z < Z:
            image = b * geom.shape[1] + n
            wanted[b, :, y, x] += of_depth[image, d, h, w] * context[image, :, h, w]
    assert_close(voxel.inference(**arguments), wanted, 1e-14)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name", ["tiny", "sweeps", "other_items", "borders"])
def test_voxel_pool_depth_against_a_loop(name: str, summed: bool) -> None:
    arguments = next(c for c in INPUTS["voxel_pool_depth"].CASES if c.name == name).build()
    feats, of_depth, coords, mask, B, X, Y, Z = arguments.values()
    _, sweeps, cameras = coords.shape[:3]
    wanted = np.zeros((B, 1 if summed else cameras, X, Y, Z, feats.shape[2]))
    for b, s, n, d, h, w in np.ndindex(mask.shape):
        cb, x, y, z = (int(v) for v in coords[b, s, n, d, h, w])
        if mask[b, s, n, d, h, w] and 0 <= cb < B and 0 <= x < X and 0 <= y < Y and 0 <= z < Z:
            product = feats[b, s * cameras + n, :, h, w] * of_depth[(b * sweeps + s) * cameras + n, d, h, w]
            wanted[cb, 0 if summed else n, x, y, z] += product
    assert np.any(wanted)
    assert_close(depth.forward(**arguments, reduce_cams=summed), wanted, 1e-14)
