# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal: rich where it is installed, aligned plain text where it is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

#: Colour of a status word; the word itself always says the same without colour.
STYLES: Final = {
    "run": "green",
    "yes": "green",
    "emulated": "cyan",
    "compiled": "yellow",
    "stub-compiled": "yellow",
    "absent": "dim",
}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints ``rows`` under ``columns``."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain(title, columns, rows))
        return
    # Into a pipe or a file nothing knows the width: a row then takes the room it needs, for grep.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    drawn = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell.split(" ", 1)[0], "")) for cell in row))
    console.print(drawn)


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as aligned text."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = [title] if title else []
    for row in (columns, ["-" * width for width in widths], *rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)
