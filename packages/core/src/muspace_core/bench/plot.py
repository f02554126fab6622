# SPDX-License-Identifier: Apache-2.0
"""Draws a result document: ours, peer, goal and floors of each row as marks on one line, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from muspace_core.bench.case import SHORT_DTYPES
from muspace_core.bench.table import title, us

#: Key of the row, label, colour, marker; the first ones are drawn on top.
SERIES: Final = (
    ("wall_us", "ours, eager", "#1f77b4", "o"),
    ("graph_us", "ours, graph replay", "#17becf", "o"),
    ("goal_us", "goal", "#2ca02c", "|"),
    ("peer_us", "best peer", "#d62728", "D"),
    ("baseline_us", "plain PyTorch", "#999999", "s"),
    ("cache_floor_us", "cache floor", "#9467bd", "3"),
    ("dram_floor_us", "DRAM floor", "#8c564b", "4"),
)
_ROW_INCHES: Final = 0.21


def check(path: str | Path) -> None:
    """Whether :func:`draw` can write such a file: ``ImportError`` without matplotlib, ``ValueError`` for an unknown ending."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise ImportError("drawing needs matplotlib: pip install 'muspace[bench]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise ValueError(f"path: expected a file name that ends in one of {', '.join(sorted(known))}; got {Path(path).name}")


def draw(document: dict[str, Any], path: str | Path) -> None:
    """Writes ``path`` (png, svg or pdf by its ending); rows without a passed gate are left out.

    Raises ``ImportError`` without matplotlib and ``ValueError`` when there is nothing to draw.
    """
    rows = [row for row in document["rows"] if row["correct"]]
    if not rows:
        raise ValueError("no row passed its correctness gate, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    operators = list(dict.fromkeys(row["operator"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(11, 1.4 + _ROW_INCHES * (len(rows) + len(operators))), layout="constrained")
    # A line per operator above its rows, which carries its name.
    places, labels, below = [], [], 0
    for operator in operators:
        axes.text(0.0, below, f" {operator}", transform=axes.get_yaxis_transform(), fontsize=8, weight="bold", va="center")
        for row in (row for row in rows if row["operator"] == operator):
            below += 1
            places.append((below, row))
            labels.append(f"{row['case']} {SHORT_DTYPES[row['dtype']]} {row['pass'].replace('_', ' ')}")
        below += 1
    for depth, (key, label, colour, marker) in enumerate(SERIES):
        present = [(row[key], place) for place, row in places if row[key]]
        if present:
            across, down = zip(*present, strict=True)
            axes.scatter(across, down, s=42, c=colour, marker=marker, label=label, zorder=9 - depth)
    for place, row in places:
        axes.annotate(us(row["wall_us"]), (1.0, place), xycoords=axes.get_yaxis_transform(), fontsize=7, va="center")
    axes.set_yticks([place for place, _ in places], labels, fontsize=7)
    axes.set_ylim(below - 0.5, -0.7)
    axes.set_xscale("log")
    axes.margins(x=0.05)
    axes.set_xlabel("µs per call, logarithmic (further left is better); at the right edge: ours, eager")
    axes.set_title(title(document), fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.06, 1.0))
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
