# SPDX-License-Identifier: Apache-2.0
"""What the formula of flash_bevpool promises and a tolerance might hide: windows, thresholds, odd numbers, call forms."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from muspace_bevpool import flash_bevpool
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_oracle")
inputs = load_sibling(__file__, "flash_bevpool_inputs")
call = load_sibling(__file__, "flash_calls").flash

INF, NAN = float("inf"), float("nan")
F, D, P = "image_feats", "depth_params", "projection_matrices"
BOTH = pytest.mark.parametrize("distribution", [0, 1], ids=["gaussian", "laplace"])


def differentiated(backend: str, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of features and of depth parameters for an upstream gradient of ones."""
    live = given | {name: given[name].detach().requires_grad_() for name in (F, D)}
    output = call(backend, live)
    return (output.detach(), *torch.autograd.grad(output.sum(), [live[F], live[D]]))


def params(h: int, w: int, mean: float = 1.0, sigma: float = 1.0) -> np.ndarray:
    return np.broadcast_to(np.array([mean, sigma]), (h, w, 2)).copy()


# ---- the image window ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1], ids=["u", "v"])
def test_the_window_is_half_open(axis: int, backend: str, device: str) -> None:
    """0 is inside, the size is not, and behind the last pixel's centre its value is repeated; all numbers are exact."""
    features = np.array([1.0, 2.0, 4.0, 8.0])
    shape = (1, 4) if axis == 0 else (4, 1)
    along, across = (-0.75, 4.75, 11), (0.0, 0.5, 1)
    ranges = (along, across) if axis == 0 else (across, along)
    # epsilon is the smallest that leaves s = 1.25 exact: sigma = 1, epsilon = 0.25, weight = 0.8
    given = inputs.flat(features.reshape(*shape, 1), params(*shape), *ranges, epsilon=0.25)
    output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
    u = -0.5 + 0.5 * np.arange(11)
    counts = (u >= 0) & (u < 4)
    expected = np.where(counts, 0.8 * np.interp(np.clip(u, 0, 3), range(4), features), 0.0)
    assert_close(output.reshape(-1), expected, 1e-6)
    assert ((output.reshape(-1) == 0).cpu().numpy() == ~counts).all()
    # u = 3 and 3.5 belong to the last pixel alone, u = 2.5 by half: together 2.5 times the weight.
    assert_close(of_feats.reshape(-1), np.array([1.5, 2.0, 2.0, 2.5]) * 0.8, 1e-6)
    assert torch.isfinite(of_depth).all()


@pytest.mark.parametrize("inward", [True, False])
def test_the_nearest_numbers_to_the_window(inward: bool, backend: str, device: str) -> None:
    """One float to either side of 0 and of the width decides; the place itself is exact, it is the matrix' constant."""
    features = np.array([1.0, 1.0, 1.0, 1.0]).reshape(1, 4, 1)
    for edge, inside_is in ((0.0, 1.0), (4.0, -1.0)):
        place = np.nextafter(np.float32(edge), np.float32(edge + (inside_is if inward else -inside_is)))
        if edge == 0:
            place = np.float32(2.0**-60 if inward else -(2.0**-60))  # a denormal would be rounded to 0 on the way
        given = inputs.flat(features, params(1, 4), (-0.5, 0.5, 1), (-0.5, 0.5, 1))
        given[P] = np.array([[[[1, 0, 0, place], [0, 1, 0, 0], [0, 0, 0, 1]]]], np.float32)
        output, of_feats, _ = differentiated(backend, as_tensors(given, device))
        assert (output.item() != 0) == inward and bool((of_feats != 0).any()) == inward, (edge, place)


def test_behind_the_camera(backend: str, device: str) -> None:
    """d = z here.  d <= 0 does not count although u would be in the image; 0 < d < epsilon does, divided by epsilon."""
    epsilon = 2.0**-10
    given = inputs.flat(
        np.array([[[1.0], [3.0], [9.0]]]), params(1, 3, 0.0, 1.0), (-0.5, 0.5, 1), (-0.5, 0.5, 1), epsilon=epsilon
    )
    # u' = 2 * epsilon: at d <= epsilon u = 2, the third pixel; at d = 1 it is the first, nearly.
    given[P] = np.array([[[[0, 0, 0, 2 * epsilon], [0, 0, 0, 0], [0, 0, 1, 0]]]], np.float32)
    for low, high, count, expected in (
        (-1.5, 0.5, 2, 0.0),  # d = -1 and 0
        (-0.5 * epsilon, 1.5 * epsilon, 1, 9.0),  # d = epsilon / 2
        (-1.5, 1.5, 3, None),  # d = -1, 0 and 1: one sample
    ):
        given["roi_range"], given["grid_size"] = (-0.5, 0.5, -0.5, 0.5, low, high), (1, 1, count)
        output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
        wanted = oracle.forward(given[F], given[D], given[P], oracle.View.of(given))[0]
        assert_close(output, wanted, 1e-6)
        if expected is not None:
            assert_close(wanted.reshape(-1), [expected / (1 + epsilon)], 1e-6)
        assert (output.item() == 0) == (expected == 0.0) == bool((of_feats == 0).all()) == bool((of_depth == 0).all())


