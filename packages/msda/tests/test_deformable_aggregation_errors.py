# SPDX-License-Identifier: Apache-2.0
"""Refused calls of deformable_aggregation beyond the table: contents of the map tables, checking mode, dtypes of a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muspace_core.testing.calls import as_tensors, on_backend
from muspace_core.testing.plugin import load_sibling
from muspace_msda import deformable_aggregation
from torch._subclasses.fake_tensor import FakeTensorMode

inputs = load_sibling(__file__, "deformable_aggregation_inputs")
_call = on_backend(deformable_aggregation)


def _tensors(device: str) -> dict[str, torch.Tensor]:
    return as_tensors(inputs.aggregation("tiny", batch=2), device)


@pytest.mark.parametrize("name", inputs.CONTENTS)
def test_table_contents(name: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on cpu tensors always; on a device only where MUSPACE_CHECK asks for the copy and the sync."""
    change, argument = inputs.CONTENTS[name]
    tensors = _tensors(device)
    change(tensors)
    if device != "cpu":
        assert torch.isfinite(_call(backend, *tensors.values())).all(), "without the check a bad map contributes nothing"
        monkeypatch.setenv("MUSPACE_CHECK", "1")
    with pytest.raises(ValueError, match=rf"^{argument}\[\d.*expected ") as caught:
        _call(backend, *tensors.values())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", inputs.CONTENTS)
def test_table_contents_as_lists(name: str, backend: str, device: str) -> None:
    """A list is known on the host, whatever the device of the tensors."""
    change, argument = inputs.CONTENTS[name]
    tensors = _tensors(device)
    change(tensors)
    feat, shapes, starts, locations, weights = tensors.values()
    with pytest.raises(ValueError, match=rf"^{argument}\[\d.*expected "):
        _call(backend, feat, shapes.tolist(), starts.tolist(), locations, weights)


def test_lists_have_contents_where_tensors_have_none(device: str) -> None:
    with FakeTensorMode():
        sizes = (1, 20, 8), (1, 3, 5, 1, 2), (1, 3, 5, 1, 2, 4)
        given = [torch.rand(size, device=device) for size in sizes]
        assert deformable_aggregation(given[0], [[(4, 4), (2, 2)]], [[0, 16]], *given[1:]).shape == (1, 3, 8)
        with pytest.raises(ValueError, match=r"^scale_start_index\[0, 1\]: expected a map of 2 x 2 rows"):
            deformable_aggregation(given[0], [[(4, 4), (2, 2)]], [[0, 17]], *given[1:])


@pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")
def test_check_on_the_registered_path(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the check a compiled-style call refuses the same contents as the direct one."""
    tensors = _tensors(device)
    tensors["spatial_shape"][0, 0, 0] = 40
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    with pytest.raises(ValueError, match="48"):
        torch.func.functionalize(lambda v: _call(backend, v, *list(tensors.values())[1:]))(tensors["mc_ms_feat"])


def test_check_accepts_a_right_call(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors(device)
    wanted = _call(backend, *tensors.values())
    monkeypatch.setenv("MUSPACE_CHECK", "1")
    assert torch.equal(_call(backend, *tensors.values()), wanted)


def test_a_table_changed_in_place_is_read_anew(backend: str, device: str) -> None:
    """Nothing about a table may be remembered by its address: the next call sees the new numbers, or refuses them."""
    tensors = _tensors(device)
    first = _call(backend, *tensors.values())
    tensors["scale_start_index"][:] = 0
    second = _call(backend, *tensors.values())
    assert not torch.equal(first, second)
    fresh = _tensors(device)
    fresh["scale_start_index"] = torch.zeros_like(fresh["scale_start_index"])
    assert torch.equal(_call(backend, *fresh.values()), second)
    if device == "cpu":
        tensors["scale_start_index"][0, 0] = 1000
        with pytest.raises(ValueError, match="scale_start_index"):
            _call(backend, *tensors.values())


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_too_few_arguments(count: int, backend: str, device: str) -> None:
    with pytest.raises(TypeError):
        _call(backend, *list(_tensors(device).values())[:count])


@pytest.mark.parametrize("shapes", [[[4, 5], [2, 3]], [[[4, 5], [2]], [[3, 6], [1, 4]]], [[["4", "5"]]], "4523", 7])
def test_malformed_shape_lists(shapes: Any, backend: str, device: str) -> None:
    feat, _, starts, locations, weights = _tensors(device).values()
    with pytest.raises((ValueError, TypeError), match=r"^spatial_shape"):
        _call(backend, feat, shapes, starts, locations, weights)


@pytest.mark.parametrize("starts", [[0, 20, 26, 44], [[0, 20], [26]], [[0.0, 20.0], [26.0, 44.0]], "0123", 7])
def test_malformed_start_lists(starts: Any, backend: str, device: str) -> None:
    feat, shapes, _, locations, weights = _tensors(device).values()
    with pytest.raises((ValueError, TypeError), match=r"^scale_start_index"):
        _call(backend, feat, shapes, starts, locations, weights)
