# SPDX-License-Identifier: Apache-2.0
"""Golden arrays: outputs of the real upstream kernels, found through ``MUSPACE_TEST_DATA`` and described by an index."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INDEX_NAME = "golden_index.json"


def data_root(start: str | os.PathLike[str] | None = None) -> Path:
    """Folder with the test data: ``MUSPACE_TEST_DATA``, else ``shared`` beside the repository that contains ``start``.

    The folder need not exist; callers skip with ``absence_reason``.
    """
    named = os.environ.get("MUSPACE_TEST_DATA")
    if named:
        return Path(named)
    here = Path(start if start is not None else __file__).resolve()
    for folder in (here, *here.parents):
        if (folder / "packages" / "core").is_dir():
            return folder.parent / "shared"
    return Path.cwd().resolve().parent / "shared"


def absence_reason(root: Path) -> str | None:
    """Why golden tests cannot run with ``root``, or ``None``.  A missing array file is not a reason: that must fail."""
    if (root / "golden" / INDEX_NAME).is_file():
        return None
    return f"golden arrays: no golden/{INDEX_NAME} in {root.name}/ (set MUSPACE_TEST_DATA)"


@dataclass(frozen=True)
class GoldenCase:
    """One case of the index; ``arrays()[kind][name]`` with kind in ``in``, ``out``, ``grad``, ``out_cpu``, ``grad_cpu``."""

    root: Path
    entry: Mapping[str, Any]

    @property
    def id(self) -> str:
        return f"{self.entry['op']}-{self.entry['case']}"

    @property
    def name(self) -> str:
        return str(self.entry["case"])

    def arrays(self) -> dict[str, dict[str, np.ndarray]]:
        """Reads the case; a missing file or key raises, it is never skipped."""
        path = self.root / "golden" / self.entry["file"]
        if not path.is_file():
            raise FileNotFoundError(f"{path.name}: listed in {INDEX_NAME} but not in {path.parent}")
        found: dict[str, dict[str, np.ndarray]] = {}
        with np.load(path) as stored:
            for key in self.entry["keys"]:
                kind, name = key.split("/", 1)
                found.setdefault(kind, {})[name] = stored[f"{self.entry['op']}/{self.entry['case']}/{key}"]
        return found

    def tolerance(self, array: str, listed: float) -> float:
        """``listed``, or three times the measured rerun difference where that exceeds a third of it."""
        rerun = float(self.entry.get("nondeterminism", {}).get(array, {}).get("rel", 0.0))
        return 3.0 * rerun if rerun > listed / 3.0 else listed


@functools.lru_cache(maxsize=4)
def _index(root: Path) -> Mapping[str, Any]:
    return json.loads((root / "golden" / INDEX_NAME).read_text(encoding="utf-8"))


def golden_cases(operator: str, root: Path | None = None) -> list[GoldenCase]:
    """Cases of one operator that upstream computed successfully; empty where the data is absent."""
    root = data_root() if root is None else root
    if absence_reason(root):
        return []
    return [GoldenCase(root, c) for c in _index(root)["cases"] if c["op"] == operator and c["status"] != "FAIL"]


def golden_parameters(cases: Sequence[GoldenCase], *marks: pytest.MarkDecorator) -> list[Any]:
    """The cases as parameters of a test; where the data is absent one stands for them, so that the skip is counted."""
    return [pytest.param(case, id=case.id, marks=marks) for case in cases] or [pytest.param(None, id="absent")]


def golden_marks(root: Path) -> list[pytest.MarkDecorator]:
    """Marks of a module or class whose tests compare with golden arrays below ``root``."""
    reason = absence_reason(root)
    return [pytest.mark.golden, pytest.mark.skipif(reason is not None, reason=reason or "")]
