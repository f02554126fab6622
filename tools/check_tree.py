# SPDX-License-Identifier: Apache-2.0
"""Rules of the tree that no linter knows: sizes, names, machine paths, identical licence copies.  Exits 1 with a list."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py", ".cc", ".h", ".inl", ".cmake"}
MAX_FILE, MAX_FUNCTION = 600, 60
VAGUE_NAMES = {"utils", "helpers", "common", "misc"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|mnt)/\w")
BINARY_SUFFIXES = {".so", ".o", ".whl"}


def tracked() -> list[Path]:
    """Files that git knows or would add, symlinked folders not followed."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / line for line in listing.stdout.splitlines())
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def long_functions(path: Path, text: str) -> list[str]:
    """Python functions of more than MAX_FUNCTION lines, docstring not counted."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = node.body[0]
            is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
            documented = (doc.end_lineno or 0) - doc.lineno + 1 if is_doc else 0
            length = (node.end_lineno or 0) - node.lineno + 1 - documented
            if length > MAX_FUNCTION:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}")
    return found


def check(path: Path) -> list[str]:
    """Complaints about one file."""
    name = path.relative_to(ROOT)
    if path.suffix in BINARY_SUFFIXES:
        return [f"{name}: a built file must not be tracked"]
    complaints = [f"{name}: say what it holds instead of {path.stem!r}"] if path.stem in VAGUE_NAMES else []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return complaints
    lines = text.splitlines()
    complaints += [f"{name}:{i}: path of one machine" for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    if path.suffix in CODE:
        if len(lines) > MAX_FILE:
            complaints.append(f"{name}: {len(lines)} lines, at most {MAX_FILE}")
        if not any("SPDX-License-Identifier" in line for line in lines[:3]):
            complaints.append(f"{name}: no SPDX line at the top")
    if path.suffix == ".py":
        complaints += long_functions(path, text)
    return complaints


def licence_copies() -> list[str]:
    """Packages carry their own LICENSE and NOTICE (a wheel needs them inside); they must not drift."""
    return [
        f"{copy.relative_to(ROOT)}: differs from the one at the root"
        for file in ("LICENSE", "NOTICE")
        for package in sorted((ROOT / "packages").iterdir())
        for copy in [package / file]
        if not copy.is_file() or copy.read_bytes() != (ROOT / file).read_bytes()
    ]


def main() -> int:
    complaints = [complaint for path in tracked() for complaint in check(path)] + licence_copies()
    print("\n".join(complaints) or "tree: nothing to complain about")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
