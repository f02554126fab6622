# SPDX-License-Identifier: Apache-2.0
"""Measures every case of every installed family and writes one schema-checked result per family.

    python benchmarks/run.py                     results/<version>/<family>--<machine>--<device>.json, and a plot beside it
    python benchmarks/run.py --out DIR           the same files into DIR
    python benchmarks/run.py --only bev_pool_v2 --case bevdet_r50_plan --out DIR   a part
    python benchmarks/run.py --merge A.json B.json --out DIR                       parts of one machine in one file
    python benchmarks/run.py --draw FILE.json    only draws stored results again
    python benchmarks/run.py --write-schema      writes schema.json from muspace_core.bench.schema

A case that cannot be run is a row with the reason; the rows so far of a run that is cut off are in <family>--unfinished.json.
Without installed wheels: PYTHONPATH=$(echo packages/*/src | tr ' ' ':') python benchmarks/run.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mu_space
from mu_space.cli import bench as command
from mu_space.cli.main import UsageError
from muspace_core.bench import collect, plot, schema

HERE = Path(__file__).resolve().parent


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(json=None, plot=None, overhead=False)
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/<version> beside this file)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put results of parts together and stop")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="draw stored results and stop")
    parser.add_argument("--write-schema", action="store_true", help="write schema.json and stop")
    return parser.parse_args(argv)


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    schema.validate(document)
    return document


def _draw(document: dict[str, Any], file: Path) -> None:
    try:
        plot.draw(document, file.with_suffix(".png"))
    except (ImportError, ValueError) as error:
        print(f"no plot: {error}", file=sys.stderr)


def _keep(document: dict[str, Any], family: str, out: Path) -> None:
    """The result file of a family, and its picture."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / collect.result_name(document, family)
    file.write_text(json.dumps(document, indent=1) + "\n")
    print(file)
    _draw(document, file)


def merge(files: list[Path], out: Path) -> int:
    parts = [_read(file) for file in files]
    families = {row["family"] for document in parts for key in ("rows", "overhead") for row in document[key]}
    if len(families) != 1:
        raise UsageError(f"--merge: expected results of one family, got {', '.join(sorted(families)) or 'none'}")
    _keep(collect.merged(parts), families.pop(), out)
    return 0


def _overhead(args: argparse.Namespace, device: Any, loaded: list[Any]) -> list[dict[str, Any]]:
    """Host time per call; what goes wrong here must not lose the rows."""
    args.overhead = True
    try:
        return list(command.measure(args, device, loaded)["overhead"])
    except Exception as error:
        print(f"no host times: {error}", file=sys.stderr)
        return []
    finally:
        args.overhead = False


def measure_family(args: argparse.Namespace, family: Any, out: Path) -> bool:
    """Rows and overhead of one family into one file; true if every row passed its gate and was timed."""
    out.mkdir(parents=True, exist_ok=True)
    device = command.choose_device(args.device)
    unfinished = out / f"{family.name}--unfinished.json"
    args.json = str(unfinished)
    document = command.measure(args, device, [family])
    document["overhead"] = _overhead(args, device, [family])
    schema.validate(document)
    command.show(document)
    _keep(document, family.name, out)
    unfinished.unlink(missing_ok=True)
    return all(row["correct"] and not row["error"] for row in document["rows"])


def measure(args: argparse.Namespace, out: Path) -> int:
    """Every family that has a row for these options."""
    loaded = command.load_families(args.family)
    command.check_filters(args, loaded)
    if args.list:
        return command.list_cases(loaded)
    device = command.choose_device(args.device)
    chosen = [family for family in loaded if command.selected(args, device.type, [family])]
    if not chosen:
        raise UsageError(f"no case fits --device {device.type} with these options")
    passed = [measure_family(args, family, out) for family in chosen]
    return 0 if all(passed) else 1


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.write_schema:
        (HERE / "schema.json").write_text(json.dumps(schema.SCHEMA, indent=1) + "\n")
        return 0
    for file in args.draw or ():
        plot.draw(_read(file), file.with_suffix(".png"))
        print(file.with_suffix(".png"))
    if args.draw:
        return 0
    out = args.out or HERE / "results" / mu_space.__version__
    try:
        return merge(args.merge, out) if args.merge else measure(args, out)
    except (UsageError, ValueError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
