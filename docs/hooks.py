# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: writes the operator pages and fills the markers of the others from the code, at build time.

``<!-- generate: NAME -->`` is replaced by the output of a generator below, ``<!-- source: PATH#NAME -->`` by that code,
``<!-- include: PATH -->`` by a Markdown file of the repository, or those of a pattern, with its links made to fit, and
``<!-- drawing: FILE.svg -->`` by the file, inline, so that it follows the colours of the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))  # mkdocs undoes it after this import

from generate import results, sources, specs  # noqa: E402 - needs the path above

MARKER = re.compile(r"^( *)<!-- (generate|source|include|drawing): (.+?) -->$", re.MULTILINE)
GENERATORS: dict[str, Callable[[Path], str]] = {
    "kinds": specs.kinds,
    "kinds-at-home": lambda root: specs.kinds(root, "operators/"),
    "details": specs.details,
    "status-notes": specs.status_notes,
    "variables": specs.variables,
    "report-keys": specs.report_keys,
    "routes": specs.routes,
    "benchmarks": results.page,
}


def on_config(config: Any) -> Any:
    """Makes the packages importable, installed or not; one page per operator under Operators."""
    sys.path += [str(folder) for folder in (ROOT / "packages").glob("*/src") if str(folder) not in sys.path]
    for entry in config["nav"]:
        if "Operators" in entry:
            entry["Operators"] += [{spec.name: f"operators/{spec.name}.md"} for spec in specs.specs(ROOT)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the operator pages and the benchmark pictures."""
    for spec in specs.specs(ROOT):
        page = specs.operator_page(spec)
        files.append(File.generated(config, f"operators/{spec.name}.md", content=page))
    for name, picture in results.pictures(ROOT).items():
        files.append(File.generated(config, f"img/benchmarks/{name}.svg", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills the markers."""

    def fill(match: re.Match[str]) -> str:
        indent, what, name = match.groups()
        if what == "generate":
            text = GENERATORS[name](ROOT)
        elif what == "source":
            text = sources.quote(ROOT, name)
        elif what == "include":
            text = sources.include(ROOT, name, page.file.src_uri)
        else:
            text = f'<figure class="drawing">{_drawing(DOCS / "img" / name)}</figure>'
        return "\n".join(indent + line if line else line for line in text.splitlines())

    filled = MARKER.sub(fill, markdown)
    if "<!-- source" in filled or "<!-- generate" in filled or "<!-- include" in filled or "<!-- drawing" in filled:
        raise ValueError(f"{page.file.src_uri}: a marker must stand alone on its line")
    return filled


def _drawing(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("<!--"))
