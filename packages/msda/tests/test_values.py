# SPDX-License-Identifier: Apache-2.0
"""What the formula promises and a tolerance might hide: windows, non-finite numbers, precision of coordinates, call forms."""

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
from muspace_msda import multi_scale_deformable_attn
from muspace_msda._spec import MULTI_SCALE_DEFORMABLE_ATTN

oracle = load_sibling(__file__, "oracle")
inputs = load_sibling(__file__, "inputs")
rounding = load_sibling(__file__, "rounding")

call = on_backend(multi_scale_deformable_attn)
SPEC = MULTI_SCALE_DEFORMABLE_ATTN
PROPERTY = budget(200, emulated=60)
INF, NAN = float("inf"), float("nan")


def tensors(
    arguments: dict[str, np.ndarray], device: str, value: str = "float32", geometry: str = "float32"
) -> list[torch.Tensor]:
    return list(as_tensors(arguments, device, FLOATING[geometry], value=FLOATING[value]).values())


def one_map(values: Any, shape: tuple[int, int], points: Any, weights: Any = None) -> dict[str, np.ndarray]:
    """One batch item, head, channel, query and level."""
    points = np.asarray(points, np.float64).reshape(1, 1, 1, 1, -1, 2)
    weights = np.ones(points.shape[:-1]) if weights is None else np.asarray(weights, np.float64).reshape(points.shape[:-1])
    return {
        "value": np.asarray(values, np.float64).reshape(1, -1, 1, 1), "spatial_shapes": np.array([shape]),
        "level_start_index": np.array([0]), "sampling_locations": points, "attention_weights": weights,
    }  # fmt: skip


def compare(backend: str, given_tensors: list[torch.Tensor], seed: int = 3) -> None:
    """Output and gradients against the oracle, at the spec's tolerances."""
    value, shapes, level_starts, locations, weights = given_tensors
    leaves = [t.detach().requires_grad_() for t in (value, locations, weights)]
    output = call(backend, leaves[0], shapes, level_starts, leaves[1], leaves[2])
    grad_output = upstream_gradient(output, seed)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    kind = str(value.dtype).removeprefix("torch.")
    exact, g = [represented(t) for t in given_tensors], represented(grad_output)
    wanted = oracle.backward(g, *exact, geometry=np.float64 if kind == "float64" else np.float32)
    scales = summands(exact[0], exact[1], exact[3], exact[4], g)
    assert_close(output, wanted.output, SPEC.tolerances[kind].output, "output", scale=scales[0])
    masks: dict[str, np.ndarray] = {}
    if (backend, kind) == ("reference", "float64"):
        # Plain PyTorch has no wider type than float64, so it rounds x*w - 0.5 twice: on an edge it may take the next cell.
        clear = ~oracle.near_boundary(exact[3], exact[1], 1e-12)
        masks["sampling_locations"] = clear[..., None] & np.ones(2, bool)
    for leaf, name, gradient, expected, scale in zip(
        leaves,
        ("value", "sampling_locations", "attention_weights"),
        gradients,
        (wanted.grad_value, wanted.grad_locations, wanted.grad_weights),
        scales[1:],
        strict=True,
    ):
        own = str(leaf.dtype).removeprefix("torch.")
        assert torch.isfinite(gradient).all(), f"gradient of {name} is not finite"
        tolerance = max(SPEC.tolerances[kind].grad, SPEC.tolerances[own].grad)
        assert_close(gradient, expected, tolerance, f"gradient of {name}", masks.get(name), scale=scale)


def summands(value: np.ndarray, shapes: np.ndarray, locations: np.ndarray, weights: np.ndarray, g: np.ndarray) -> list[float]:
    """A quarter of the largest summand of the output and of each gradient.

    A drawn call may consist of one sample at the rim of the window, whose result is far smaller than the numbers it is made of.
    """
    x, y = oracle.coordinates(locations, shapes)
    size = shapes[:, :, None].astype(np.float64)
    with np.errstate(invalid="ignore"):
        inside = (x > -1) & (x < size[:, 1]) & (y > -1) & (y < size[:, 0])
    if not inside.any() or not value.size:
        return [0.0] * 4
    a, v = np.abs(np.where(inside, weights, 0)).max(), np.abs(value).max()
    channels = np.abs(g.reshape(-1, value.shape[-1]))
    return [
        0.25 * s for s in (a * v, a * channels.max(), a * shapes.max() * v * channels.sum(-1).max(), v * channels.sum(-1).max())
    ]


