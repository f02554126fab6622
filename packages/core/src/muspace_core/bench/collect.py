# SPDX-License-Identifier: Apache-2.0
"""Finds the cases of installed families, runs the wanted ones and puts the result document together."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from muspace_core.bench import machine, overhead, schema
from muspace_core.bench.case import BenchCase
from muspace_core.bench.floors import Ceilings, measure_ceilings
from muspace_core.bench.overhead import OverheadCase
from muspace_core.bench.runner import Plan, measure
from muspace_core.spec import OpSpec

METHOD: Final = (
    "mean of back-to-back calls, by device events the median of the batches, by a cpu's performance counter the best batch, "
    "ours and the baseline in turn; input sets rotate beyond a GPU's L2 cache; bwd is autograd's backward alone; every row "
    "first passed a comparison with fp64"
)


@dataclass(frozen=True)
class Family:
    """Cases and specs of one operator package."""

    name: str
    package: str
    cases: tuple[BenchCase, ...]
    overheads: tuple[OverheadCase, ...]
    specs: dict[str, OpSpec]


def cases_module(package: str) -> ModuleType:
    """``<package>._bench_cases`` of a wheel, or ``bench/cases.py`` of the source tree that the package lies in."""
    name = f"{package}._bench_cases"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    file = Path(str(importlib.import_module(package).__file__)).resolve().parents[2] / "bench" / "cases.py"
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{package} has neither {name} nor {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(packages: Iterable[str]) -> list[Family]:
    """The families behind import names such as ``muspace_msda``."""
    families = []
    for package in packages:
        module = cases_module(package)
        specs = {spec.name: spec for spec in importlib.import_module(f"{package}._spec").SPECS}
        families.append(Family(module.FAMILY, package, tuple(module.CASES), tuple(getattr(module, "OVERHEADS", ())), specs))
    return families


def plan(
    device: torch.device, backend: str = "auto", quick: bool = False, baseline: bool = True, ceilings: bool = True
) -> Plan:
    """Measures the device's ceilings and fixes how to measure."""
    name = machine.device_name(device)
    limits = measure_ceilings(device, name, quick) if ceilings else Ceilings(math.inf, None)
    return Plan(device, name, machine.l2_bytes(device), limits, backend, quick, baseline)


def selected(
    families: Sequence[Family], device_type: str, cases: Sequence[str], dtypes: Sequence[str], passes: Sequence[str]
) -> list[tuple[Family, BenchCase, str, str]]:
    """(family, case, dtype, pass) to run; a case named explicitly also runs on a device it was not made for."""
    wanted = []
    for family in families:
        for case in family.cases:
            if (case.name not in cases) if cases else (device_type not in case.device_types):
                continue
            for dtype in case.dtypes:
                for pass_ in case.passes:
                    if (not dtypes or dtype in dtypes) and (not passes or pass_ in passes):
                        wanted.append((family, case, dtype, pass_))
    return wanted


def run(
    wanted: Sequence[tuple[Family, BenchCase, str, str]],
    how: Plan,
    progress: Callable[[str], None] = lambda line: None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measures the wanted rows one after the other; ``keep`` sees the rows so far after each."""
    rows: list[dict[str, Any]] = []
    for family, case, dtype, pass_ in wanted:
        progress(f"{case.operator} {case.name} {dtype} {pass_}")
        rows.append(measure(case, family.specs[case.operator], dtype, pass_, how))
        keep(rows)
    return rows


def run_overhead(
    families: Sequence[Family], how: Plan, progress: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Host time per call of every family's smallest call."""
    rows = []
    for family in families:
        for case in family.overheads:
            progress(f"{case.operator} overhead")
            rows.append(overhead.measure(case, how.device, how.backend, how.quick))
    return rows


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", "source tree"))


def document(
    families: Sequence[Family], how: Plan, rows: list[dict[str, Any]], overheads: list[dict[str, Any]]
) -> dict[str, Any]:
    """The result document, checked against the schema."""
    result = {
        "schema": schema.VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {name: _version(name) for name in ("muspace_core", *(family.package for family in families))},
        "machine": machine.facts(how.device),
        "ceilings": how.ceilings.as_dict() if math.isfinite(how.ceilings.copy_bytes_per_s) else None,
        "method": METHOD,
        "rows": rows,
        "overhead": overheads,
    }
    result = _finite(result)
    schema.validate(result)
    return result


def _finite(value: Any) -> Any:
    """JSON has no infinity or NaN: a deviation of that kind is written as the largest double."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return sys.float_info.max
    return value


def result_name(result: dict[str, Any], family: str) -> str:
    """``<family>--<machine>--<device>.json``: the cpu model, and the device if it is another."""
    facts = result["machine"]
    device = "cpu" if facts["device_type"] == "cpu" else machine.slug(facts["device"])
    return f"{family}--{machine.slug(facts['cpu'])}--{device}.json"
