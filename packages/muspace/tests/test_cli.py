# SPDX-License-Identifier: Apache-2.0
"""The ``mu-space`` command: starts without anything heavy, answers in JSON, and says in one sentence what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mu_space import families
from mu_space.cli import env, text
from mu_space.cli.main import COMMANDS, main


def _run(*arguments: str, code: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "mu_space"]
    return subprocess.run(
        [sys.executable, *start, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


# ------------------------------------------------------------------------------------------------------------ command line
def test_help_needs_the_standard_library_only() -> None:
    code = (
        "import sys; from mu_space.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'rich', 'muspace_core', 'muspace_msda', 'mu_space.demo'} & set(sys.modules)))"
    )
    done = _run(code=code)
    assert "HEAVY []" in done.stdout and all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"mu-space {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import mu_space

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"muspace {mu_space.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fly"], "mu-space: unknown command 'fly', expected one of env, ops, bench, demo (see mu-space --help)\n"),
        (["ops", "--fast"], "unrecognized arguments: --fast (see mu-space --help)\n"),
        (["env", "--profile", "x"], "mu-space env: unknown profile 'x', expected one of core (see mu-space env --help)\n"),
        (["bench", "--family", "x"], f"unknown family 'x', expected one of {', '.join(sorted(families.installed()))}"),
        (["bench", "--case", "x"], "unknown case 'x', expected one of tsa_base, "),
        (["bench", "--dtype", "int8"], "unknown dtype 'int8', expected one of fp32, bf16, fp16, fp64, "),
        (["bench", "--pass", "x"], "unknown pass 'x', expected one of fwd, bwd, ordered, "),
        (["bench", "--backend", "x"], "unknown backend 'x', expected one of auto, native, cpu, "),
        (["bench", "--device", "nowhere"], "device 'nowhere' is not usable: "),
        ([], "required: command"),
    ],
)
def test_wrong_command_line_is_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert sentence in printed.err and printed.err.count("\n") == 1


def test_python_dash_m_and_a_closed_pipe() -> None:
    assert _run("--version").stdout.startswith("muspace ")
    done = subprocess.run(
        f"{sys.executable} -m mu_space ops --json | head -c 1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[" and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------------------------- ops
def test_ops_json_is_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    for family in families.installed():
        for spec in families.specs(family):
            entry = entries[spec.name]
            assert {name: value["kind"] for name, value in entry["backends"].items()} == {
                name: spec.backends[name].kind for name in entry["backends"]
            }
            assert entry["wheel"] == spec.wheel and entry["determinism"] == spec.determinism
            assert entry["dtypes"] == {name: list(dtypes) for name, dtypes in spec.dtypes.items()}


def test_ops_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("multi_scale_deformable_attn", "musa", "stub-compiled", "muspace-msda"))


def test_ops_of_a_missing_wheel_is_absent_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(families, "installed", dict)
    assert main(["ops", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert {value["kind"] for value in entry["backends"].values()} == {"absent"}
    assert entry["wheel_version"] is None and main(["ops"]) == 0
    assert "not installed" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------------- env
@pytest.fixture(scope="module")
def report() -> dict:
    done = _run("env", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_env_json_answers_every_question(report: dict) -> None:
    assert set(report) == {
        "muspace", "python", "packages", "torch", "tvm_ffi", "cuda", "hip", "tools", "libraries", "environment",
        "compatibility", "problems",
    }  # fmt: skip
    assert report["torch"]["importable"] and report["tvm_ffi"]["importable"]
    libraries = {(entry["family"], entry["backend"]): entry for entry in report["libraries"]}
    assert {backend for _, backend in libraries} == {"cpu", "cuda", "hip", "musa", "emu"}
    for entry in libraries.values():
        assert (entry["abi_info"] is not None) == entry["loadable"] == (entry["reason"] is None)
        if entry["loadable"]:
            assert f"backend={entry['backend']}" in entry["abi_info"] and Path(entry["path"]).is_file()


def test_env_table_and_unset_library(tmp_path: Path) -> None:
    done = _run("env", MUSPACE_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0 and "libmsda_cpu.so" in done.stdout and "MUSPACE_LIBRARY_PATH" in done.stdout
    assert "mu-space env: libmsda_cpu.so is needed (always used): libmsda_cpu.so is not in" in done.stderr


def test_env_strict_fails_with_the_reasons_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "libmsda_cuda.so").write_text("not an ELF file")
    done = _run("env", "--strict", "--json", MUSPACE_LIBRARY_PATH=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 1 and "libmsda_cpu.so is needed" in done.stderr
    assert any("libmsda_cpu.so" in problem for problem in report["problems"])
    entry = next(e for e in report["libraries"] if (e["family"], e["backend"]) == ("msda", "cuda"))
    assert not entry["loadable"] and entry["reason"].startswith("libmsda_cuda.so could not be opened: ")


def test_env_profile_is_judged_only_when_asked_for(report: dict) -> None:
    verdict = report["compatibility"]["verdict"]
    if verdict is None:
        pytest.skip("this machine is a supported MUSA stack")
    assert verdict not in report["problems"]
    assert verdict in env.problems(report, judge_profile=True)


@pytest.mark.parametrize("how", ["raise RuntimeError('broken build')", "import os; os.abort()"])
def test_env_survives_a_broken_torch(tmp_path: Path, how: str) -> None:
    (tmp_path / "torch.py").write_text(how)
    done = _run("env", "--json", PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"]["importable"] is False
    assert any(problem.startswith("torch cannot be imported: ") for problem in found["problems"])


def test_env_problems_name_the_library_of_a_visible_device(report: dict) -> None:
    seen = json.loads(json.dumps(report))
    seen["torch"]["cuda_devices"] = {"count": 1, "names": ["NVIDIA H200"], "reason": None}
    for entry in seen["libraries"]:
        if entry["backend"] == "cuda":
            entry.update(loadable=False, reason="not there")
    assert "libmsda_cuda.so is needed (torch sees NVIDIA H200): not there" in env.problems(seen, judge_profile=False)
    seen["tvm_ffi"]["version"] = "0.2.0"
    assert "apache-tvm-ffi 0.2.0 is outside >=0.1.9,<0.2" in env.problems(seen, judge_profile=False)


def test_a_probe_that_fails_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_child", lambda name: {"error": f"{name} is broken"})
    monkeypatch.setattr(env, "_nvidia_driver", lambda: 1 / 0)
    report = env.collect(None)
    assert report["torch"]["error"] == "torch is broken" and report["tvm_ffi"]["error"] == "libraries is broken"
    assert report["cuda"] == {"error": "ZeroDivisionError: division by zero"}
    assert len(report["problems"]) == 2


# ------------------------------------------------------------------------------------------------------------------- bench
def test_bench_rows_of_the_reference_pass_their_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    file = tmp_path / "result.json"
    options = ["--case", "tsa_2000", "--dtype", "fp32", "--backend", "reference", "--quick", "--device", "cpu"]
    assert main(["bench", *options, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["pass"], row["correct"], row["backend"]) for row in rows] == [
        ("fwd", True, "reference"),
        ("bwd", True, "reference"),
    ]
    assert "tsa_2000" in printed and "baseline" in printed


def test_bench_without_the_library_is_a_row_with_the_reason_and_no_speed(tmp_path: Path) -> None:
    options = ["--case", "tsa_2000", "--dtype", "fp32", "--pass", "fwd", "--quick", "--device", "cpu"]
    done = _run("bench", *options, "--json", "-", MUSPACE_LIBRARY_PATH=str(tmp_path))
    (row,) = json.loads(done.stdout)["rows"]
    assert done.returncode == 1 and row["wall_us"] is None and "libmsda_cpu.so is not in" in row["error"]
    done = _run("bench", "--overhead", "--device", "cpu", MUSPACE_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "libmsda_cpu.so is not in" in done.stderr


def test_bench_overhead_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--overhead", "--quick", "--device", "cpu", "--backend", "reference", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == [] and {row["operator"] for row in document["overhead"]} >= {"multi_scale_deformable_attn"}


def test_bench_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "sca_base" in capsys.readouterr().out


def test_bench_without_a_fitting_case_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--pass", "ordered", "--device", "cpu"]) == 2
    assert "no case fits --device cpu" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------- text
def test_plain_table_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    text.table("title", ("a", "long"), [("first", "1"), ("b", "2")])
    assert capsys.readouterr().out == "title\na      long\n-----  ----\nfirst  1\nb      2\n"
