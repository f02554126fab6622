# SPDX-License-Identifier: Apache-2.0
"""``mu-space bench``: measures the cases of the installed families; a row that fails its correctness gate has no speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from mu_space import families
from mu_space.cli import text
from mu_space.cli.main import OutputError, UsageError

PASSES: Final = {"fwd": "fwd", "bwd": "bwd", "ordered": "bwd_ordered", "bwd_ordered": "bwd_ordered"}
BACKENDS: Final = ("auto", "native", "cpu", "cuda", "hip", "musa", "emu", "reference")
NAMES: Final = ("operator", "case")
DEVICE_TYPES: Final = ("cpu", "cuda", "musa")
EPILOG: Final = """\
Each row is first compared with the fp64 reference; if that fails, the deviation is printed and no speed, and the exit status
is 1. `bwd` is the backward alone, `ordered` the backward under torch.use_deterministic_algorithms. Options may be repeated.

examples:
  mu-space bench                                  every case made for this device
  mu-space bench --case tsa_base --dtype fp32     one case
  mu-space bench --only bev_pool_v2               one operator
  mu-space bench --overhead                       host time per call
  mu-space bench --json result.json --plot result.png
  mu-space bench --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument("--family", **several, help="operator family (default: all that are installed)")
    parser.add_argument("--only", dest="operators", **several, help="operator (default: all of the families)")
    parser.add_argument("--case", **several, help="case (default: those made for the device)")
    parser.add_argument("--dtype", **several, help="fp32, bf16, fp16 or fp64")
    parser.add_argument("--pass", dest="passes", **several, help="fwd, bwd or ordered")
    parser.add_argument("--backend", default="native", metavar="NAME", help=f"{', '.join(BACKENDS)}; default native")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, musa … (default: an accelerator if there is one)")
    parser.add_argument("--overhead", action="store_true", help="host time per call instead of the cases")
    parser.add_argument("--no-baseline", action="store_true", help="do not time the plain PyTorch formulation")
    parser.add_argument("--quick", action="store_true", help="few and short batches: for trying out, not for publishing")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--json", metavar="FILE", help="write the result document; - writes it to stdout instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="draw the result (needs matplotlib)")


def _known(option: str, values: Iterable[str], known: Iterable[str]) -> None:
    names = list(dict.fromkeys(known))
    for value in values:
        if value not in names:
            raise UsageError(f"unknown {option} {value!r}, expected one of {', '.join(names)}")


def choose_device(name: str | None) -> Any:
    """The device to measure; raises :class:`UsageError` for one that is not here."""
    import torch

    if name is None:
        musa = getattr(torch, "musa", None)
        name = "cuda" if torch.cuda.is_available() else "musa" if musa is not None and musa.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} is not usable: {str(error).splitlines()[0]}") from None
    if device.type not in DEVICE_TYPES:
        raise UsageError(f"device {name!r} cannot be measured, expected one of type {', '.join(DEVICE_TYPES)}")
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def load_families(names: Sequence[str]) -> list[Any]:
    """Cases of the named families, or of all that are installed."""
    available = families.installed()
    if not available:
        raise UsageError(families.install_hint())
    _known("family", names, available)
    with families.torch_needed("measuring", extra="bench"):
        from muspace_core.bench import collect

        return collect.load(available[name] for name in (names or available))


def selected(args: argparse.Namespace, device_type: str, loaded: Sequence[Any]) -> list[Any]:
    """The rows that the options ask for."""
    from muspace_core.bench import collect

    passes = [PASSES[name] for name in args.passes]
    return collect.selected(loaded, device_type, args.case, [_long(name) for name in args.dtype], passes, args.operators)


def measure(args: argparse.Namespace, device: Any, loaded: Sequence[Any]) -> dict[str, Any]:
    """The result document for parsed arguments."""
    from muspace_core.bench import collect

    wanted = []
    if not args.overhead:
        wanted = selected(args, device.type, loaded)
        if not wanted:
            raise UsageError(f"no case fits --device {device.type} with these options; --list shows the cases")
    if device.type != "cpu":
        import torch

        getattr(torch, device.type).set_device(device)
    plan = collect.plan(device, args.backend, args.quick, baseline=not args.no_baseline, ceilings=not args.overhead)

    def keep(so_far: list[dict[str, Any]]) -> None:  # a run that is cut off has its first rows on disk
        if args.json and args.json != "-":
            _write(collect.document(loaded, plan, so_far, []), args.json)

    rows = collect.run(wanted, plan, _progress, keep)
    overheads = collect.run_overhead(loaded, plan, _progress, args.operators) if args.overhead else []
    _progress("")
    return collect.document(loaded, plan, rows, overheads)