#: Pixel coordinates in every border band, relative to a size n (the second entry is multiplied by it).
BANDS = [
    (-1.0, 0.0), (-1.0 - 2**-6, 0.0), (-1.0 + 2**-6, 0.0), (-0.5, 0.0), (-(2**-7), 0.0), (0.0, 0.0), (0.5, 0.0), (0.0, 0.5),
    (-1.0, 1.0), (-0.5, 1.0), (-(2**-6), 1.0), (0.0, 1.0), (2**-6, 1.0), (4.0, 1.0), (0.0, -3.0),
]  # fmt: skip
STRANGE = [NAN, INF, -INF, 1e30, -1e30, 3.3e38, -3.3e38, 1e-42, -0.0, 2**31, 2**33, -(2**63)]


@st.composite
def calls(draw: Any) -> tuple[dict[str, np.ndarray], str, str]:
    levels = draw(st.integers(1, 3))
    shapes = [draw(st.tuples(st.integers(1, 6), st.integers(1, 6))) for _ in range(levels)]
    batch, queries = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    heads, points = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    channels = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 31, 32, 33, 64]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extent = (batch, queries, heads, levels, points)
    pixels = np.empty((*extent, 2))
    mode = draw(st.sampled_from(["inside", "around", "bands", "one place", "mixture"]))
    for level, (h, w) in enumerate(shapes):
        for axis, size in ((0, w), (1, h)):
            target = pixels[..., level, :, axis]
            band = np.array([constant + factor * size for constant, factor in BANDS])
            choices = {
                "inside": random.uniform(0, max(size - 1, 0), target.shape),
                "around": random.uniform(-2, size + 1, target.shape),
                "bands": random.choice(band, target.shape),
                "one place": np.full(target.shape, min(0.75, size - 0.5)),
            }
            target[...] = (
                choices[mode]
                if mode in choices
                else np.where(random.random(target.shape) < 0.5, choices["around"], choices["bands"])
            )
    locations = inputs.at_pixels(pixels[..., 0], pixels[..., 1], shapes)
    if draw(st.booleans()):
        hit = random.random(locations.shape) < 0.2
        locations = np.where(hit, random.choice(np.array(STRANGE, np.float64), locations.shape), locations)
    weights = draw(st.sampled_from([1.0, -1.0, 0.0, 30.0])) * random.uniform(-0.2, 1.0, extent)
    weights[random.random(extent) < 0.15] = 0.0
    rows = sum(h * w for h, w in shapes)
    arguments = {
        "value": random.standard_normal((batch, rows, heads, channels)), "spatial_shapes": np.asarray(shapes),
        "level_start_index": inputs.starts(shapes), "sampling_locations": locations, "attention_weights": weights,
    }  # fmt: skip
    value, geometry = draw(
        st.sampled_from(
            [("float32", "float32")] * 3 + [("bfloat16", "float32"), ("float16", "float16"), ("float64", "float64")]
        )
    )
    return arguments, value, geometry


@PROPERTY
@given(drawn=calls())
def test_any_call_matches_the_oracle(drawn: Any, backend: str, device: str) -> None:
    arguments, value, geometry = drawn
    if value not in dtypes_on(SPEC, backend):
        value = geometry = "float32"
    with np.errstate(over="ignore"):
        compare(backend, tensors(arguments, device, value, geometry))


@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("axis", [0, 1], ids=["x", "y"])
def test_the_window_is_open_on_both_sides(axis: int, length: int, backend: str, device: str) -> None:
    """Exactly -1 and exactly the size are outside; the nearest float inside contributes, and has a gradient."""
    shape = (1, length) if axis == 0 else (length, 1)
    low, high = np.float32(-0.5 / length), np.float32((length + 0.5) / length)
    for edge, inward in ((low, np.float32(np.inf)), (high, np.float32(-np.inf))):
        at = edge
        # The rounded quotient may fall on either side; walk to the last float whose coordinate is on the edge or beyond.
        while -1 < np.float32(np.float64(at) * length - 0.5) < length:
            at = np.nextafter(at, -inward)
        inside = at
        while not -1 < np.float32(np.float64(inside) * length - 0.5) < length:
            at, inside = inside, np.nextafter(inside, inward)
        for place, counts in ((at, False), (inside, True)):
            point = [0.5, 0.5]
            point[axis] = float(place)
            arguments = tensors(one_map(np.ones(length), shape, [point]), device)
            leaves = [arguments[0].requires_grad_(), arguments[3].requires_grad_(), arguments[4].requires_grad_()]
            output = call(backend, *arguments)
            gradients = torch.autograd.grad(output.sum(), leaves)
            assert (output.item() != 0) == counts, (edge, place)
            assert (gradients[1].reshape(2)[axis].item() != 0) == counts
            assert bool((gradients[0] != 0).any()) == counts and (gradients[2].item() != 0) == counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["x", "y", "both"])
