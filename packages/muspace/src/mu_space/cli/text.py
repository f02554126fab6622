# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal: rich where it is installed, aligned plain text where it is not."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
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


#: No column is folded below this many characters.
NARROWEST: Final = 8


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints ``rows`` under ``columns``."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain(title, columns, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        return
    # Into a pipe or a file nothing knows the width: a row then takes the room it needs, for grep.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        drawn.add_column(column, overflow="fold")  # in a narrow terminal a name is broken, never cut
    for row in rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell.split(" ", 1)[0], "")) for cell in row))
    # rich ends the process itself when the reader of a pipe has gone, so it only draws here and `print` writes. It flushes even
    # then: what was printed before goes out first, and its loss is an ordinary BrokenPipeError.
    sys.stdout.flush()
    with console.capture() as drawing:
        console.print(drawn)
    print(drawing.get(), end="")


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], room: int | None = None) -> str:
    """The same table as aligned text; the widest columns are folded until a row fits into ``room`` characters."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    while room is not None and sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = [title] if title else []
    for row in (columns, ["-" * width for width in widths], *rows):
        folded = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)
