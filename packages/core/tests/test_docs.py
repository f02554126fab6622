# SPDX-License-Identifier: Apache-2.0
"""The pages cannot rot: their Python blocks run, and the names, files, variables and tasks that they mention exist."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="the pages are not part of an sdist")

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
RUNNABLE = [README, *(ROOT / "docs" / name for name in ("index.md", "quickstart.md", "bird-eye-view.md", "dispatch.md"))]
RUNNABLE += sorted(ROOT.glob("packages/*/README.md"))
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"^(?:muspace_[a-z0-9]+|mu_space)(?:\.\w+)+$")
REGISTERED = re.compile(r"^torch\.ops\.(muspace_[a-z0-9]+)\.(\w+)$")
TOP = r"(?:native|tools|packages|docs|benchmarks|constraints|\.ci)"
REPOSITORY_PATH = re.compile(rf"^{TOP}/[\w./-]+$")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
VARIABLE = re.compile(r"\bMUSPACE_[A-Z0-9_]+\b|\bMSP_[A-Z0-9_]+\b")
#: Made by a build, so absent from a fresh clone.
BUILT = re.compile(r"/_lib$|^benchmarks/results/?$")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@functools.cache
def sources() -> str:
    """Text of everything that may define a variable or macro."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    suffixes = {".py", ".h", ".inl", ".cc", ".cmake", ".txt", ""}
    paths = [
        ROOT / line for line in listed.stdout.splitlines() if not line.startswith(("docs/", "packages/core/tests/test_docs"))
    ]
    wanted = [path for path in paths if path.suffix in suffixes and path.is_file() and path.name != "LICENSE"]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in wanted)


@pytest.mark.parametrize("page", RUNNABLE, ids=[str(page.relative_to(ROOT)) for page in RUNNABLE])
@pytest.mark.filterwarnings("ignore:.*runs its PyTorch reference:RuntimeWarning")
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order and in one namespace, as a reader would type them."""
    pytest.importorskip("muspace_msda")
    pytest.importorskip("mu_space")
    blocks = [block for _, block in FENCE.findall(read(page))]
    assert blocks, f"{page.name} has no Python block"
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


def resolve(name: str) -> object:
    """The object behind a dotted name; raises ImportError or AttributeError."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_exist(page: Path) -> None:
    pytest.importorskip("mu_space")
    for code in CODE.findall(read(page)):
        registered = REGISTERED.match(code)
        if registered:
            importlib.import_module(registered[1])
            torch = importlib.import_module("torch")
            assert hasattr(getattr(torch.ops, registered[1]), registered[2]), code
        elif DOTTED.match(code):
            resolve(code)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_exist(page: Path) -> None:
    text = read(page)
    for code in CODE.findall(text):
        if REPOSITORY_PATH.match(code) and not BUILT.search(code):
            assert (ROOT / code).exists() or list(ROOT.glob(code + "*")), f"{page.name} names {code}"
    for target in re.findall(r"<!-- source: ([^ #]+)", text):
        assert (ROOT / target).is_file(), target
    if page.parts[-2] != "docs" and "docs" not in page.parts:
        for target in LINK.findall(text):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_variables_exist(page: Path) -> None:
    for name in set(VARIABLE.findall(read(page))):
        # CMake makes MSP_PART_<PART> out of the parts that a package names.
        assert ("MSP_PART_" if name.startswith("MSP_PART_") else name) in sources(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tasks_exist(page: Path) -> None:
    sessions = set(re.findall(r"@nox\.session\n(?:@.*\n)*def (\w+)\(", read(ROOT / "noxfile.py")))
    text = read(page)
    named = re.findall(r"\./dev ['\"]?([a-z_]+)", text) + re.findall(r"nox -s ['\"]?([a-z_]+)", text)
    assert set(named) <= sessions, sorted(set(named) - sessions)


def test_readme_says_what_the_specs_say() -> None:
    pytest.importorskip("muspace_msda")
    specs = importlib.import_module("muspace_msda._spec").SPECS
    said = dict(re.findall(r"^\| (cpu|cuda|hip|musa|emu) \| ([a-z-]+) \|", read(README), re.MULTILINE))
    assert said == {backend: specs[0].backends[backend].kind for backend in specs[0].backends}
