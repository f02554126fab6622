# SPDX-License-Identifier: Apache-2.0
"""Finding and opening libraries: order of folders, remembered failures, files that are no libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from muspace_core import loader
from muspace_core.errors import BackendUnavailable
from muspace_core.loader import NativeLibrary


@pytest.fixture
def library() -> NativeLibrary:
    return NativeLibrary("muspace_core", "toy")


@pytest.mark.parametrize("searched", ["installed", "named by the variable"])
def test_a_missing_library_is_one_sentence_with_the_remedy(
    searched: str, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the wheel's own folder was searched another wheel helps; where the variable names the place, the variable does."""
    monkeypatch.delenv("MUSPACE_LIBRARY_PATH", raising=False)
    if searched != "installed":
        monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
    assert library.path("cuda") is None
    text = library.failure("cuda")
    assert text is not None and "\n" not in text
    assert "libtoy_cuda.so" in text
    if searched == "installed":
        assert "muspace_core/_lib" in text and "muspace-toy" in text and "MUSPACE_BACKENDS=cuda" in text
        assert "MUSPACE_LIBRARY_PATH" not in text
    else:
        assert str(tmp_path) in text and "MUSPACE_LIBRARY_PATH" in text
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


@pytest.mark.skipif(os.name != "posix", reason="paths are text here")
@pytest.mark.parametrize("present", [True, False])
def test_a_folder_whose_name_is_no_text(
    present: bool, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are bytes; the bytes of another encoding are a folder like any other, or a missing one."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    if present:
        try:
            folder.mkdir()
        except OSError:
            pytest.skip("this file system takes UTF-8 names only")
        (folder / "libtoy_cpu.so").write_bytes(b"not a library")
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(folder))
    assert library.path("cpu") == (folder / "libtoy_cpu.so" if present else None)
    text = library.failure("cpu")
    assert text is not None and text.startswith("libtoy_cpu.so ") and ("could not be opened" in text) == present


class FakeModule:
    """What the FFI loader hands out: functions by name."""

    def __init__(self, abi_info: str) -> None:
        self.text = abi_info

    def get_function(self, name: str) -> Callable[[], str]:
        assert name == "abi_info"
        return lambda: self.text


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ("muspace-abi=1;family=toy;backend=cpu;ffi=0;arch=x", None),
        ("muspace-abi=1;family=toy;backend=emu;ffi=0;arch=x", "emu"),
        ("muspace-abi=1;family=train;backend=cpu;ffi=0;arch=x", "train"),
        ("muspace-abi=1;ffi=0;arch=x", ""),
        ("muspace-abi=2;family=toy;backend=cpu;ffi=0;arch=x", "muspace-abi 2"),
        ("no fields", "could not be opened"),
    ],
    ids=["right", "another backend", "another family", "nameless", "another abi", "garbage"],
)
def test_a_library_says_what_it_is(
    info: str, named: str | None, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file under the wrong name would run another backend's code, with another kind of last argument."""
    (tmp_path / "libtoy_cpu.so").write_bytes(b"")
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(loader, "_import_tvm_ffi", lambda: SimpleNamespace(load_module=lambda path: FakeModule(info)))
    text = library.failure("cpu")
    if named is None:
        assert text is None and library.abi_info("cpu") == info
        return
    assert text is not None and text.startswith("libtoy_cpu.so ") and named in text
    with pytest.raises(BackendUnavailable, match=re.escape(text)):
        library.function("cpu", "abi_info")


def test_importing_core_opens_nothing() -> None:
    """A wheel must import on a machine where no library of it can be loaded."""
    import subprocess
    import sys

    code = "import muspace_core, muspace_core.loader, sys; assert 'tvm_ffi' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
