# SPDX-License-Identifier: Apache-2.0
"""Refused calls beyond the table in inputs.ERRORS: contents of the level description, call forms, layouts, checking mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from muspace_core import get_last_dispatch_report
from muspace_core.testing.cases import ErrorCase
from muspace_core.testing.plugin import load_sibling
from muspace_msda import multi_scale_deformable_attn

inputs = load_sibling(__file__, "inputs")


def _call(backend: str, *arguments: Any, **keywords: Any) -> torch.Tensor:
    if backend == "reference":
        keywords.setdefault("backend", "reference")
    return multi_scale_deformable_attn(*arguments, **keywords)


def _tensors(device: str, name: str = "tiny") -> dict[str, torch.Tensor]:
    arguments = {k: torch.from_numpy(v) for k, v in inputs.attention(name, batch=2).items()}
    return {k: (v.float() if v.is_floating_point() else v).to(device) for k, v in arguments.items()}


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


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", ["value", "sampling_locations", "attention_weights"])
def test_sparse_tensors(name: str, backend: str, device: str) -> None:
    tensors = _tensors(device)
    tensors[name] = tensors[name].to_sparse()
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)) as caught:
        _call(backend, *tensors.values())
    if isinstance(caught.value, ValueError | TypeError):
        assert name in str(caught.value)


@pytest.mark.parametrize("backend_name", ["", "CPU", "cuda:0", None, 3])
def test_backend_names(backend_name: Any, backend: str, device: str) -> None:
    with pytest.raises((ValueError, TypeError), match="backend"):
        multi_scale_deformable_attn(*_tensors(device).values(), backend=backend_name)


def test_a_refused_call_leaves_the_last_report(backend: str, device: str) -> None:
    tensors = _tensors(device)
    _call(backend, *tensors.values())
    before = get_last_dispatch_report()
    tensors["attention_weights"] = tensors["attention_weights"][..., :1]
    with pytest.raises(ValueError):
        _call(backend, *tensors.values())
    assert get_last_dispatch_report() == before


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
