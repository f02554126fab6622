# SPDX-License-Identifier: Apache-2.0
"""What the formula of deformable_aggregation promises and a tolerance might hide: the strict window, groups, odd numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from muspace_core.testing.calls import as_tensors, dtypes_on, on_backend, represented, upstream_gradient
from muspace_core.testing.cases import FLOATING
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.plugin import load_sibling
from muspace_core.testing.properties import budget
from muspace_msda import deformable_aggregation
from muspace_msda._spec import DEFORMABLE_AGGREGATION

oracle = load_sibling(__file__, "deformable_aggregation_oracle")
inputs = load_sibling(__file__, "deformable_aggregation_inputs")
rounding = load_sibling(__file__, "rounding")

call = on_backend(deformable_aggregation)
SPEC = DEFORMABLE_AGGREGATION
PROPERTY = budget(150, emulated=60)
INF, NAN = float("inf"), float("nan")


def tensors(
    arguments: dict[str, np.ndarray], device: str, feat: str = "float32", geometry: str = "float32"
) -> list[torch.Tensor]:
    return list(as_tensors(arguments, device, FLOATING[geometry], mc_ms_feat=FLOATING[feat]).values())


def one_map(values: Any, shape: tuple[int, int], points: Any, weights: Any = None) -> dict[str, np.ndarray]:
    """One image, anchor, camera, scale, group and channel."""
    points = np.asarray(points, np.float64).reshape(1, 1, -1, 1, 2)
    weights = np.ones(points.shape[2]) if weights is None else np.asarray(weights, np.float64)
    return {
        "mc_ms_feat": np.asarray(values, np.float64).reshape(1, -1, 1), "spatial_shape": np.array([[shape]]),
        "scale_start_index": np.array([[0]]), "sampling_location": points, "weights": weights.reshape(1, 1, -1, 1, 1, 1),
    }  # fmt: skip


def differentiated(backend: str, given_tensors: list[torch.Tensor], seed: int = 3) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Output, the three gradients, the upstream gradient."""
    feat, shapes, starts, locations, weights = given_tensors
    leaves = [t.detach().requires_grad_() for t in (feat, locations, weights)]
    output = call(backend, leaves[0], shapes, starts, leaves[1], leaves[2])
    grad_output = upstream_gradient(output, seed)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output), grad_output


def compare(backend: str, given_tensors: list[torch.Tensor]) -> None:
    """Output and gradients against the oracle, at the spec's tolerances."""
    output, gradients, grad_output = differentiated(backend, given_tensors)
    kind = str(given_tensors[0].dtype).removeprefix("torch.")
    exact, g = [represented(t) for t in given_tensors], represented(grad_output)
    wanted = oracle.backward(g, *exact, geometry=np.float64 if kind == "float64" else np.float32)
    scales = summands(exact[0], exact[1], exact[3], exact[4], g)
    assert_close(output, wanted.output, SPEC.tolerances[kind].output, "output", scale=scales[0])
    expected = (wanted.grad_feat, wanted.grad_location, wanted.grad_weights)
    for position, name in enumerate(("mc_ms_feat", "sampling_location", "weights")):
        gradient = gradients[position]
        own = str(gradient.dtype).removeprefix("torch.")
        assert torch.isfinite(gradient).all(), f"gradient of {name} is not finite"
        tolerance = max(SPEC.tolerances[kind].grad, SPEC.tolerances[own].grad)
        assert_close(gradient, expected[position], tolerance, f"gradient of {name}", scale=scales[position + 1])


def summands(feat: np.ndarray, shapes: np.ndarray, locations: np.ndarray, weights: np.ndarray, g: np.ndarray) -> list[float]:
    """A quarter of the largest summand of the output and of each gradient: a drawn call may cancel to almost nothing."""
    seen = oracle.visible(locations)
    if not seen.any() or not feat.size:
        return [0.0] * 4
    a, v, u = np.abs(weights[seen]).max(), np.abs(feat).max(), np.abs(g).max()
    return [0.25 * s for s in (a * v, a * u, a * shapes.max() * v * u, v * u)]


def _channels(draw: Any) -> tuple[int, int]:
    groups = draw(st.sampled_from([1, 2, 3, 8]))
    return groups * draw(st.sampled_from([1, 2, 3, 4, 8, 11, 16, 33])), groups


#: Places beyond numbers; ``-0.0`` is a zero, the denormal is just inside.
STRANGE = [NAN, INF, -INF, 1e30, -1e30, 3.3e38, 1e-42, -0.0, 0.0, 1.0, 2.0**31, -(2.0**63)]


