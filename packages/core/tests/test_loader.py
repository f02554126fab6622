# SPDX-License-Identifier: Apache-2.0
"""Finding and opening libraries: order of folders, remembered failures, files that are no libraries."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from muspace_core.errors import BackendUnavailable
from muspace_core.loader import NativeLibrary


@pytest.fixture
def library() -> NativeLibrary:
    return NativeLibrary("muspace_core", "toy")


def test_a_missing_library_is_one_sentence_with_the_remedy(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
    assert library.path("cuda") is None
    text = library.failure("cuda")
    assert text is not None and "\n" not in text
    assert "libtoy_cuda.so" in text and str(tmp_path) in text
    assert "muspace-toy" in text and "MUSPACE_BACKENDS=cuda" in text
    for attempt in (library.load, library.abi_info, lambda b: library.function(b, "anything")):
        with pytest.raises(BackendUnavailable, match=re.escape(text)):
            attempt("cuda")


def test_folders_are_searched_in_order(library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a b", tmp_path / "c"
    for folder in (first, second):
        folder.mkdir()
    (second / "libtoy_cpu.so").write_bytes(b"")
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", os.pathsep.join([str(tmp_path / "not there"), "", str(first), str(second)]))
    assert library.path("cpu") == second / "libtoy_cpu.so"
    (first / "libtoy_cpu.so").write_bytes(b"")
    assert library.path("cpu") == first / "libtoy_cpu.so"
    assert library.path("musa") is None


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(60)], ids=["empty", "text", "elf header"])
def test_a_file_that_is_no_library(
    content: bytes, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libtoy_cpu.so").write_bytes(content)
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
    text = library.failure("cpu")
    assert text is not None and text.startswith("libtoy_cpu.so could not be opened: ") and len(text) > 40


def test_a_failure_is_remembered_per_search_path(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking again costs nothing and says the same; another path is another question."""
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
    text = library.failure("cpu")
    (tmp_path / "libtoy_cpu.so").write_bytes(b"broken")
    assert library.failure("cpu") == text
    other = tmp_path / "other"
    other.mkdir()
    (other / "libtoy_cpu.so").write_bytes(b"broken")
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(other))
    found = library.failure("cpu")
    assert found is not None and "could not be opened" in found


def test_importing_core_opens_nothing() -> None:
    """A wheel must import on a machine where no library of it can be loaded."""
    import subprocess
    import sys

    code = "import muspace_core, muspace_core.loader, sys; assert 'tvm_ffi' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