@pytest.mark.parametrize("weight", [0.0, 1.0, -2.0, INF, NAN])
def test_a_non_finite_location_contributes_nothing(
    axis: int, bad: float, dtype: str, weight: float, backend: str, device: str
) -> None:
    if dtype not in dtypes_on(SPEC, backend):
        pytest.skip(f"{backend} has no {dtype}")
    points = np.array([[0.5, 0.5], [0.5, 0.5], [0.25, 0.25]])
    points[1, [[0], [1], [0, 1]][axis]] = bad
    arguments = tensors(one_map([1, 2, 3, 4], (2, 2), points, [1.0, weight, 1.0]), device, dtype, dtype)
    leaves = [arguments[0].requires_grad_(), arguments[3].requires_grad_(), arguments[4].requires_grad_()]
    output = call(backend, *arguments)
    assert output.item() == 3.5
    of_value, of_locations, of_weights = torch.autograd.grad(output.sum(), leaves)
    assert torch.isfinite(of_value).all() and of_value.sum().item() == 2.0
    assert (of_locations.reshape(3, 2)[1] == 0).all() and torch.isfinite(of_locations).all()
    assert of_weights.reshape(3).tolist() == [2.5, 0.0, 1.0]


def test_nothing_outside_the_window_is_touched(backend: str, device: str) -> None:
    """Infinite values beside the sampled pixel, and infinite weights on samples outside, never become 0 * Inf = NaN."""
    values = np.full((3, 3), INF)
    values[1, 0] = 2.0
    # Half a pixel off the left edge: one corner of four is inside the map and finite, the others are outside the map ...
    arguments = one_map(values, (3, 3), [[0.0, 0.5], [-1.0, 0.5], [0.5, 7.0]], [1.0, INF, NAN])
    arguments["spatial_shapes"] = np.array([[1, 1]])
    arguments["level_start_index"] = np.array([3])  # ... of one pixel, whose neighbours in memory are infinite.
    value, shapes, level_starts, locations, weights = tensors(arguments, device)
    padded = {"value": value[:, 3:4].contiguous(), "starts": torch.zeros_like(level_starts)}
    leaves = [padded["value"].requires_grad_(), locations.requires_grad_(), weights.requires_grad_()]
    output = call(backend, leaves[0], shapes, padded["starts"], locations, weights)
    assert output.item() == 1.0
    for gradient in torch.autograd.grad(output.sum(), leaves):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_point_between_two_pixels_keeps_its_place_in_16_bits(kind: str, backend: str, device: str) -> None:
    """A coordinate rounded to the storage dtype would move by up to 0.78 px at a width of 200: here it may not."""
    width = 200
    ramp = np.arange(width, dtype=np.float64)
    middle = rounding.middle_moved_by(kind, width)
    x = (middle + 0.5) / width
    arguments = tensors(one_map(ramp % 8, (1, width), [[x, 0.5]]), device, kind, "float32")
    expected = (np.floor(middle) % 8 + np.ceil(middle) % 8) / 2
    assert abs(call(backend, *arguments).item() - expected) <= 1e-3, "the place between the two pixels was rounded"
    # With locations that are 16-bit themselves the stored number is what counts, used in fp32.
    stored = tensors(one_map(ramp % 8, (1, width), [[x, 0.5]]), device, kind, kind)
    exact = oracle.forward(*[represented(t) for t in stored])
    assert_close(call(backend, *stored), exact, SPEC.tolerances[kind].output)


