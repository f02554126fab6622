# SPDX-License-Identifier: Apache-2.0
"""Imports point inwards: core knows no family, a kernel wrapper no fallback, an oracle nothing of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2]
FAMILIES = sorted(p.name for p in PACKAGES.iterdir() if (p / "src" / f"muspace_{p.name}" / "_spec.py").is_file())
#: Tables of sizes and geometry, which every layer of a family may read.
DATA = {"_spec", "_levels", "_scales", "_plan", "_host"}
#: layer (a module, or a folder with a module per operator) -> names of its own package that it may import
ALLOWED = {
    "_spec": set(),
    "_levels": set(),
    "_scales": {"_levels"},
    "_host": set(),
    "_plan": set(),
    "_reference": DATA,
    "_native": DATA,
    "_autograd": {"_native", *DATA},
    "_ops": {"_autograd", "_native", "_reference", *DATA},
    "ops": {"_ops", "_autograd"},
    "modules": {"ops", "compat"},
    "compat": {"ops", "modules"},
}

pytestmark = pytest.mark.skipif(not (PACKAGES / "core").is_dir(), reason="only in a checkout with all packages")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _sources(package: str) -> list[Path]:
    return sorted((PACKAGES / package / "src").rglob("*.py"))


def test_core_knows_no_family() -> None:
    families = {f"muspace_{name}" for name in FAMILIES} | {"mu_space"}
    for path in _sources("core"):
        assert not {name.split(".")[0] for name in _imports(path)} & families, path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_knows_no_other(family: str) -> None:
    others = {f"muspace_{name}" for name in FAMILIES if name != family} | {"mu_space"}
    for path in _sources(family):
        assert not {name.split(".")[0] for name in _imports(path)} & others, path.name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_family(family: str) -> None:
    package = f"muspace_{family}"
    root = PACKAGES / family / "src" / package
    own = {p.relative_to(root).parts[0].removesuffix(".py") for p in _sources(family)}
    for path in _sources(family):
        layer = path.relative_to(root).parts[0].removesuffix(".py")
        allowed = ALLOWED.get(layer)
        if allowed is None:
            continue
        used = {n.split(".")[1] for n in _imports(path) if n.startswith(f"{package}.")} & own - {layer}
        assert used <= allowed, f"{path.name} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_a_stranger(family: str) -> None:
    oracles = [p for p in (PACKAGES / family / "tests").rglob("*.py") if "oracle" in p.name and not p.name.startswith("test_")]
    assert oracles
    for path in oracles:
        assert {name.split(".")[0] for name in _imports(path)} <= {
            "numpy",
            "__future__",
            "collections",
            "dataclasses",
            "math",
        }, path.name


@pytest.mark.parametrize("package", ["core", "muspace", *FAMILIES])
def test_sources_open_with_the_licence_and_stay_short(package: str) -> None:
    for path in sorted((PACKAGES / package).rglob("*.py")):
        if "native" in path.relative_to(PACKAGES / package).parts[:1] or "build" in path.parts:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines and lines[0] == "# SPDX-License-Identifier: Apache-2.0", path
        assert len(lines) <= 600, f"{path}: {len(lines)} lines"
