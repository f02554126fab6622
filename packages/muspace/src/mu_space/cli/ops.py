# SPDX-License-Identifier: Apache-2.0
"""``mu-space ops``: the operator matrix, generated from the specs of the installed wheels."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from mu_space import families
from mu_space.cli import text
from mu_space.compatibility import distribution_version

BACKENDS: Final = ("cpu", "cuda", "hip", "musa", "emu")
EPILOG: Final = """\
statuses:
  run            executed on that hardware        emulated       the kernel text executed under the SIMT emulation
  compiled       compiled, never executed         stub-compiled  compiled against stand-in headers
  absent         not there, or the wheel is not installed

examples:
  mu-space ops
  mu-space ops --json | jq '.[] | {name, musa: .backends.musa.kind}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON array, with notes, tolerances and switches")


def matrix() -> list[dict[str, Any]]:
    """One entry per operator, of installed wheels from their specs, of missing ones with every backend absent."""
    entries: list[dict[str, Any]] = []
    for family in sorted({*families.KNOWN, *families.installed()}):
        if family in families.installed():
            entries += [_entry(spec) for spec in families.specs(family)]
        else:
            entries += [_missing(family, name) for name in families.KNOWN[family].operators]
    return entries


def _entry(spec: Any) -> dict[str, Any]:
    statuses = {name: spec.backends.get(name) for name in BACKENDS}
    return {
        "name": spec.name,
        "family": spec.family,
        "wheel": spec.wheel,
        "wheel_version": distribution_version(spec.wheel) or "source tree",
        "summary": spec.summary,
        "backends": {
            name: {"kind": status.kind if status else "absent", "note": status.note if status else ""}
            for name, status in statuses.items()
        },
        "dtypes": {name: list(dtypes) for name, dtypes in spec.dtypes.items()},
        "determinism": spec.determinism,
        "routes": {"forward": list(spec.forward_routes), "backward": list(spec.backward_routes)},
        "tolerances": {dtype: {"output": limit.output, "grad": limit.grad} for dtype, limit in spec.tolerances.items()},
        "switches": [{"name": s.name, "default": s.default, "effect": s.effect} for s in spec.switches],
        "models": list(spec.models),
        "reference": spec.reference,
    }


def _missing(family: str, name: str) -> dict[str, Any]:
    absent = {"kind": "absent", "note": f"muspace-{family} is not installed"}
    return {
        "name": name,
        "family": family,
        "wheel": f"muspace-{family}",
        "wheel_version": None,
        "summary": "",
        "backends": dict.fromkeys(BACKENDS, absent),
        "dtypes": {},
        "determinism": "",
        "routes": {"forward": [], "backward": []},
        "tolerances": {},
        "switches": [],
        "models": [],
        "reference": False,
    }


def _dtypes(entry: dict[str, Any]) -> str:
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
    names = dict.fromkeys(name for dtypes in entry["dtypes"].values() for name in dtypes)
    cells = []
    for name in names:
        on = [backend for backend, dtypes in entry["dtypes"].items() if name in dtypes]
        everywhere = len(on) == len(entry["dtypes"])
        cells.append(short.get(name, name) + ("" if everywhere else f" ({', '.join(on)})"))
    return ", ".join(cells)


def main(args: argparse.Namespace) -> int:
    entries = matrix()
    if args.json:
        print(json.dumps(entries, indent=2))
        return 0
    columns = ("operator", *BACKENDS, "dtypes", "wheel")
    rows = []
    for entry in entries:
        version = entry["wheel_version"] or "not installed"
        kinds = [entry["backends"][name]["kind"] for name in BACKENDS]
        rows.append((entry["name"], *kinds, _dtypes(entry), f"{entry['wheel']} {version}"))
    text.table("", columns, rows, names=("operator",))
    for entry in entries:  # sentences, which no column of a terminal is wide enough for
        if entry["determinism"]:
            print(f"  {entry['name']}: {entry['determinism']}")
        for name in BACKENDS:
            if entry["backends"][name]["note"]:
                print(f"  {entry['name']} on {name}: {entry['backends'][name]['note']}")
    return 0