def _write(document: dict[str, Any], file: str) -> None:
    try:
        Path(file).write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{file} could not be written: {error.strerror}") from None


def check_output(option: str, file: str) -> None:
    """Refuses, before anything is measured, a file that could not be written."""
    path = Path(file)
    try:
        if not path.parent.is_dir():
            raise UsageError(f"{option}: {path.parent} is not a folder")
        if path.is_dir():
            raise UsageError(f"{option}: expected a file, {file} is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{option}: {file} is not writable")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UsageError(f"{option}: {file}: {error.strerror}") from None


def _check_outputs(args: argparse.Namespace) -> None:
    if args.json and args.json != "-":
        check_output("--json", args.json)
    if args.plot:
        check_output("--plot", args.plot)
        from muspace_core.bench import plot

        try:
            plot.check(args.plot)
        except (ImportError, ValueError) as error:
            raise UsageError(f"--plot: {error}") from None


def _long(dtype: str) -> str:
    from muspace_core.bench.case import DTYPE_ALIASES

    return DTYPE_ALIASES.get(dtype, dtype)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _check_arguments(args: argparse.Namespace) -> None:
    _known("pass", args.passes, PASSES)
    _known("backend", [args.backend], BACKENDS)
    with families.torch_needed("measuring"):
        from muspace_core.bench.case import DTYPE_ALIASES

    _known("dtype", args.dtype, [*DTYPE_ALIASES, *DTYPE_ALIASES.values()])


def check_filters(args: argparse.Namespace, loaded: Sequence[Any]) -> None:
    """Refuses values of the filtering options that nothing has."""
    _check_arguments(args)
    cases = [case for family in loaded for case in family.cases]
    _known("operator", args.operators, [case.operator for case in cases])
    _known("case", args.case, [case.name for case in cases])


def show(document: dict[str, Any]) -> None:
    """Prints the tables of a result document."""
    from muspace_core.bench import table

    if document["rows"]:
        rows = [table.cells(row) for row in document["rows"]]
        keep = table.columns_in_use(rows)
        columns = [table.COLUMNS[i] for i in keep]
        text.table(table.title(document), columns, [[row[i] for i in keep] for row in rows], names=NAMES)
        print(table.legend(columns))
    if document["overhead"]:
        rows = [table.overhead_cells(row) for row in document["overhead"]]
        text.table(table.title(document), table.OVERHEAD_COLUMNS, rows, names=NAMES)
        print(table.OVERHEAD_LEGEND)


def list_cases(loaded: Sequence[Any]) -> int:
    from muspace_core.bench.case import SHORT_DTYPES
    from muspace_core.bench.table import PASS_WORDS

    rows = [
        (
            family.name,
            case.operator,
            case.name,
            "/".join(case.device_types),
            ", ".join(SHORT_DTYPES.get(name, name) for name in case.dtypes),
            ", ".join(PASS_WORDS[name] for name in case.passes),
            case.shape,
            case.source,
        )
        for family in loaded
        for case in family.cases
    ]
    text.table("", ("family", "operator", "case", "devices", "dtypes", "passes", "shape", "source"), rows, names=NAMES)
    return 0


def main(args: argparse.Namespace) -> int:
    loaded = load_families(args.family)
    check_filters(args, loaded)
    if args.list:
        return list_cases(loaded)
    device = choose_device(args.device)
    _check_outputs(args)
    from muspace_core.bench.table import PASS_WORDS
    from muspace_core.errors import MuspaceError

    try:
        document = measure(args, device, loaded)
    except MuspaceError as error:  # host time has no row that could carry the reason
        print(f"mu-space bench: {error}", file=sys.stderr)
        return 1
    if args.json == "-":
        print(json.dumps(document, indent=1))
    else:
        show(document)
        if args.json:
            _write(document, args.json)
            print(f"mu-space bench: wrote {args.json}", file=sys.stderr)
    failed = [row for row in document["rows"] if not row["correct"] or row["error"]]
    for row in failed:
        why = row["error"] or f"the correctness gate failed: {row['deviations']} against {row['limits']}"
        print(
            f"mu-space bench: {row['operator']} {row['case']} {row['dtype']} {PASS_WORDS[row['pass']]}: {why}", file=sys.stderr
        )
    if args.plot:
        from muspace_core.bench import plot

        try:
            plot.draw(document, args.plot)
        except (ValueError, OSError) as error:
            print(f"mu-space bench: no plot: {error}", file=sys.stderr)
            return 1
        print(f"mu-space bench: wrote {args.plot}", file=sys.stderr)
    return 1 if failed else 0
