# SPDX-License-Identifier: Apache-2.0
"""Benchmark page from ``benchmarks/results/*.json``: what the schema refuses fails the build, what is absent claims nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from generate.docstring import escaped
from generate.specs import table

NONE = (
    '!!! note "No results"\n    `benchmarks/results/` holds no result file, so this page claims no speed. '
    "`mu-space bench --json FILE` writes one."
)


def documents(root: Path) -> dict[str, dict[str, Any]]:
    """Every committed result document by its path without ``.json``, checked against the schema."""
    from muspace_core.bench import schema

    found = {}
    folder = root / "benchmarks" / "results"
    for path in sorted(folder.glob("**/*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        found[name] = json.loads(path.read_text(encoding="utf-8"))
        schema.validate(found[name])
    return found


def pictures(root: Path) -> dict[str, str]:
    """SVG of every document that has a row to draw, named as in ``documents``."""
    from muspace_core.bench import plot

    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, document in documents(root).items():
            if any(row["correct"] for row in document["rows"]):
                path = Path(folder) / "result.svg"
                plot.draw(document, path)
                drawn[name] = path.read_text(encoding="utf-8")
    return drawn


def page(root: Path) -> str:
    """One section per document: machine, table, picture, host overhead."""
    found = documents(root)
    return "\n\n".join(_section(name, document) for name, document in found.items()) or NONE


def _section(name: str, document: dict[str, Any]) -> str:
    from muspace_core.bench import table as cells

    versions = ", ".join(f"{wheel.replace('_', '-')} {version}" for wheel, version in document["versions"].items())
    method = document["method"]
    families = dict.fromkeys(row["family"] for key in ("rows", "overhead") for row in document[key])
    title = ": ".join(part for part in (", ".join(families), cells.title(document)) if part)
    parts = [f"## {title}", f"`{name}.json`, {document['date']}, {versions}. {method[0].upper()}{method[1:]}."]
    rows = [cells.cells(row) for row in document["rows"]]
    if rows:
        used = cells.columns_in_use(rows)
        parts.append(table([cells.COLUMNS[i] for i in used], [[escaped(row[i]) for i in used] for row in rows]))
        parts.append(cells.legend([cells.COLUMNS[i] for i in used]))
    if any(row["correct"] for row in document["rows"]):
        parts.append(f"![Times per call beside peer, goal and floors](img/benchmarks/{name}.svg)")
    if document["overhead"]:
        parts.append("### Host time of one call")
        rows = [[escaped(cell) for cell in cells.overhead_cells(row)] for row in document["overhead"]]
        parts.append(table([escaped(column) for column in cells.OVERHEAD_COLUMNS], rows))
        parts.append(escaped(cells.OVERHEAD_LEGEND))
    return "\n\n".join(parts)
