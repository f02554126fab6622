# SPDX-License-Identifier: Apache-2.0
"""Refused calls beyond the table in inputs.ERRORS: contents of the level description, call forms, checking mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.cases import ErrorCase
from muspace_core.testing.plugin import load_sibling
from muspace_msda import multi_scale_deformable_attn

inputs = load_sibling(__file__, "inputs")
_call = on_backend(multi_scale_deformable_attn)
L, W = "sampling_locations", "attention_weights"


def _tensors(device: str, name: str = "tiny") -> dict[str, torch.Tensor]:
    return as_tensors(inputs.attention(name, batch=2), device)


@pytest.mark.parametrize("case", [c.parameter() for c in inputs.CONTENTS])
def test_level_contents(case: ErrorCase, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on cpu tensors always; on a device only where MUSPACE_CHECK asks for the copy and the sync."""
    tensors = _tensors(device)
    case.change(tensors)
    if device != "cpu":
        assert torch.isfinite(_call(backend, *tensors.values())).all(), "without the check a bad level contributes nothing"
        monkeypatch.setenv("MUSPACE_CHECK", "1")
    case.check(lambda: _call(backend, *tensors.values()), device)


@pytest.mark.parametrize("case", [c.parameter() for c in inputs.CONTENTS])
def test_level_contents_as_lists(case: ErrorCase, backend: str, device: str) -> None:
    """A list is known on the host, whatever the device of the tensors."""
    tensors = _tensors(device)
    case.change(tensors)
    value, shapes, level_starts, locations, weights = tensors.values()
    # With lists the sum of the areas is known before any level is looked at.
    total = {"too_tall": 40 * 5 + 2 * 3}.get(case.name)
    if total:
        message = f"value: expected S = sum of h * w over spatial_shapes = {total}, got S = 26"
        case = dataclasses.replace(case, message=message)
    case.check(lambda: _call(backend, value, shapes.tolist(), level_starts.tolist(), locations, weights), device)


