# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin and the golden loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from muspace_core.testing import golden
from muspace_core.testing.plugin import load_sibling

pytest_plugins = ["pytester"]


# ---- plugin --------------------------------------------------------------------------------------------------------
def _run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=source)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_default_backend_and_summary_of_skips(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import pytest
        def test_backend(backend, device): assert (backend, device) == ("cpu", "cpu")
        @pytest.mark.slow
        def test_slow(): assert False
        @pytest.mark.backends("cuda", "hip")
        def test_other(): assert False
        @pytest.mark.parametrize("i", range(3))
        def test_needs(i): pytest.skip("no such tool")
        """,
    )
    result.assert_outcomes(passed=1, skipped=5)
    result.stdout.fnmatch_lines(["*skipped, by reason*", "*3  no such tool*"])
    result.stdout.fnmatch_lines(["*1  slow: run with --slow*"])
    result.stdout.fnmatch_lines(["*1  only for backend cuda or hip*"])


def test_slow_option(pytester: pytest.Pytester) -> None:
    _run(pytester, "import pytest\n@pytest.mark.slow\ndef test_slow(): pass", "--slow").assert_outcomes(passed=1)


def test_emu_sets_the_environment(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUSPACE_FORCE_BACKEND", "MUSPACE_EMU_BUDGET"):
        # Set first, so that whatever the inner run leaves behind is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _run(
        pytester,
        """
        import os
        def test_backend(backend, device):
            assert (backend, device) == ("emu", "cpu")
            assert os.environ["MUSPACE_FORCE_BACKEND"] == "emu" and os.environ["MUSPACE_EMU_BUDGET"] == "200000"
        """,
        "--muspace-backend=emu",
    ).assert_outcomes(passed=1)


def test_golden_tally(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
        import pytest
        pytestmark = pytest.mark.golden
        def test_right(): pass
        def test_wrong(): assert False
        @pytest.fixture
        def broken(): raise OSError("missing file")
        def test_broken(broken): pass
        """,
    )
    result.stdout.fnmatch_lines(["*test_it.py [[]cpu[]]: 1 passed / 3 total"])


def test_short_option_only_where_it_is_ours(pytester: pytest.Pytester) -> None:
    """Elsewhere ``--backend`` may belong to another plugin, which would fail to load if we had taken it."""
    result = _run(pytester, "def test_it(): pass", "--backend=cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    pytester.makepyprojecttoml('[project]\nname = "muspace-toy"\n')
    _run(pytester, "def test_it(): pass", "--backend=cpu").assert_outcomes(passed=1)


def test_unknown_backend(pytester: pytest.Pytester) -> None:
    assert _run(pytester, "def test_it(): pass", "--muspace-backend=tpu").ret == pytest.ExitCode.USAGE_ERROR


def test_the_plugin_imports_no_torch(pytester: pytest.Pytester) -> None:
    """It is loaded in every pytest run of an environment that merely has our wheels."""
    code = "import sys, muspace_core.testing.plugin; sys.exit(len({'torch', 'numpy'} & set(sys.modules)))"
    result = pytester.runpython_c(code)
    assert result.ret == 0, result.stderr.str()


def test_siblings_of_the_same_name_are_different_modules(tmp_path: Path) -> None:
    for folder, number in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "oracle.py").write_text(f"NUMBER = {number}\n")
    one = load_sibling(str(tmp_path / "one" / "test_a.py"), "oracle")
    two = load_sibling(str(tmp_path / "two" / "test_a.py"), "oracle")
    assert (one.NUMBER, two.NUMBER) == (1, 2)
    assert load_sibling(str(tmp_path / "one" / "test_b.py"), "oracle") is one
    with pytest.raises((ImportError, FileNotFoundError)):
        load_sibling(str(tmp_path / "one" / "test_a.py"), "missing")


# ---- golden --------------------------------------------------------------------------------------------------------
@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "golden"
    folder.mkdir()
    entry = {"op": "toy", "case": "one", "file": "toy.npz", "status": "ok", "keys": ["in/x", "out/y"],
             "nondeterminism": {"out/y": {"rel": 5e-6}}}  # fmt: skip
    cases = [entry, entry | {"case": "broken", "status": "FAIL"}, entry | {"case": "lost", "file": "lost.npz"}]
    (folder / golden.INDEX_NAME).write_text(json.dumps({"cases": cases}))
    np.savez(folder / "toy.npz", **{"toy/one/in/x": np.arange(3.0), "toy/one/out/y": np.ones(2)})
    return tmp_path


def test_golden_cases(data: Path) -> None:
    assert golden.absence_reason(data) is None
    found = golden.golden_cases("toy", data)
    assert [c.id for c in found] == ["toy-one", "toy-lost"]
    arrays = found[0].arrays()
    assert arrays["in"]["x"].tolist() == [0, 1, 2] and arrays["out"]["y"].shape == (2,)
    assert golden.golden_cases("other", data) == []


def test_a_listed_file_that_is_missing_fails(data: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lost\.npz: listed in golden_index\.json"):
        golden.golden_cases("toy", data)[1].arrays()


def test_absent_data_is_a_reason_to_skip(tmp_path: Path) -> None:
    reason = golden.absence_reason(tmp_path)
    assert reason and "MUSPACE_TEST_DATA" in reason
    assert golden.golden_cases("toy", tmp_path) == []
    assert [p.id for p in golden.golden_parameters([])] == ["absent"]
    named, skips = golden.golden_marks(tmp_path)
    assert named.name == "golden" and skips.args == (True,) and skips.kwargs == {"reason": reason}


def test_present_data_is_not_skipped(data: Path) -> None:
    parameters = golden.golden_parameters(golden.golden_cases("toy", data), pytest.mark.slow)
    assert [p.id for p in parameters] == ["toy-one", "toy-lost"] and all(p.marks == (pytest.mark.slow,) for p in parameters)
    assert golden.golden_marks(data)[1].args == (False,)


def test_measured_nondeterminism_widens_a_tolerance(data: Path) -> None:
    case = golden.golden_cases("toy", data)[0]
    assert case.tolerance("out/y", 1e-5) == pytest.approx(1.5e-5)
    assert case.tolerance("out/y", 1e-4) == 1e-4
    assert case.tolerance("out/z", 2e-6) == 2e-6


def test_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSPACE_TEST_DATA", str(tmp_path / "elsewhere"))
    assert golden.data_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("MUSPACE_TEST_DATA")
    (tmp_path / "checkout" / "packages" / "core").mkdir(parents=True)
    start = tmp_path / "checkout" / "packages" / "toy" / "tests" / "test_golden.py"
    assert golden.data_root(start) == tmp_path / "shared"