def test_coordinates_are_rounded_once(backend: str, device: str) -> None:
    """x*w - 0.5 as one fused operation: a second rounding moves a point next to a pixel centre into the next cell.

    On a parabola every cell has its own slope, so the location gradient names the cell.
    """
    for width, x, pixel in rounding.places_that_tell_one_rounding_from_two():
        arguments = tensors(one_map(np.arange(width, dtype=np.float64) ** 2, (1, width), [[x, 0.5]]), device)
        arguments[3].requires_grad_()
        output = call(backend, *arguments)
        (gradient,) = torch.autograd.grad(output.sum(), [arguments[3]])
        slope = gradient.reshape(2)[0].item() / width
        assert abs(slope - (2 * (pixel - 1) + 1)) < 0.5, (
            f"width {width}, x {x!r}: slope {slope}, so the cell is not {pixel - 1}"
        )


def test_against_all_float64_geometry(backend: str, device: str) -> None:
    """fp32 coordinates cost at most 1e-5 of the peak; location gradients are compared away from cell boundaries."""
    arguments = inputs.attention(
        "geometry", queries=6 if backend == "emu" else 64, channels=8, shapes=((40, 60), (20, 30)), points=4
    )
    given_tensors = tensors(arguments, device)
    exact = {name: represented(t) for name, t in zip(arguments, given_tensors, strict=True)}
    leaves = [given_tensors[i].requires_grad_() for i in (0, 3, 4)]
    output = call(backend, *given_tensors)
    grad_output = np.random.default_rng(1).standard_normal(tuple(output.shape)).astype(np.float32)
    wanted = oracle.backward(grad_output, *exact.values(), geometry=np.float64)
    assert_close(output, wanted.output, 1e-5, "output")
    found = torch.autograd.grad(output, leaves, torch.from_numpy(grad_output).to(device))
    clear = ~oracle.near_boundary(exact["sampling_locations"], exact["spatial_shapes"])
    assert clear.mean() > 0.99
    assert_close(found[0], wanted.grad_value, 2e-5, "gradient of value")
    assert_close(found[1], wanted.grad_locations, 2e-5, "gradient of sampling_locations", clear[..., None] & np.ones(2, bool))
    assert_close(found[2], wanted.grad_weights, 2e-5, "gradient of attention_weights")


@pytest.mark.parametrize("step", [1, 2, 7, 64, 10**9])
def test_im2col_step_changes_nothing(step: int, backend: str, device: str) -> None:
    arguments = tensors(inputs.attention("step", batch=3), device)
    assert_bits_equal(call(backend, *arguments, step), call(backend, *arguments), "positional")
    assert_bits_equal(call(backend, *arguments, im2col_step=step), call(backend, *arguments), "by keyword")


def test_four_argument_form(backend: str, device: str) -> None:
    value, shapes, level_starts, locations, weights = tensors(inputs.attention("four"), device)
    wanted = call(backend, value, shapes, level_starts, locations, weights)
    assert_bits_equal(call(backend, value, shapes, locations, weights), wanted, "four arguments")
    live = [t.clone().requires_grad_() for t in (value, locations, weights)]
    call(backend, live[0], shapes, live[1], live[2]).sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in live)


def test_keyword_form(backend: str, device: str) -> None:
    arguments = tensors(inputs.attention("keyword"), device)
    named = dict(zip(inputs.ARGUMENTS, arguments, strict=True))
    wanted = call(backend, *arguments)
    assert_bits_equal(call(backend, **named), wanted, "all by name")
    del named["level_start_index"]
    assert_bits_equal(call(backend, **named), wanted, "the four-argument form by name")
    tail = {k: named[k] for k in ("sampling_locations", "attention_weights")}
    assert_bits_equal(call(backend, *arguments[:2], **tail), wanted, "its last two by name")
    by_list = call(backend, arguments[0], arguments[1].tolist(), **tail)
    assert_bits_equal(by_list, wanted, "its last two by name, after a list")


@pytest.mark.parametrize("form", ["none", "int32", "list", "tuple", "tensor_of_lists"])
def test_forms_of_the_level_description(form: str, backend: str, device: str) -> None:
    value, shapes, level_starts, locations, weights = tensors(
        inputs.attention("forms", shapes=((3, 4), (2, 2), (1, 5))), device
    )
    wanted = call(backend, value, shapes, level_starts, locations, weights)
    shapes, level_starts = {
        "none": (shapes, None),
        "int32": (shapes.int(), level_starts.int()),
        "list": (shapes.tolist(), level_starts.tolist()),
        "tuple": (tuple(map(tuple, shapes.tolist())), tuple(level_starts.tolist())),
        "tensor_of_lists": (shapes.tolist(), level_starts),
    }[form]
    assert_bits_equal(call(backend, value, shapes, level_starts, locations, weights), wanted, form)
    assert_bits_equal(call(backend, value, shapes, None, locations, weights), wanted, f"{form} and no starts")