# ---- the weight ----------------------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("epsilon", [0.25, 0.5])
def test_exactly_at_the_threshold(epsilon: float, distribution: int, backend: str, device: str) -> None:
    """At z = 0 the weight is exactly 1/s (half of it for laplace): equal counts, one float above does not."""
    s = 0.5 if epsilon == 0.25 else 1.0
    weight = (1 / s) if distribution == 0 else (0.5 / s)
    for threshold, counts in (
        (weight, True),
        (float(np.nextafter(np.float32(weight), np.float32(9))), False),
        (float(np.nextafter(np.float32(weight), np.float32(0))), True),
    ):
        given = inputs.flat(
            np.full((1, 1, 2), 3.0), params(1, 1, 1.0, s - epsilon), (0, 1, 1), (0, 1, 1), epsilon=epsilon,
            depth_distribution=distribution, depth_weight_threshold=threshold,
        )  # fmt: skip
        output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
        assert output.reshape(-1).tolist() == ([3.0 * weight] * 2 if counts else [0.0] * 2), threshold
        assert of_feats.reshape(-1).tolist() == ([weight] * 2 if counts else [0.0] * 2)
        # At z = 0 both derivatives by the mean vanish; that by sigma is -w/s times the sum of the features.
        assert of_depth.reshape(-1).tolist() == [0.0, -6.0 * weight / s if counts else 0.0]


def test_a_dropped_sample_is_not_averaged(backend: str, device: str) -> None:
    """Two heights of which one falls below the threshold: the mean is over the other alone, it is not halved."""
    given = inputs.flat(np.full((1, 1, 1), 5.0), params(1, 1, 1.0, 0.75), (0, 1, 1), (0, 1, 1), epsilon=0.25)
    given[P] = np.array([[[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]]], np.float32)
    given["roi_range"], given["grid_size"] = (0, 1, 0, 1, 0.5, 8.5), (1, 1, 2)  # d = 2.5 and 6.5
    weights = np.exp(-0.5 * np.array([1.5, 5.5]) ** 2)
    given["depth_weight_threshold"] = 0.1
    assert_close(call(backend, as_tensors(given, device)).reshape(-1), [5.0 * weights[0]], 2e-6)
    given["depth_weight_threshold"] = 0.0
    assert_close(call(backend, as_tensors(given, device)).reshape(-1), [2.5 * weights.sum()], 2e-6)


@BOTH
def test_the_count_divides_not_the_weights(distribution: int, backend: str, device: str) -> None:
    """The same camera twice changes nothing, to the bit; with a wider spread the output falls."""
    given = as_tensors(inputs.lift("count", cameras=1, distribution=distribution), device)
    once = call(backend, given)
    twice = given | {name: torch.cat([given[name]] * 2, 1) for name in (F, D, P)}
    assert_close(call(backend, twice), once, 1e-6)
    wide = given | {D: given[D] * torch.tensor([1.0, 50.0], device=device)}
    assert float(call(backend, wide).abs().max()) < 0.2 * float(once.abs().max())


def test_a_camera_that_sees_nothing_changes_nothing(backend: str, device: str) -> None:
    given = as_tensors(inputs.lift("away"), device)
    wanted = call(backend, given)
    away = given[P][:, :1].clone()
    away[:, :, 2, 3] -= 1e4  # every depth is negative
    more = given | {name: torch.cat([given[name], given[name][:, :1]], 1) for name in (F, D)}
    more[P] = torch.cat([given[P], away], 1)
    assert_bits_equal(call(backend, more), wanted)
    _, of_feats, of_depth = differentiated(backend, more)
    assert (of_feats[:, 2] == 0).all() and (of_depth[:, 2] == 0).all()


