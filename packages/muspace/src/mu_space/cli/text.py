# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal: rich where it is installed, aligned plain text where it is not."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
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
#: What rich draws around a cell.
FRAME: Final = 3


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[str] = ()) -> None:
    """Prints ``rows`` under ``columns``; a cell of the columns ``names`` is never broken.

    In a terminal in which the words of a row do not fit beside each other, a row becomes a paragraph.
    """
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if names and room is not None and _least(columns, rows, names) > room:
        print(paragraphs(title, columns, rows, names, room))
        return
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain(title, columns, rows, room, names))
        return
    # Into a pipe or a file nothing knows the width: a row then takes the room it needs, for grep.
    console = Console() if room is not None else Console(width=max(240, _least(columns, rows, columns)))
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column, width in zip(columns, _widths(columns, rows), strict=True):
        if column in names:
            drawn.add_column(column, no_wrap=True, min_width=width)
        else:
            drawn.add_column(column, overflow="fold")  # in a narrow terminal a word is broken, never cut
    for row in rows:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell.split(" ", 1)[0], "")) for cell in row))
    # rich ends the process itself when the reader of a pipe has gone, so it only draws here and `print` writes. It flushes even
    # then: what was printed before goes out first, and its loss is an ordinary BrokenPipeError.
    sys.stdout.flush()
    with console.capture() as drawing:
        console.print(drawn)
    print(drawing.get(), end="")


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(columns, *rows, strict=True)]


def _least(columns: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[str]) -> int:
    """Characters of a row in which the cells of ``names`` and the words of the others are whole."""
    words = [
        [cell if column in names else max(cell.split(), key=len, default="") for column, cell in zip(columns, row, strict=True)]
        for row in rows
    ]
    return sum(_widths(columns, words)) + FRAME * len(columns)


def paragraphs(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], names: Collection[str], room: int) -> str:
    """Each row as a line of its names and, indented below, ``column: cell`` of the others."""
    lines = [title] if title else []
    for row in rows:
        cells = list(zip(columns, row, strict=True))
        lines.append("  ".join(cell for column, cell in cells if column in names))
        line = ""
        for entry in [f"{column}: {cell}" for column, cell in cells if column not in names and cell]:
            if line and len(line) + 4 + len(entry) > room:
                lines += _indented(line, room)
                line = ""
            line += f"  {entry}" if line else entry
        lines += _indented(line, room)
    return "\n".join(lines)


def _indented(line: str, room: int) -> list[str]:
    """A line, folded between words."""
    wrapper = textwrap.TextWrapper(max(room, NARROWEST), "  ", "    ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(line)


def plain(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    room: int | None = None,
    names: Collection[str] = (),
) -> str:
    """The same table as aligned text; the widest columns but ``names`` are folded until a row fits into ``room`` characters."""
    widths = _widths(columns, rows)
    foldable = [place for place, column in enumerate(columns) if column not in names]
    while room is not None and foldable and sum(widths) + 2 * (len(widths) - 1) > room:
        widest = max(foldable, key=lambda place: widths[place])
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    lines = [title] if title else []
    for row in (columns, ["-" * width for width in widths], *rows):
        folded = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*folded, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)