@st.composite
def calls(draw: Any) -> tuple[dict[str, np.ndarray], str, str]:
    cameras, scales = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    side = st.integers(1, 6)
    maps = [[(draw(side), draw(side)) for _ in range(scales)] for _ in range(cameras)]
    channels, groups = _channels(draw)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    places = {
        "around": lambda r, extent: r.uniform(-0.3, 1.3, (*extent, 2)),
        "inside": inputs.inside,
        "border": inputs.border,
        "one cell": inputs.one_cell,
        "one camera": inputs.one_camera_each,
    }[draw(st.sampled_from(["around", "inside", "border", "one cell", "one camera"]))]
    arguments = inputs.aggregation(
        f"property{random.integers(2**31)}", batch=draw(st.integers(0, 2)), anchors=draw(st.integers(0, 3)),
        points=draw(st.integers(1, 5)), channels=channels, groups=groups, maps=maps, locations=places,
    )  # fmt: skip
    if draw(st.booleans()):
        locations = arguments["sampling_location"]
        hit = random.random(locations.shape) < 0.2
        arguments["sampling_location"] = np.where(hit, random.choice(np.array(STRANGE), locations.shape), locations)
    arguments["weights"] *= draw(st.sampled_from([1.0, -1.0, 0.0, 30.0]))
    kinds = [("float32", "float32")] * 3 + [("bfloat16", "float32"), ("float16", "float16"), ("float64", "float64")]
    return arguments, *draw(st.sampled_from(kinds))


@pytest.mark.emu_budget(4_000_000)  # a backward that sorts has launches that grow with maps and groups
@PROPERTY
@given(drawn=calls())
def test_any_call_matches_the_oracle(drawn: Any, backend: str, device: str) -> None:
    arguments, feat, geometry = drawn
    if feat not in dtypes_on(SPEC, backend):
        feat = geometry = "float32"
    with np.errstate(over="ignore"):
        compare(backend, tensors(arguments, device, feat, geometry))


# ---- the window ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("axis", [0, 1], ids=["x", "y"])
def test_the_window_is_strict(axis: int, length: int, backend: str, device: str) -> None:
    """Exactly 0 and exactly 1 are outside; the nearest number inside contributes, and has a gradient."""
    shape = (1, length) if axis == 0 else (length, 1)
    smallest, largest = np.nextafter(np.float32(0), np.float32(1)), np.nextafter(np.float32(1), np.float32(0))
    for place, counts in (
        (0.0, False),
        (-0.0, False),
        (1.0, False),
        (float(largest), True),
        (2.0**-30, True),
        (float(smallest), True),
    ):
        if place == smallest and device != "cpu":
            continue  # a GPU may take a denormal for zero
        point = [0.5, 0.5]
        point[axis] = place
        output, gradients, _ = differentiated(backend, tensors(one_map(np.ones(length), shape, [point]), device))
        assert (output.item() != 0) == counts, place
        assert (gradients[1].reshape(2)[axis].item() != 0) == counts, place
        assert bool((gradients[0] != 0).any()) == counts and (gradients[2].item() != 0) == counts, place


@pytest.mark.parametrize("x", [-0.02, -0.05, 1.02, 1.05, 0.0, 1.0, -1e-7, 1.0000001])
@pytest.mark.parametrize("axis", [0, 1], ids=["x", "y"])
def test_the_half_pixel_band_is_outside(axis: int, x: float, backend: str, device: str) -> None:
    """A zero-padded grid_sample still finds up to half of a pixel there; the operator does not look."""
    point = [0.5, 0.5]
    point[axis] = x
    shape = (1, 8) if axis == 0 else (8, 1)
    given_tensors = tensors(one_map(np.ones(8), shape, [point]), device)
    grid = (given_tensors[3].reshape(1, 1, 1, 2) * 2 - 1).cpu()
    padded = torch.nn.functional.grid_sample(torch.ones(1, 1, *shape), grid, padding_mode="zeros", align_corners=False)
    assert padded.item() > 0.05, "the place is not in the band, so the test would show nothing"
    output, gradients, _ = differentiated(backend, given_tensors)
    assert output.item() == 0 and all((g == 0).all() for g in gradients)


def test_the_window_is_that_of_the_location_not_of_a_scale(backend: str, device: str) -> None:
    """One place, maps of one pixel and of sixteen: either all scales see it or none does."""
    maps = (((1, 1), (16, 16), (2, 1)),)
    for place, counts in ((2.0**-8, True), (-(2.0**-8), False)):
        arguments = inputs.aggregation("scales", anchors=1, points=1, channels=1, groups=1, maps=maps)
        arguments["sampling_location"][:] = (place, 0.5)
        arguments["mc_ms_feat"][:] = 1.0
        arguments["weights"][:] = 1.0
        _, gradients, _ = differentiated(backend, tensors(arguments, device))
        assert [bool(g != 0) for g in gradients[2].reshape(-1)] == [counts] * 3


