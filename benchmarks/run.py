# SPDX-License-Identifier: Apache-2.0
"""Measures every case of every installed family and writes one schema-checked result per family.

    python benchmarks/run.py                     results/<version>/<family>--<machine>--<device>.json, and a plot beside it
    python benchmarks/run.py --out DIR           the same files into DIR
    python benchmarks/run.py --draw FILE.json    only draws stored results again
    python benchmarks/run.py --write-schema      writes schema.json from muspace_core.bench.schema

Without installed wheels: PYTHONPATH=packages/core/src:packages/msda/src:packages/muspace/src python benchmarks/run.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mu_space
from mu_space.cli import bench as command
from mu_space.cli.main import UsageError
from muspace_core.bench import collect, plot, schema

HERE = Path(__file__).resolve().parent


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    parser.set_defaults(json=None, plot=None)
    parser.add_argument("--out", type=Path, help="folder of the results (default: results/<version> beside this file)")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="draw stored results and stop")
    parser.add_argument("--write-schema", action="store_true", help="write schema.json and stop")
    return parser.parse_args(argv)


def draw(files: list[Path]) -> int:
    for file in files:
        document = json.loads(file.read_text())
        schema.validate(document)
        plot.draw(document, file.with_suffix(".png"))
        print(file.with_suffix(".png"))
    return 0


def measure_family(args: argparse.Namespace, family: str, out: Path) -> bool:
    """Rows and overhead of one family into one file; true if every row passed its gate."""
    loaded = command.load_families([family])
    out.mkdir(parents=True, exist_ok=True)
    device = command.choose_device(args.device)
    args.overhead, args.json = False, str(out / f"{family}--unfinished.json")
    document = command.measure(args, device, loaded)
    args.overhead = True
    document["overhead"] = command.measure(args, device, loaded)["overhead"]
    schema.validate(document)
    command.show(document)
    file = out / collect.result_name(document, family)
    file.write_text(json.dumps(document, indent=1) + "\n")
    Path(args.json).unlink(missing_ok=True)
    print(file)
    try:
        plot.draw(document, file.with_suffix(".png"))
    except (ImportError, ValueError) as error:
        print(f"no plot: {error}", file=sys.stderr)
    return all(row["correct"] for row in document["rows"])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.write_schema:
        (HERE / "schema.json").write_text(json.dumps(schema.SCHEMA, indent=1) + "\n")
        return 0
    if args.draw:
        return draw(args.draw)
    out = args.out or HERE / "results" / mu_space.__version__
    try:
        names = [family.name for family in command.load_families(args.family)]
        passed = [measure_family(args, family, out) for family in names]
    except UsageError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
