# SPDX-License-Identifier: Apache-2.0
"""Finds the cases of installed families, runs the wanted ones and puts the result document together."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import importlib.util
import itertools
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
    "ours and the baseline in turn; input sets rotate beyond a GPU's L2 cache, or are three where the peers ran on three; "
    "bwd is autograd's backward alone; every row first passed a comparison with fp64"
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
    """``<package>._bench_cases`` of a wheel, or ``bench/cases/`` of the source tree that the package lies in."""
    name = f"{package}._bench_cases"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = Path(str(importlib.import_module(package).__file__)).resolve().parents[2] / "bench" / "cases"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if not (folder / "__init__.py").is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{package} has neither {name} nor {folder / '__init__.py'}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [entry for entry in sys.modules if entry == name or entry.startswith(f"{name}.")]:
            del sys.modules[loaded]
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
    families: Sequence[Family],
    device_type: str,
    cases: Sequence[str],
    dtypes: Sequence[str],
    passes: Sequence[str],
    operators: Sequence[str] = (),
) -> list[tuple[Family, BenchCase, str, str]]:
    """(family, case, dtype, pass) to run; a case named explicitly also runs on a device it was not made for.

    On a cpu every backward is bit-reproducible, so an ordered one would be the same row twice.
    """
    wanted = []
    for family in families:
        for case in family.cases:
            if (case.name not in cases) if cases else (device_type not in case.device_types):
                continue
            if operators and case.operator not in operators:
                continue
            for dtype, pass_ in itertools.product(case.dtypes, case.passes):
                if (dtypes and dtype not in dtypes) or (passes and pass_ not in passes):
                    continue
                if device_type != "cpu" or pass_ != "bwd_ordered":
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
        rows.append(measure(case, family.specs.get(case.operator), dtype, pass_, how))
        keep(rows)
    return rows


def run_overhead(
    families: Sequence[Family],
    how: Plan,
    progress: Callable[[str], None] = lambda line: None,
    operators: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Host time per call of every family's smallest calls, or of those of the named operators."""
    rows = []
    for family in families:
        for case in family.overheads:
            if operators and case.operator not in operators:
                continue
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


#: What a row is of.
IDENTITY: Final = ("family", "operator", "case", "dtype", "pass", "requested_backend")


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of runs of parts: a later row replaces an earlier one of the same case; the last document's head stands.

    A run of host times alone measures no ceilings; those of the run before it stay.

    Raises ``ValueError`` unless all are of one machine and one set of versions.
    """
    *_, last = documents
    for document in documents:
        for head in ("machine", "versions"):
            if document[head] != last[head]:
                raise ValueError(f"{head} differ: {document[head]} and {last[head]}")
    rows = {tuple(row[name] for name in IDENTITY): row for document in documents for row in document["rows"]}
    overhead = {(row["family"], row["operator"]): row for document in documents for row in document["overhead"]}
    ceilings = next((document["ceilings"] for document in reversed(documents) if document["ceilings"]), None)
    result = {**last, "ceilings": ceilings, "rows": list(rows.values()), "overhead": list(overhead.values())}
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
