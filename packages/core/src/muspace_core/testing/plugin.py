# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: the backend under test, markers, and a summary that names every skip and counts the golden cases.

Imports neither torch nor numpy: it is loaded wherever muspace-core and pytest are installed together.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BACKENDS = ("cpu", "emu", "cuda", "hip", "musa", "reference")
#: Emulated thread-points one test may spend; the emu library stops a launch that would exceed it.
EMU_BUDGET = 200_000
MARKERS = (
    "slow: needs minutes or gigabytes; runs only with --slow",
    "warp_sensitive: depends on the warp size; repeated at MUSPACE_EMU_WARP=64 and 128",
    "golden: compares with arrays computed by the real upstream kernel; counted in the summary",
    "emu_budget(points): emulated thread-points this test may spend instead of the usual 200 000",
    "backends(*names): runs only where the backend under test is one of these",
)


def _inside_muspace(start: Path) -> bool:
    """True in a checkout or unpacked sdist of ours: elsewhere `--backend` may belong to somebody else's plugin."""
    for folder in (start, *start.parents):
        project = folder / "pyproject.toml"
        if (folder / "packages" / "core").is_dir():
            return True
        if project.is_file() and 'name = "muspace' in project.read_text(encoding="utf-8", errors="replace"):
            return True
    return False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("muspace", "muSPACE operator contract")
    names = ["--muspace-backend"] + (["--backend"] if _inside_muspace(Path.cwd()) else [])
    group.addoption(*names, dest="muspace_backend", default="cpu", choices=BACKENDS, help="backend under test (default: cpu)")
    group.addoption("--slow", dest="muspace_slow", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    if config.option.muspace_backend == "emu":
        # Before anything of ours is imported, and inherited by the subprocesses that tests start.
        os.environ["MUSPACE_FORCE_BACKEND"] = "emu"
        os.environ.setdefault("MUSPACE_EMU_BUDGET", str(EMU_BUDGET))
    config.pluginmanager.register(_Counts(config.option.muspace_backend), "muspace-counts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    backend = config.option.muspace_backend
    for item in items:
        if item.get_closest_marker("slow") and not config.option.muspace_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        wanted = item.get_closest_marker("backends")
        if wanted and backend not in wanted.args:
            item.add_marker(pytest.mark.skip(reason=f"only for backend {' or '.join(wanted.args)}"))


class _Counts:
    """Collects outcomes while tests run and prints two blocks at the end."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.skips: Counter[str] = Counter()
        self.golden: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips[text.removeprefix("Skipped: ")] += 1
        # Once a test: at its call, or where it ended before that.
        if "golden" in report.keywords and (report.when == "call" or report.failed or report.skipped):
            tally = self.golden.setdefault(report.nodeid.split("::", 1)[0], Counter())
            tally[report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        warp = os.environ.get("MUSPACE_EMU_WARP")
        label = self.backend + (f", warp {warp}" if self.backend == "emu" and warp else "")
        if self.golden:
            terminalreporter.section("golden cases", sep="-")
            for path, tally in sorted(self.golden.items()):
                skipped = f", {tally['skipped']} skipped" if tally["skipped"] else ""
                terminalreporter.line(f"{path} [{label}]: {tally['passed']} passed / {tally.total()} total{skipped}")
        if self.skips:
            terminalreporter.section("skipped, by reason", sep="-")
            for reason, count in self.skips.most_common():
                terminalreporter.line(f"{count:5d}  {reason}")


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    """Backend under test: the one named by ``--backend``."""
    return str(pytestconfig.option.muspace_backend)


@pytest.fixture(scope="session")
def device(backend: str) -> str:
    """Torch device on which the tensors of the backend under test live; skips where there is none."""
    if backend in ("cpu", "emu", "reference"):
        return "cpu"
    kind = "musa" if backend == "musa" else "cuda"
    import torch

    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        pytest.skip(f"{backend}: torch sees no {kind} device")
    return f"{kind}:0"


@pytest.fixture(autouse=True)
def _emulation_budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger budget where a test says why it needs one (an upstream array has the size it has)."""
    mark = request.node.get_closest_marker("emu_budget")
    if mark and request.config.option.muspace_backend == "emu":
        monkeypatch.setenv("MUSPACE_EMU_BUDGET", str(mark.args[0]))


@pytest.fixture(autouse=True)
def _deterministic_algorithms_restored() -> Iterator[None]:
    """A test that fails half-way must not leave deterministic algorithms switched on for the next one."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def load_sibling(file: str, name: str) -> ModuleType:
    """Module ``name.py`` beside ``file``.

    Under ``--import-mode=importlib`` a test folder is not on ``sys.path``, and several packages have a file of this name.
    """
    path = Path(file).resolve().parent / f"{name}.py"
    key = f"_muspace_sibling_{zlib.crc32(str(path).encode()):08x}_{name}"
    if key not in sys.modules:
        specification = importlib.util.spec_from_file_location(key, path)
        if specification is None or specification.loader is None:
            raise ImportError(f"no module {name} beside {Path(file).name}")
        module = importlib.util.module_from_spec(specification)
        sys.modules[key] = module
        specification.loader.exec_module(module)
    return sys.modules[key]