def test_levels_stored_in_another_order(backend: str, device: str) -> None:
    arguments = inputs.attention("order", shapes=((3, 4), (2, 2), (1, 5)), channels=3)
    value, level_starts = arguments["value"], arguments["level_start_index"]
    turned = np.concatenate([value[:, 16:], value[:, 12:16], value[:, :12]], 1)
    wanted = call(backend, *tensors(arguments, device))
    arguments["value"], arguments["level_start_index"] = turned, np.array([9, 5, 0])
    assert list(level_starts) == [0, 12, 16]
    assert_bits_equal(call(backend, *tensors(arguments, device)), wanted, "levels back to front")
    compare(backend, tensors(arguments, device))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_legacy_level_alias(levels: int, backend: str, device: str) -> None:
    """Old checkpoints: fewer levels in the shapes than in the locations, read as a prefix of the flat buffers."""
    arguments = inputs.attention("alias", batch=2, queries=4, shapes=((4, 4), (3, 3), (2, 2), (1, 1)), points=3)
    full_shapes = arguments["spatial_shapes"][:levels]
    arguments["value"] = arguments["value"][:, : int(full_shapes.prod(1).sum())]
    arguments["spatial_shapes"], arguments["level_start_index"] = full_shapes, arguments["level_start_index"][:levels]
    given_tensors = tensors(arguments, device)
    with pytest.raises(ValueError):
        call(backend, *given_tensors)
    leaves = [given_tensors[i].requires_grad_() for i in (0, 3, 4)]
    output = call(backend, *given_tensors, legacy_level_alias=True)
    grad_output = np.random.default_rng(2).standard_normal(tuple(output.shape)).astype(np.float32)
    found = torch.autograd.grad(output, leaves, torch.from_numpy(grad_output).to(device))
    exact = [represented(t) for t in given_tensors[3:]]
    locations, weights = oracle.legacy_alias(*exact, levels)
    value = represented(given_tensors[0])
    wanted = oracle.backward(grad_output, value, full_shapes, None, locations, weights)
    assert_close(output, wanted.output, 2e-6, "output")
    assert_close(found[0], wanted.grad_value, 1e-5, "gradient of value")
    for gradient, expected, name in (
        (found[1], wanted.grad_locations, "sampling_locations"),
        (found[2], wanted.grad_weights, "attention_weights"),
    ):
        whole = np.zeros(tuple(gradient.shape)).reshape(-1)
        whole[: expected.size] = expected.reshape(-1)  # the prefix that was read; nothing elsewhere
        assert_close(gradient, whole.reshape(tuple(gradient.shape)), 1e-5, f"gradient of {name}")


def test_legacy_level_alias_changes_nothing_where_the_counts_agree(backend: str, device: str) -> None:
    arguments = tensors(inputs.attention("agree"), device)
    assert_bits_equal(call(backend, *arguments, legacy_level_alias=True), call(backend, *arguments))


def test_weights_are_not_normalised(backend: str, device: str) -> None:
    value, shapes, level_starts, locations, weights = tensors(inputs.attention("scale"), device)
    output = call(backend, value, shapes, level_starts, locations, weights)
    assert_bits_equal(call(backend, value, shapes, level_starts, locations, weights * 4), output * 4, "four times the weights")
    assert_bits_equal(call(backend, value, shapes, level_starts, locations, -weights), -output, "negative weights")


def test_mixed_precision_as_autocast_leaves_it(backend: str, device: str) -> None:
    """A bf16 projection and fp32 locations: result in bf16, gradients in the dtype of each input."""
    value, shapes, level_starts, locations, weights = tensors(inputs.attention("autocast", channels=8), device)
    projection = torch.nn.Linear(8, 8).to(device)
    value.requires_grad_(), locations.requires_grad_(), weights.requires_grad_()
    with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
        output = call(backend, projection(value), shapes, level_starts, locations, weights)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    for leaf in (value, locations, weights, projection.weight):
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32 and torch.isfinite(leaf.grad).all()