def test_check_accepts_a_right_call(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors(device)
    wanted = _call(backend, *tensors.values())
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    assert torch.equal(_call(backend, *tensors.values()), wanted)
    assert torch.equal(_call(backend, *tensors.values()), wanted)


def test_check_on_the_registered_path(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the check a compiled-style call refuses the same contents as the direct one."""
    if backend == "reference":
        pytest.skip("the registered operator is native")
    tensors = _tensors(device)
    tensors["spatial_shapes"][0, 0] = 40
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    with pytest.raises(ValueError, match="26"):
        torch.func.functionalize(lambda v: _call(backend, v, *list(tensors.values())[1:]))(tensors["value"])


@pytest.mark.parametrize("rows", [25, 27])
@pytest.mark.parametrize("form", ["tensor", "list"])
def test_value_length(rows: int, form: str, backend: str, device: str) -> None:
    """Too long is as wrong as too short: the usual cause is a level left out of spatial_shapes."""
    tensors = _tensors(device)
    if form == "tensor" and device != "cpu":
        pytest.skip("device contents are not read back")
    shapes = tensors["spatial_shapes"] if form == "tensor" else tensors["spatial_shapes"].tolist()
    value = torch.zeros(2, rows, 2, 4, device=device)
    with pytest.raises(ValueError) as caught:
        _call(backend, value, shapes, None, tensors["sampling_locations"], tensors["attention_weights"])
    text = str(caught.value)
    assert "value" in text and "26" in text and str(rows) in text, text


def test_value_length_with_starts(backend: str, device: str) -> None:
    """One row short: the last level does not fit, and the message says which one and where value ends."""
    value, shapes, level_starts, locations, weights = _tensors(device).values()
    with pytest.raises(ValueError) as caught:
        _call(backend, value[:, :25], shapes.tolist(), level_starts.tolist(), locations, weights)
    assert "value" in str(caught.value) and "25" in str(caught.value)


def test_legacy_alias_cannot_invent_levels(backend: str, device: str) -> None:
    """More levels in the shapes than in the locations: there is no prefix to read."""
    value, shapes, level_starts, locations, weights = _tensors(device).values()
    with pytest.raises(ValueError, match="sampling_locations"):
        _call(
            backend, value, shapes, level_starts, locations[:, :, :, :1], weights[:, :, :, :1], legacy_level_alias=True
        )  # fmt: skip


#: One level in the shapes, two in the locations, and then something wrong.
ALIASED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "three coordinates": (L, lambda t: t[..., [0, 1, 1]]),
    "one coordinate": (L, lambda t: t[..., :1]),
    "no coordinate": (L, lambda t: t[..., :0]),
    "no points in the locations": (W, lambda t: t),
    "a batch too few": (L, lambda t: t[:1]),
    "a head too few": (L, lambda t: t[:, :, :1]),
    "rank": (L, lambda t: t[0]),
    "points as one number": (L, lambda t: t.flatten(-2)),
    "weights of other queries": (W, lambda t: t[:, :2]),
    "weights of more queries": (W, lambda t: torch.cat((t, t), 1)),
    "weights of other points": (W, lambda t: t[..., :1]),
    "weights without points": (W, lambda t: t[..., :0]),
    "weights of one level": (W, lambda t: t[:, :, :, :1]),
    "weights of another batch": (W, lambda t: t[:1]),
    "weights transposed": (W, lambda t: t.transpose(1, 3)),
    "weights flat": (W, lambda t: t.flatten(3)),
}


def _aliased(device: str) -> dict[str, torch.Tensor]:
    tensors = _tensors(device)
    tensors["value"] = tensors["value"][:, :20]
    for name in ("spatial_shapes", "level_start_index"):
        tensors[name] = tensors[name][:1]
    return tensors


@pytest.mark.parametrize("name", ALIASED)
def test_legacy_alias_checks_shapes_first(name: str, backend: str, device: str) -> None:
    """Cutting flat buffers anew would make sense of almost any shape, and read the wrong numbers."""
    argument, change = ALIASED[name]
    tensors = _aliased(device)
    assert torch.isfinite(_call(backend, *tensors.values(), legacy_level_alias=True)).all(), "right before the change"
    tensors[argument] = change(tensors[argument])
    if name == "no points in the locations":
        tensors[L] = tensors[L][..., :0, :]
    with pytest.raises(ValueError, match=f"^{argument}: expected ") as caught:
        _call(backend, *tensors.values(), legacy_level_alias=True)
    assert "view" not in str(caught.value) and "reshape" not in str(caught.value)


@pytest.mark.parametrize(("argument", "change"), [(L, torch.Tensor.long), (W, torch.Tensor.int), (L, torch.Tensor.double)])
def test_legacy_alias_checks_dtypes(argument: str, change: Any, backend: str, device: str) -> None:
    tensors = _aliased(device)
    tensors[argument] = change(tensors[argument])
    with pytest.raises(TypeError, match=f"^{argument}: expected dtype "):
        _call(backend, *tensors.values(), legacy_level_alias=True)


def test_legacy_alias_of_nothing(backend: str, device: str) -> None:
    """No queries or no points: the empty or zero result of any other call, or a refusal in words."""
    for cut in (lambda t: t[:, :0], lambda t: t[:, :, :, :, :0]):
        tensors = _aliased(device)
        tensors[L], tensors[W] = cut(tensors[L]), cut(tensors[W])
        try:
            output = _call(backend, *tensors.values(), legacy_level_alias=True)
        except ValueError as error:
            assert "sampling_locations" in str(error) or "attention_weights" in str(error)
        else:
            assert output.shape == (2, tensors[L].shape[1], 8) and (output == 0).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_too_few_arguments(count: int, backend: str, device: str) -> None:
    tensors = list(_tensors(device).values())
    with pytest.raises(TypeError):
        _call(backend, *tensors[:count])


@pytest.mark.parametrize("shapes", [[[4, 5], [2]], [4, 5], [["4", "5"], ["2", "3"]], [[4.0, 5.0], [2.0, 3.0]], "4523", 7])
def test_malformed_shape_lists(shapes: Any, backend: str, device: str) -> None:
    tensors = _tensors(device)
    with pytest.raises((ValueError, TypeError)) as caught:
        _call(backend, tensors["value"], shapes, None, tensors["sampling_locations"], tensors["attention_weights"])
    assert "spatial_shapes" in str(caught.value), caught.value


@pytest.mark.parametrize("starts", [[0], [0, 20, 26], [0.0, 20.0], ["0", "20"], [[0, 20]], "01"])
def test_malformed_start_lists(starts: Any, backend: str, device: str) -> None:
    value, shapes, _, locations, weights = _tensors(device).values()
    with pytest.raises((ValueError, TypeError)) as caught:
        _call(backend, value, shapes, starts, locations, weights)
    assert "level_start_index" in str(caught.value), caught.value


@pytest.mark.parametrize("backend_name", ["", "CPU", "cuda:0", None, 3, ["cpu"], {"cpu": 1}, ("cpu",)])
def test_backend_names(backend_name: Any, backend: str, device: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^backend: expected "):
        multi_scale_deformable_attn(*_tensors(device).values(), backend=backend_name)


@pytest.mark.parametrize("shapes", ["tensor", "list"])
@pytest.mark.parametrize("number", [10**30, -(10**30), 1 << 63, -(1 << 63) - 1])
def test_numbers_beyond_64_bits(number: int, shapes: str, backend: str, device: str) -> None:
    value, given, _, locations, weights = _tensors(device).values()
    sizes = given.tolist() if shapes == "list" else given
    with pytest.raises(ValueError, match=r"^level_start_index"):
        _call(backend, value, sizes, [0, number], locations, weights)
    with pytest.raises(ValueError, match=r"^spatial_shapes"):
        _call(backend, value, [[4, 5], [2, number]], None, locations, weights)


@pytest.mark.parametrize("form", ["positional", "no starts", "keyword", "left out"])
def test_missing_weights_are_named(form: str, backend: str, device: str) -> None:
    """Five arguments of which the last is None are not the four-argument form."""
    value, shapes, level_starts, locations, _ = _tensors(device).values()
    with pytest.raises(TypeError, match=r"^attention_weights: expected a torch.Tensor, got NoneType"):
        if form == "positional":
            _call(backend, value, shapes, level_starts, locations, None)
        elif form == "no starts":
            _call(backend, value, shapes, None, locations, None)
        elif form == "keyword":
            _call(backend, value, shapes, level_starts, locations, attention_weights=None)
        else:
            _call(backend, value, shapes, sampling_locations=locations)


SIDE = 1 << 24


@pytest.mark.parametrize("form", ["tensor", "list"])
@pytest.mark.parametrize("size", [(1, SIDE + 1), (SIDE + 1, 1)], ids=["wide", "tall"])
def test_a_side_beyond_fp32(
    size: tuple[int, int], form: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixel coordinates up to 2**24 are exact in fp32; a longer side would lose pixels without a word."""
    value = torch.ones(1, 1, 1, 1, device=device).expand(1, SIDE + 1, 1, 1)  # one number in memory
    locations, weights = torch.full((1, 1, 1, 1, 1, 2), 0.5, device=device), torch.ones(1, 1, 1, 1, 1, device=device)
    shapes = torch.tensor([size], device=device) if form == "tensor" else [size]
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    for level_starts in (None, [0]):
        with pytest.raises(ValueError, match=rf"^spatial_shapes\[0\]: expected .*{SIDE}.*{SIDE + 1}"):
            _call(backend, value, shapes, level_starts, locations, weights)


@pytest.mark.parametrize("size", [(1, SIDE), (SIDE, 1)], ids=["wide", "tall"])
def test_the_longest_side(size: tuple[int, int], backend: str, device: str) -> None:
    value = torch.full((1, SIDE, 1, 1), 3.0, dtype=torch.float16, device=device)
    value[0, SIDE // 2] = 5.0
    locations = torch.full((1, 1, 1, 1, 1, 2), 0.5, device=device)
    output = _call(backend, value, [size], None, locations, torch.ones(1, 1, 1, 1, 1, device=device))
    assert float(output) == 4.0, "halfway between the two pixels in the middle"


def test_zero_area_level(backend: str, device: str) -> None:
    """A level without pixels: nothing to sample, so nothing may be read; refusing it is as good as ignoring it."""
    tensors = _tensors(device)
    value, _, _, locations, weights = tensors.values()
    shapes = [[4, 5], [0, 3]]
    try:
        output = _call(backend, value[:, :20], shapes, None, locations, weights)
    except ValueError as error:
        assert "spatial_shapes" in str(error)
    else:
        alone = _call(backend, value[:, :20], [[4, 5]], None, locations[:, :, :, :1], weights[:, :, :, :1])
        assert torch.equal(output, alone)
