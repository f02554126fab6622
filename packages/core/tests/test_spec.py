# SPDX-License-Identifier: Apache-2.0
"""Specs are complete and consistent data, for every operator family that is installed."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from muspace_core.device import BACKENDS
from muspace_core.spec import OpSpec, Status, Tolerance

FAMILIES = ("msda", "bevpool", "dcn", "spconv", "voxel", "iou3d", "radius")


def _specs() -> list[OpSpec]:
    found: list[OpSpec] = []
    for family in FAMILIES:
        try:
            module = importlib.import_module(f"muspace_{family}._spec")
        except ModuleNotFoundError:
            continue
        found += module.SPECS
    return found


@pytest.fixture(params=_specs(), ids=lambda s: s.name)
def spec(request: pytest.FixtureRequest) -> OpSpec:
    return request.param


def test_some_family_is_installed() -> None:
    assert _specs()


def test_tolerances_are_below_one_percent(spec: OpSpec) -> None:
    assert spec.tolerances
    for dtype, tolerance in spec.tolerances.items():
        assert isinstance(tolerance, Tolerance) and hasattr(torch, dtype)
        assert 0 < tolerance.output < 0.01 and 0 < tolerance.grad < 0.01, dtype


def test_every_dtype_has_a_tolerance(spec: OpSpec) -> None:
    for backend, dtypes in spec.dtypes.items():
        assert backend in BACKENDS
        assert set(dtypes) <= set(spec.tolerances), backend
    assert "float64" not in spec.dtypes.get("musa", ())


def test_every_backend_has_a_status(spec: OpSpec) -> None:
    assert set(spec.backends) == set(BACKENDS)
    for backend, status in spec.backends.items():
        assert status.note or status.kind == "absent", f"{backend}: a claim says where it was shown"
    assert spec.backends["musa"].kind in ("stub-compiled", "compiled", "absent"), "no MUSA hardware has been used"
    assert spec.backends["hip"].kind in ("compiled", "absent"), "no AMD hardware has been used"


def test_names(spec: OpSpec) -> None:
    assert spec.wheel == f"muspace-{spec.family}" and spec.package == f"muspace_{spec.family}"
    assert spec.qualified_name == f"muspace_{spec.family}::{spec.name}"
    assert spec.summary and spec.determinism and spec.forward_routes
    assert callable(getattr(importlib.import_module(spec.package), spec.name))
    operator = getattr(getattr(torch.ops, spec.package), spec.name).default
    assert spec.schema.split("->")[0].strip(" ()") in str(operator._schema)


def test_switches_are_documented(spec: OpSpec) -> None:
    for switch in spec.switches:
        assert switch.name.startswith("MUSPACE_") and switch.effect


def test_specs_are_frozen(spec: OpSpec) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["works", "", "Run", "stub"])
def test_an_unknown_status_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="kind: expected one of"):
        Status(kind)