# ---- numbers that are none -----------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("threshold", [1e-6, 0.0])
@pytest.mark.parametrize("channel", [0, 1], ids=["mean", "sigma"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_depth_that_is_no_number(
    bad: float, channel: int, threshold: float, distribution: int, backend: str, device: str
) -> None:
    """The samples that touch the pixel contribute nothing and get no gradient; the others keep theirs."""
    given = inputs.flat(
        np.arange(1.0, 6).reshape(1, 5, 1), params(1, 5), (0.25, 4.25, 4), (0.0, 0.5, 1), depth_distribution=distribution,
        depth_weight_threshold=threshold,
    )  # fmt: skip
    given[D][0, 0, 0, 2, channel] = bad  # cells stand at u = 0.75, 1.75, 2.75, 3.75: the middle two touch pixel 2
    output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
    found = output.reshape(-1)
    scale = (1.0 if distribution == 0 else 0.5) / (1 + 2.0**-20)
    assert (found[1:3] == 0).all()
    assert_close(found[[0, 3]], np.array([1.75, 4.75]) * scale, 1e-6)
    assert torch.isfinite(of_feats).all() and torch.isfinite(of_depth).all()
    assert_close(of_feats.reshape(-1), np.array([0.25, 0.75, 0, 0.25, 0.75]) * scale, 1e-6)
    assert (of_depth[0, 0, 0, 2] == 0).all()


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_projection_that_is_no_number(bad: float, row: int, backend: str, device: str) -> None:
    """That camera sees nothing; the other one goes on as if it were alone."""
    given = as_tensors(inputs.lift("bad projection"), device)
    alone = {name: given[name][:, 1:] for name in (F, D, P)}
    wanted = differentiated(backend, given | alone)
    spoiled = given[P].clone()
    spoiled[:, 0, row, 3] = bad
    output, of_feats, of_depth = differentiated(backend, given | {P: spoiled})
    assert_bits_equal(output, wanted[0])
    for gradient, other in ((of_feats, wanted[1]), (of_depth, wanted[2])):
        assert (gradient[:, 0] == 0).all()
        assert_close(gradient[:, 1:], other, 1e-6)


def test_nothing_beyond_the_last_pixel_is_touched(backend: str, device: str) -> None:
    """In the last half pixel of both axes the last pixel stands for all four corners; its neighbours in memory are the
    pixel before it and the next image, and hold no numbers."""
    features, depth = np.full((2, 2, 3, 4), INF), np.full((2, 2, 3, 2), NAN)
    features[0, 1, 2], depth[0, 1, 2] = 2.0, (1.0, 1.0)
    given = inputs.flat(features[0], depth[0], (2.25, 2.75, 1), (1.25, 1.75, 1))  # u = 2.5, v = 1.5
    given[F], given[D] = features[None], depth[None]
    away = inputs.FLAT - np.array([[0, 0, 0, 9]] * 2 + [[0] * 4], np.float32)
    given[P] = np.stack([inputs.FLAT, away])[None]
    output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
    assert_close(output.reshape(-1), np.full(4, 2.0), 1e-5)
    touched = np.zeros((2, 2, 3), bool)
    touched[0, 1, 2] = True
    for gradient in (of_feats, of_depth):
        assert torch.isfinite(gradient).all()
        assert ((gradient[0] != 0).any(-1).cpu().numpy() == touched).all()


def test_a_degenerate_spread(backend: str, device: str) -> None:
    """sigma + epsilon of zero or less gives no density: nothing counts, and no gradient is NaN."""
    given = inputs.flat(
        np.arange(1.0, 4).reshape(1, 3, 1), params(1, 3), (-0.5, 2.5, 3), (-0.5, 0.5, 1), epsilon=0.5,
        depth_weight_threshold=1e-6,
    )  # fmt: skip
    given[D][0, 0, 0, 0, 1], given[D][0, 0, 0, 1, 1] = -0.5, -3.0  # s = 0 and -2.5; u = 0, 1, 2 on the pixels' centres
    output, of_feats, of_depth = differentiated(backend, as_tensors(given, device))
    assert (output.reshape(-1)[:2] == 0).all() and output.reshape(-1)[2] > 0
    assert (of_feats.reshape(-1)[:2] == 0).all() and torch.isfinite(of_depth).all()


# ---- forms of the call ---------------------------------------------------------------------------------------------
def test_four_rows_are_three(backend: str, device: str) -> None:
    """A 4x4 matrix has a last row that nobody reads, whatever is in it; upstream misreads such a tensor."""
    given = as_tensors(inputs.lift("rows", batch=2, cameras=3), device)
    wanted = differentiated(backend, given)
    for last in (1.0, 0.0, NAN):
        padded = torch.nn.functional.pad(given[P], (0, 0, 0, 1), value=last)
        found = differentiated(backend, given | {P: padded})
        assert_bits_equal(found[0], wanted[0])
        for left, right in zip(found[1:], wanted[1:], strict=True):
            assert_close(left, right, 1e-6)


@pytest.mark.parametrize("hints", list(itertools.product([False, True], repeat=4))[::3])
def test_hints_change_nothing(hints: tuple[bool, ...], backend: str, device: str) -> None:
    given = as_tensors(inputs.lift("hints", channels=8), device)
    names = ("use_shared_memory", "optimize_z_precompute", "use_warp_kernel", "use_vectorized_load")
    wanted = call(backend, given)
    assert_bits_equal(call(backend, given | dict(zip(names, hints, strict=True))), wanted)


def test_defaults_and_keywords(backend: str, device: str) -> None:
    """Gaussian, both epsilons 1e-6; every argument by its upstream name."""
    given = as_tensors(inputs.lift("defaults"), device)
    wanted = call(backend, given)
    by_hand = on_backend(flash_bevpool)
    assert_bits_equal(by_hand(backend, *list(given.values())[:7]), wanted, "seven arguments")
    assert_bits_equal(by_hand(backend, **given), wanted, "by name")
    lists = given | {k: list(given[k]) for k in ("image_size", "roi_range", "grid_size")}
    assert_bits_equal(call(backend, lists), wanted, "lists")


def test_feature_size(backend: str, device: str) -> None:
    """None, or what the maps are; upstream computes offsets from it, so that another size reads other pixels."""
    given = as_tensors(inputs.lift("tiny", batch=2), device)
    wanted = call(backend, given)
    right = torch.tensor([5, 7], device=device).expand(2, 2, 2)
    for form in (right, right.int(), right.contiguous(), right.tolist()):
        assert_bits_equal(call(backend, given | {"feature_size": form}), wanted)
    wrong = right.clone()
    wrong[1, 0, 1] = 8
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^feature_size"):
            call(backend, given | {"feature_size": wrong})
    with pytest.raises(ValueError, match=r"^feature_size"):
        call(backend, given | {"feature_size": wrong.tolist()})


@pytest.mark.backends("cuda", "hip", "musa")
def test_feature_size_on_a_device_is_checked_on_request(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = as_tensors(inputs.lift("tiny", batch=2), device)
    wrong = torch.tensor([5, 8], device=device).expand(2, 2, 2)
    assert_bits_equal(call(backend, given | {"feature_size": wrong}), call(backend, given), "the maps' own size counts")
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    with pytest.raises(ValueError, match=r"^feature_size"):
        call(backend, given | {"feature_size": wrong})


@pytest.mark.parametrize("name", inputs.VALUES)
def test_bad_numbers(name: str, backend: str, device: str) -> None:
    argument, value, exception = inputs.VALUES[name]
    given = as_tensors(inputs.lift("tiny", batch=2), device)
    with pytest.raises(exception, match=rf"^{argument}\b.*expected "):
        call(backend, given | {argument: value})


def test_a_batch_is_its_items(backend: str, device: str) -> None:
    """Every item has a calibration of its own; a block that takes another item's matrices shows here."""
    given = as_tensors(inputs.lift("items", batch=3, grid=(3, 3, 2)), device)
    together = differentiated(backend, given)
    for b in range(3):
        alone = differentiated(backend, given | {name: given[name][b : b + 1] for name in (F, D, P)})
        assert_bits_equal(together[0][b : b + 1], alone[0])
        for left, right in zip(together[1:], alone[1:], strict=True):
            assert_close(left[b : b + 1], right, 1e-6)


def test_the_grid_is_rows_of_y(backend: str, device: str) -> None:
    """[B, Y, X, C]: a camera whose pixel is the cell, so that the output is the image."""
    image = np.arange(1.0, 13).reshape(3, 4, 1)
    given = inputs.flat(image, params(3, 4, 1.0, 0.75), (-0.5, 3.5, 4), (-0.5, 2.5, 3), epsilon=0.25)
    output = call(backend, as_tensors(given, device))
    assert output.shape == (1, 3, 4, 1) and output.is_contiguous()
    assert_close(output.reshape(3, 4), image.reshape(3, 4), 1e-6)


def test_image_size_scales_u_and_v_apart(backend: str, device: str) -> None:
    """An image of twice the width and four times the height of the map."""
    image = np.arange(1.0, 13).reshape(3, 4, 1)
    given = inputs.flat(image, params(3, 4, 1.0, 0.75), (-1.0, 7.0, 4), (-2.0, 10.0, 3), epsilon=0.25)
    given["image_size"] = (12, 8)
    assert_close(call(backend, as_tensors(given, device)).reshape(3, 4), image.reshape(3, 4), 1e-6)
