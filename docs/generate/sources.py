# SPDX-License-Identifier: Apache-2.0
"""Quotes the code itself in a page, so that a guide cannot show what is no longer there."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".inl": "cpp", ".cmake": "cmake", ".txt": "cmake", ".toml": "toml"}


def quote(root: Path, target: str) -> str:
    """``path`` (the whole file) or ``path#name`` (one Python definition, or a C++/CMake block that starts with a line
    containing ``name`` and ends where its brackets close) as a code block; raises where the name is gone."""
    path, _, name = target.partition("#")
    text = (root / path).read_text(encoding="utf-8")
    if name:
        text = _definition(text, name, target) if path.endswith(".py") else _block(text, name, target)
    else:
        text = "\n".join(line for line in text.splitlines() if "SPDX-License-Identifier" not in line)
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f'```{language} title="{path}"\n{text.strip(chr(10))}\n```'


def _definition(text: str, name: str, target: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [item.id for item in node.targets if isinstance(item, ast.Name)]
        if name in names and isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign):
            return "\n".join(lines[node.lineno - 1 : node.end_lineno])
    raise ValueError(f"{target}: no definition of {name}")


def _block(text: str, name: str, target: str) -> str:
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if name in line and not re.match(r"\s*(//|#)", line)), None)
    if start is None:
        raise ValueError(f"{target}: no line with {name}")
    depth, opened = 0, False
    for end in range(start, len(lines)):
        code = lines[end].split("//")[0]
        depth += sum(code.count(c) for c in "({[") - sum(code.count(c) for c in ")}]")
        opened = opened or any(c in code for c in "({[")
        if depth <= 0 and (opened or not code.rstrip().endswith("\\")) and not code.rstrip().endswith(("\\", ",")):
            return "\n".join(lines[start : end + 1])
    raise ValueError(f"{target}: the block never closes")


def include(root: Path, path: str, page: str) -> str:
    """Markdown of a path or pattern; its links to pages of the site are made relative to ``page``, others become text."""

    def fit(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        inside = target.removeprefix("docs/")
        if inside == target:
            return label
        return f"[{label}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')})"

    found = sorted(root.glob(path))
    if not found:
        raise ValueError(f"{path}: no such file")
    text = "\n".join(file.read_text(encoding="utf-8") for file in found)
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", fit, text)
