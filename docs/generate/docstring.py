# SPDX-License-Identifier: Apache-2.0
"""Public docstrings as Markdown: Google sections become headings and tables, ``.. math::`` becomes an inline drawing."""

from __future__ import annotations

import html
import inspect
import io
import re
import textwrap
from collections.abc import Callable
from typing import Any

SECTIONS = ("Args", "Returns", "Raises", "Determinism", "Example", "Parameters")
_HEADER = re.compile(rf"^({'|'.join(SECTIONS)}):\s*(.*)$")
_ROLE = re.compile(r":(?:func|class|meth|mod|data):`([^`]+)`")


def to_markdown(item: Any, level: int = 3) -> str:
    """The docstring of ``item``; sections become headings of ``level``."""
    parts: list[str] = []
    for name, lines in _sections(inspect.getdoc(item) or ""):
        if name is None:
            parts.append(_prose(lines))
            continue
        parts.append(f"{'#' * level} {name}")
        text = _RENDER.get(name, _prose)(lines)
        parts.append(text[:1].upper() + text[1:])
    return "\n\n".join(part for part in parts if part.strip())


def signature(item: Callable[..., Any], name: str) -> str:
    """One parameter a line, annotations without module names of ``torch``."""
    found = inspect.signature(item)
    lines, starred = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "ctx"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    text = "\n".join([f"{name}(", *lines, f") -> {found.return_annotation}"])
    return text.replace("torch.Tensor", "Tensor")


def _sections(text: str) -> list[tuple[str | None, list[str]]]:
    """(section name or None, its lines dedented) in the order of the text; unindented prose ends a section."""
    out: list[tuple[str | None, list[str]]] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            out.append((header[1], [header[2]] if header[2] else []))
        elif not out or (out[-1][0] is not None and line and not line.startswith(" ") and not _continues(out[-1])):
            out.append((None, [line]))
        else:
            out[-1][1].append(line)
    return [(name, textwrap.dedent("\n".join(lines)).strip("\n").splitlines()) for name, lines in out]


def _continues(section: tuple[str | None, list[str]]) -> bool:
    """A one-paragraph section (`Determinism: …`) goes on in unindented lines until the next empty one."""
    return bool(section[1]) and not section[1][0].startswith(" ") and section[1][-1] != ""


def escaped(text: str, signs: str = "*_") -> str:
    """Text in which nothing but code spans is markup: angle brackets and ``signs`` outside of them are shown as they are."""
    parts = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(parts), 2):
        shown = html.escape(parts[place], quote=False)
        parts[place] = "".join(f"\\{sign}" if sign in signs else sign for sign in shown)
    return "".join(parts)


def _inline(text: str) -> str:
    return escaped(_ROLE.sub(r"`\1`", text).replace("``", "`"), signs="")


def _prose(lines: list[str]) -> str:
    """Paragraphs; doctests become code blocks, math directives drawings."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        text = textwrap.dedent(block)
        if text.startswith(">>>"):
            out.append(f"```pycon\n{text}\n```")
        elif text.startswith(".. math::"):
            out.append(formula(text.removeprefix(".. math::")))
        else:
            out.append(_inline(text))
    return "\n\n".join(out)


def _items(lines: list[str], header: str) -> str:
    """``name: meaning`` entries as a table."""
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith(" ") and rows:
            rows[-1][1] += " " + line.strip()
        elif line.strip():
            name, _, meaning = line.partition(": ")
            rows.append([name.rstrip(":"), meaning.strip()])
    cells = [f"| `{name}` | {_inline(meaning).replace('|', chr(92) + '|')} |" for name, meaning in rows]
    return "\n".join([header, "|---|---|", *cells])


def formula(latex: str) -> str:
    """Drawn by matplotlib as paths that take the colour of the text: no script, no font, no other host."""
    import matplotlib as mpl
    from matplotlib import mathtext
    from matplotlib.font_manager import FontProperties

    latex = " ".join(latex.split())
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "muspace", "mathtext.fontset": "cm"}):
        mathtext.math_to_image(f"${latex}$", buffer, prop=FontProperties(size=13), format="svg")
    drawing = buffer.getvalue().decode()
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    drawing = re.sub(r'<g id="patch_1">.*?</g>', "", drawing, count=1, flags=re.DOTALL)  # the white background
    drawing = re.sub(r"<style[^>]*>.*?</style>", "", drawing, flags=re.DOTALL).replace('style="', 'style="fill: currentColor; ')
    drawing = drawing.replace("<svg ", '<svg fill="currentColor" role="img" ', 1)
    drawing = re.sub(r"\s*\n\s*", " ", drawing).strip()
    return f'<div class="formula" title="{html.escape(latex)}">{drawing}</div>'


_RENDER: dict[str, Callable[[list[str]], str]] = {
    "Args": lambda lines: _items(lines, "| argument | meaning |"),
    "Raises": lambda lines: _items(lines, "| exception | when |"),
}