# ---- numbers that are none -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["x", "y", "both"])
@pytest.mark.parametrize("weight", [0.0, 1.0, INF, NAN])
def test_a_non_finite_location_contributes_nothing(
    axis: int, bad: float, dtype: str, weight: float, backend: str, device: str
) -> None:
    if dtype not in dtypes_on(SPEC, backend):
        pytest.skip(f"{backend} has no {dtype}")
    points = np.array([[0.5, 0.5], [0.5, 0.5], [0.25, 0.25]])
    points[1, [[0], [1], [0, 1]][axis]] = bad
    given_tensors = tensors(one_map([1, 2, 3, 4], (2, 2), points, [1.0, weight, 1.0]), device, dtype, dtype)
    leaves = [given_tensors[i].requires_grad_() for i in (0, 3, 4)]
    output = call(backend, *given_tensors)
    assert output.item() == 3.5
    of_feat, of_location, of_weights = torch.autograd.grad(output.sum(), leaves)
    assert torch.isfinite(of_feat).all() and of_feat.sum().item() == 2.0
    assert (of_location.reshape(3, 2)[1] == 0).all() and torch.isfinite(of_location).all()
    assert of_weights.reshape(3).tolist() == [2.5, 0.0, 1.0]


@pytest.mark.parametrize("channels", [1, 4, 8, 32])
def test_nothing_outside_the_map_is_touched(channels: int, backend: str, device: str) -> None:
    """Corners outside the map and its neighbours in memory hold infinities, and so do weights of unseen points: no NaN."""
    maps = (((1, 2), (1, 2), (1, 2)),)
    arguments = inputs.aggregation("untouched", anchors=1, points=6, channels=channels, groups=1, maps=maps)
    arguments["mc_ms_feat"][:] = INF
    arguments["mc_ms_feat"][:, 2:4] = 2.0
    # Half a pixel inside of each edge and corner of the middle map, and twice not in sight.
    places = [[0.125, 0.25], [0.875, 0.25], [0.125, 0.75], [0.875, 0.75], [-1.0, 0.5], [0.5, 1.0]]
    arguments["sampling_location"][0, 0, :, 0] = places
    arguments["weights"][:] = 0.0
    arguments["weights"][:, :, :, :, 1] = 1.0
    arguments["weights"][:, :, 4:] = [[[INF], [NAN], [INF]]]
    arguments["scale_start_index"] = np.array([[2, 2, 2]])  # every scale is the map that holds numbers
    output, gradients, _ = differentiated(backend, tensors(arguments, device))
    assert (output == 4 * 2.0 * 0.75 * 0.75).all()
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
    untouched = [0, 1, 4, 5]
    assert (gradients[0][:, untouched] == 0).all() and (gradients[0][:, 2:4] != 0).all()


def test_an_infinite_pixel_elsewhere(backend: str, device: str) -> None:
    """Infinite and NaN features spoil the samples that touch them and no other."""
    values = np.full((4, 4), 1.0)
    values[0, 0], values[3, 3] = INF, NAN
    points = np.array([[0.375, 0.625], [0.6, 0.4], [0.4, 0.6]])
    given_tensors = tensors(one_map(values, (4, 4), points), device)
    output, gradients, _ = differentiated(backend, given_tensors)
    assert abs(output.item() - 3.0) < 1e-5 and all(torch.isfinite(g).all() for g in gradients)


