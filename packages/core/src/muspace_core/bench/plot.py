# SPDX-License-Identifier: Apache-2.0
"""Draws a result document: bars of ours, peer, goal and floors per row, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from muspace_core.bench.case import SHORT_DTYPES
from muspace_core.bench.table import title, us

#: Key of the row, label, colour.
SERIES: Final = (
    ("wall_us", "ours, eager", "#1f77b4"),
    ("graph_us", "ours, graph replay", "#17becf"),
    ("baseline_us", "plain PyTorch", "#bbbbbb"),
    ("peer_us", "best peer", "#d62728"),
    ("goal_us", "goal", "#2ca02c"),
    ("cache_floor_us", "cache floor", "#9467bd"),
    ("dram_floor_us", "DRAM floor", "#8c564b"),
)


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

    series = [entry for entry in SERIES if any(row[entry[0]] for row in rows)]
    height = 0.8 / len(series)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + len(rows) * (0.16 * len(series) + 0.12)), layout="constrained")
    for offset, (key, label, colour) in enumerate(series):
        present = [(index, row[key]) for index, row in enumerate(rows) if row[key]]
        places = [index - 0.4 + (offset + 0.5) * height for index, _ in present]
        bars = axes.barh(places, [value for _, value in present], height, label=label, color=colour)
        axes.bar_label(bars, [us(value) for _, value in present], fontsize=6, padding=2)
    labels = [f"{row['case']} {SHORT_DTYPES[row['dtype']]} {row['pass'].replace('_', ' ')}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.set_xlabel("µs per call, logarithmic (shorter is better)")
    axes.set_title(title(document), fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(axis="x", which="both", alpha=0.25)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