# ---- groups, layout, precision -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("channels", "groups"), [(6, 3), (8, 8), (8, 1), (24, 2), (32, 8), (64, 4)])
def test_the_group_of_a_channel(channels: int, groups: int, backend: str, device: str) -> None:
    """Exact small integers: channel c takes the weight of group c // (C / G)."""
    arguments = inputs.aggregation("groups", anchors=2, points=1, channels=channels, groups=groups, maps=(((1, 1),),))
    arguments["mc_ms_feat"][:] = np.arange(1, channels + 1)
    arguments["sampling_location"][:] = 0.5
    arguments["weights"][:] = np.arange(1, groups + 1)
    output = call(backend, *tensors(arguments, device))
    expected = np.arange(1, channels + 1) * (np.arange(channels) // (channels // groups) + 1)
    assert (output.cpu().numpy() == expected).all()


def test_each_camera_reads_its_own_map(backend: str, device: str) -> None:
    """Rectangular maps with a constant of their own; a transposed size or a swapped start reads another number."""
    maps = (((2, 7), (5, 1)), ((3, 4), (1, 6)), ((7, 2), (1, 1)))
    arguments = inputs.aggregation(
        "own", batch=2, anchors=6, points=1, channels=2, groups=1, maps=maps, locations=inputs.inside
    )
    arguments["weights"][:] = 0.0
    starts, shapes = arguments["scale_start_index"], arguments["spatial_shape"]
    expected = np.zeros((2, 6))
    for position, (camera, scale) in enumerate(np.ndindex(3, 2)):
        rows = slice(starts[camera, scale], starts[camera, scale] + shapes[camera, scale].prod())
        for b in range(2):
            arguments["mc_ms_feat"][b, rows] = expected[b, position] = 1 + position + 10 * b
        arguments["weights"][:, position, :, camera, scale] = 1.0
        h, w = shapes[camera, scale]
        arguments["sampling_location"][:, position, :, camera] = ((w - 0.5) / w, (h - 0.5) / h)  # the last pixel
    output = call(backend, *tensors(arguments, device))
    assert_close(output, np.repeat(expected[..., None], 2, -1), 1e-6)


def test_maps_in_another_order(backend: str, device: str) -> None:
    """The start of a map is what the table says; two maps may even be the same rows."""
    arguments = inputs.aggregation("order", channels=4)
    feat, shapes, starts = (arguments[k] for k in ("mc_ms_feat", "spatial_shape", "scale_start_index"))
    wanted = call(backend, *tensors(arguments, device))
    arguments["mc_ms_feat"] = np.concatenate([feat[:, 26:], feat[:, :26]], 1)
    arguments["scale_start_index"] = np.where(starts >= 26, starts - 26, starts + feat.shape[1] - 26)
    assert starts.tolist() == [[0, 20], [26, 44]] and shapes[0, 0].tolist() == [4, 5]
    assert_bits_equal(call(backend, *tensors(arguments, device)), wanted, "cameras swapped in memory")
    arguments["scale_start_index"] = np.zeros((2, 2), np.int64)
    compare(backend, tensors(arguments, device))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_point_between_two_pixels_keeps_its_place_in_16_bits(kind: str, backend: str, device: str) -> None:
    """A coordinate rounded to the storage dtype would move by up to 0.78 px at a width of 200: here it may not."""
    width = 200
    ramp = np.arange(width, dtype=np.float64) % 8
    middle = rounding.middle_moved_by(kind, width)
    given_tensors = tensors(one_map(ramp, (1, width), [[(middle + 0.5) / width, 0.5]]), device, kind, "float32")
    expected = (np.floor(middle) % 8 + np.ceil(middle) % 8) / 2
    assert abs(call(backend, *given_tensors).item() - expected) <= 1e-3, "the place between the two pixels was rounded"


def test_coordinates_are_rounded_once(backend: str, device: str) -> None:
    """x*w - 0.5 as one fused operation: on a parabola the location gradient names the cell."""
    for width, x, pixel in rounding.places_that_tell_one_rounding_from_two():
        given_tensors = tensors(one_map(np.arange(width, dtype=np.float64) ** 2, (1, width), [[x, 0.5]]), device)
        given_tensors[3].requires_grad_()
        (gradient,) = torch.autograd.grad(call(backend, *given_tensors).sum(), [given_tensors[3]])
        slope = gradient.reshape(2)[0].item() / width
        assert abs(slope - (2 * (pixel - 1) + 1)) < 0.5, f"width {width}, x {x!r}: the cell is not {pixel - 1}"


def test_the_torch_composition_of_upstream_away_from_the_border(backend: str, device: str) -> None:
    """grid_sample per camera and scale, weighted and summed: what models run where the extension is absent."""
    arguments = inputs.aggregation("composition", batch=2, anchors=4, points=3, channels=12, groups=3, locations=inputs.inside)
    feat, shapes, starts, locations, weights = tensors(arguments, device)
    total = torch.zeros(2, 4, 12, device=device)
    for camera, scale in np.ndindex(2, 2):
        (h, w), start = shapes[camera, scale].tolist(), int(starts[camera, scale])
        maps = feat[:, start : start + h * w].transpose(1, 2).reshape(2, 12, h, w)
        grid = locations[:, :, :, camera] * 2 - 1
        found = torch.nn.functional.grid_sample(maps, grid, align_corners=False)  # [B, C, A, P]
        spread = weights[:, :, :, camera, scale].repeat_interleave(4, -1)
        total += torch.einsum("bcap,bapc->bac", found, spread)
    assert_close(call(backend, feat, shapes, starts, locations, weights), total, 1e-6)
