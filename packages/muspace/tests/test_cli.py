# SPDX-License-Identifier: Apache-2.0
"""The ``mu-space`` command: starts without anything heavy, answers in JSON, and says in one sentence what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mu_space import families
from mu_space.cli import bench, env, probe, text
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
        (["bench", "--case", "x"], "unknown case 'x', expected one of "),
        (["bench", "--only", "x"], "unknown operator 'x', expected one of "),
        (["bench", "--dtype", "int8"], "unknown dtype 'int8', expected one of fp32, bf16, fp16, fp64, "),
        (["bench", "--pass", "x"], "unknown pass 'x', expected one of fwd, bwd, ordered, "),
        (["bench", "--backend", "x"], "unknown backend 'x', expected one of auto, native, cpu, "),
        (["bench", "--device", "nowhere"], "device 'nowhere' is not usable: "),
        (["bench", "--device", "meta"], "device 'meta' cannot be measured, expected one of type cpu, cuda, musa"),
        (["bench", "--json", "/nonexistent/x.json"], "--json: /nonexistent is not a folder (see "),
        (["bench", "--plot", "/nonexistent/x.png"], "--plot: /nonexistent is not a folder (see "),
        (["bench", "--json", "/"], "--json: expected a file, / is a folder (see "),
        (["bench", "--json", f"/tmp/{'x' * 300}"], ": File name too long (see "),
        (["bench", "--json", "/dev/null/x.json"], "--json: /dev/null is not a folder (see "),
        (["--"], "required: command"),
    ],
)
def test_wrong_command_line_is_one_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *a: pytest.fail("measured for nothing"))
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert sentence in printed.err and printed.err.count("\n") == 1


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("usage: mu-space ") and all(name in printed.err for name in COMMANDS)


def test_python_dash_m_and_a_closed_pipe() -> None:
    assert _run("--version").stdout.startswith("muspace ")
    done = subprocess.run(
        f"{sys.executable} -m mu_space ops --json | head -c 1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[" and "Traceback" not in done.stderr


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which ``$MU`` is the command; ``pipefail`` lets the status of a pipe's first member through."""
    start = {"MU": f"{sys.executable} -m mu_space", **environment}
    command = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **start})


PRINTING = ("ops", "ops --json", "env", "bench --list", "--help", "ops --help", "--version")
BUFFERING = pytest.mark.parametrize(
    "buffering", [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "direct"]
)


@BUFFERING
@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_leaves_is_no_error(command: str, buffering: dict[str, str]) -> None:
    done = _shell(f"$MU {command} | true", **buffering)  # nobody reads: whatever is written is written in vain
    assert (done.returncode, done.stderr.replace("mu-space env: ", "")) == (0, ""), done.stderr


@BUFFERING
@pytest.mark.parametrize("command", [command for command in PRINTING if command != "env"])  # env's own complaints come between
def test_output_that_cannot_be_written_is_one_sentence(command: str, buffering: dict[str, str]) -> None:
    done = _shell(f"$MU {command} >/dev/full", **buffering)
    name = " ".join(["mu-space", *(word for word in command.split()[:1] if word in COMMANDS)])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"{name}: the standard output could not be written: No space left on device\n"


@pytest.mark.parametrize("command", [*PRINTING, "demo", "nonsense"])
def test_closed_streams(command: str, tmp_path: Path) -> None:
    done = _shell(f"cd {tmp_path} && $MU {command} >&-")
    assert (done.returncode, done.stderr) == (1, "mu-space: the standard output is closed\n")
    assert list(tmp_path.iterdir()) == []


def test_closed_stderr_is_a_silent_one(tmp_path: Path) -> None:
    done = _shell("$MU env --json 2>&-", MUSPACE_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0 and json.loads(done.stdout)["problems"]
    assert _shell("$MU nonsense 2>&-").returncode == 2


def test_a_terminal_of_another_encoding_shows_escapes() -> None:
    done = _run("ops", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and "multi_scale_deformable_attn" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------------------- without torch
def _without(package: str, folder: Path) -> dict[str, str]:
    """Environment of a child in which a package is not there, neither to import nor to find."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {package!r}:\n"
        f"            raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    return _without("torch", tmp_path)


def test_ops_needs_no_torch(no_torch: dict[str, str]) -> None:
    done = _run("ops", "--json", **no_torch)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == _run("ops", "--json").stdout
    assert (
        "torch" not in _run(code="import sys; from mu_space import families as f; f.specs('msda'); print(*sys.modules)").stdout
    )


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "--list"]])
def test_bench_without_torch_is_one_sentence(arguments: list[str], no_torch: dict[str, str]) -> None:
    done = _run(*arguments, **no_torch)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("mu-space bench: measuring needs torch, which is not") and done.stderr.count("\n") == 1


def test_bench_without_numpy_names_the_extra(tmp_path: Path) -> None:
    done = _run("bench", "--list", PYTHONWARNINGS="ignore", **_without("numpy", tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    sentence = "mu-space bench: measuring needs numpy, which is not installed: pip install 'muspace[bench]'\n"
    assert done.stderr == sentence


@pytest.mark.parametrize(
    "statement",
    [
        "mu_space.multi_scale_deformable_attn",
        "mu_space.ops.MultiScaleDeformableAttention",
        "mu_space.get_last_dispatch_report",
        "exec('from mu_space import *')",
    ],
)
def test_operators_without_torch_are_an_import_error_of_one_sentence(statement: str, no_torch: dict[str, str]) -> None:
    code = f"import mu_space\ntry: {statement}\nexcept ImportError as e: print(type(e).__name__, e, e.__suppress_context__)"
    done = _run(code=code, **no_torch)
    assert done.stdout.startswith("ImportError ") and done.stdout.endswith(" True\n"), done.stderr
    assert " needs torch, which is not installed: install the build of your accelerator's vendor" in done.stdout


def test_env_without_torch_blames_torch_alone(no_torch: dict[str, str]) -> None:
    report = json.loads(_run("env", "--json", **no_torch).stdout)
    assert report["tvm_ffi"]["importable"] and report["problems"][0].startswith("torch cannot be imported: ")
    assert not any("tvm-ffi" in problem for problem in report["problems"])
    assert {entry["backend"] for entry in report["libraries"]} == set(probe.BACKENDS)


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
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == [n for _, known in sorted(families.KNOWN.items()) for n in known.operators]
    for entry in entries:
        assert {value["kind"] for value in entry["backends"].values()} == {"absent"} and entry["wheel_version"] is None
    assert main(["ops"]) == 0
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


#: Code that runs when the library is opened, the seconds it is given, and what the report then says of it. The libraries beside
#: it have the same seconds, which must do on a busy machine.
KILLERS = {
    "signal": ("abort();", 60, "libmsda_cuda.so ended the process that opened it (SIGABRT)"),
    "exit": ("_exit(7);", 60, "libmsda_cuda.so ended the process that opened it (status 7)"),
    "hang": ("for (;;) pause();", 8, "libmsda_cuda.so was not open within 8 s"),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("how", KILLERS)
def test_a_library_that_kills_its_process_takes_nothing_with_it(how: str, tmp_path: Path) -> None:
    body, seconds, sentence = KILLERS[how]
    source = tmp_path / "killer.c"
    source.write_text(f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) void f(void) {{ {body} }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libmsda_cuda.so", source], check=True)
    (tmp_path / "libmsda_hip.so").write_text("not an ELF file")
    setting = f"import json; from mu_space.cli import probe as p; p.LIBRARY_SECONDS = {seconds}"
    code = f"{setting}; print(json.dumps(p.library_facts()))"
    answer = json.loads(_run(code=code, MUSPACE_LIBRARY_PATH=str(tmp_path)).stdout)
    facts = {entry["backend"]: entry for entry in answer if entry["family"] == "msda"}
    assert facts["cuda"]["reason"] == sentence and not facts["cuda"]["loadable"]
    assert "is not in" in facts["cpu"]["reason"] and "could not be opened" in facts["hip"]["reason"]


def test_a_truncated_library_is_told_by_its_name(tmp_path: Path) -> None:
    """Opening half a library raises SIGBUS or an error of the loader, as its sections happen to lie."""
    whole = Path(families.package("msda").__path__[0]) / "_lib" / "libmsda_cpu.so"
    if not whole.is_file():
        pytest.skip("the cpu library is not built")
    (tmp_path / "libmsda_cpu.so").write_bytes(whole.read_bytes()[: whole.stat().st_size // 3])
    report = json.loads(_run("env", "--json", MUSPACE_LIBRARY_PATH=str(tmp_path)).stdout)
    (cpu,) = (entry for entry in report["libraries"] if (entry["family"], entry["backend"]) == ("msda", "cpu"))
    assert cpu["reason"].startswith("libmsda_cpu.so ") and report["tvm_ffi"]["importable"]
    # The folder stands in for those of every family, and has no other library.
    assert f"libmsda_cpu.so is needed (always used): {cpu['reason']}" in report["problems"]


def test_a_probe_that_fails_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_child", lambda name: {"error": f"{name} is broken"})
    monkeypatch.setattr(env, "_nvidia_driver", lambda: 1 / 0)
    report = env.collect(None)
    assert report["torch"]["error"] == "torch is broken" and report["tvm_ffi"]["error"] == "ffi is broken"
    assert {entry["reason"] for entry in report["libraries"]} == {"could not be asked: libraries is broken"}
    assert report["cuda"] == {"error": "ZeroDivisionError: division by zero"}
    needed = [problem.split(":")[0] for problem in report["problems"]]
    assert needed[:2] == ["torch cannot be imported", "apache-tvm-ffi cannot be imported"]
    assert needed[2:] == [f"lib{family}_cpu.so is needed (always used)" for family in families.installed()]


# ------------------------------------------------------------------------------------------------------------------- bench
def test_bench_rows_of_the_reference_pass_their_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    file = tmp_path / "result.json"
    options = ["--case", "tsa_2000", "--dtype", "fp32", "--backend", "reference", "--quick", "--device", "cpu"]
    assert main(["bench", *options, "--json", str(file)]) == 0
    captured = capsys.readouterr()
    printed = captured.out
    assert captured.err == f"mu-space bench: wrote {file}\n"
    assert "floors: " in printed and "peak: " not in printed  # the legend has the columns of the table alone
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
    done = _run("bench", "--overhead", "--family", "msda", "--device", "cpu", MUSPACE_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "libmsda_cpu.so is not in" in done.stderr


def test_bench_file_that_fails_after_the_check_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--case", "tsa_2000", "--dtype", "fp32", "--pass", "fwd", "--backend", "reference", "--quick", "--device", "cpu"]
    assert main(["bench", *options, "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err == "mu-space bench: /dev/full could not be written: No space left on device\n"


def test_bench_plot_that_cannot_be_drawn_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "measure", lambda *a: pytest.fail("measured for nothing"))
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "x.docx")]) == 2
    assert "--plot: path: expected a file name that ends in one of " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["bench", "--device", "cpu", "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot: drawing needs matplotlib: pip install 'muspace[bench]'" in capsys.readouterr().err


def test_bench_overhead_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--overhead", "--quick", "--device", "cpu", "--backend", "reference", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == [] and {row["operator"] for row in document["overhead"]} >= {"multi_scale_deformable_attn"}


def test_bench_list_has_dtypes_and_the_words_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "sca_base" in printed and "fwd, bwd, ordered" in printed and "bwd_ordered" not in printed
    assert "dtypes" in printed and "fp32, bf16" in printed


@pytest.fixture
def document() -> dict:
    """A result document with one row of each kind."""
    limit = {"output": 1e-6}
    row = {
        "operator": "voxel_pooling_train", "case": "b1_plan", "dtype": "float32", "pass": "bwd_ordered", "backend": "cuda",
        "route": "sort+gather", "error": None, "deviations": limit, "limits": limit, "correct": True, "goal_speedup": None,
        "goal_met": None, "peak_bytes": 1 << 20, "peer": None, "speedup": None,
    }  # fmt: skip
    times = (
        "wall_us",
        "graph_us",
        "goal_us",
        "peer_us",
        "dram_floor_us",
        "cache_floor_us",
        "over_dram_floor",
        "over_cache_floor",
    )
    measured = ("without_grad_us", "with_grad_us", "forward_backward_us", "empty_us", "add_us")
    overhead = {"operator": "voxel_pooling_train", "device": "cpu", "backend": "native", "shape": "one point, C 64, one cell"}
    overhead |= {**dict.fromkeys(measured, 1.0), "budget_us": {"without": 8.0, "with": 20.0}, "within_budget": True}
    machine = {"device": "somewhere", "device_type": "cuda", "torch": "2"}
    return {"machine": machine, "ceilings": None, "rows": [row | dict.fromkeys(times)], "overhead": [overhead]}


def test_bench_footers_explain_the_columns_that_are_there(document: dict, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    bench.show(document)
    printed = capsys.readouterr().out
    assert " ordered " in printed and "bwd ordered" not in printed
    assert "peak: " in printed and "floors: " not in printed and "baseline: " not in printed
    assert "8/20 met" in printed and "budget: most µs without/with grad" in printed


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
@pytest.mark.parametrize("columns", [60, 80, 132, 200])
def test_no_name_is_broken_in_a_terminal(
    columns: int, rich: bool, document: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numpy")
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.box", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))

    def shown() -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    operators = [spec.name for family in families.installed() for spec in families.specs(family)]
    assert main(["ops"]) == 0
    assert set(operators) <= set(shown().split())
    assert main(["bench", "--list"]) == 0
    listed = shown()
    cases = [case.name for family in bench.load_families([]) for case in family.cases]
    assert {*operators, *cases} <= set(listed.split()) and max(map(len, listed.splitlines())) <= columns
    bench.show(document)
    assert {"voxel_pooling_train", "b1_plan"} <= set(shown().split())  # the case's row and the host time's


def test_bench_says_what_it_drew(
    document: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from muspace_core.bench import plot

    monkeypatch.setattr(bench, "measure", lambda *a: document)
    monkeypatch.setattr(plot, "draw", lambda *a: None)
    file = tmp_path / "x.png"
    assert main(["bench", "--device", "cpu", "--plot", str(file)]) == 0
    assert capsys.readouterr().err == f"mu-space bench: wrote {file}\n"


def test_bench_without_a_fitting_case_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--pass", "ordered", "--device", "cpu"]) == 2
    assert "no case fits --device cpu" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------- text
def test_plain_table_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    text.table("title", ("a", "long"), [("first", "1"), ("b", "2")])
    assert capsys.readouterr().out == "title\na      long\n-----  ----\nfirst  1\nb      2\n"


def test_no_name_is_cut_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    text.table("", ("name", "text"), [("multi_scale_deformable_attn", "z" * 30)])
    printed = capsys.readouterr().out
    assert "…" not in printed and printed.count("z") == 30 and "z" * 30 not in printed


def test_plain_table_is_folded_to_the_terminal() -> None:
    rows = [("first", "a sentence that is longer than the terminal is wide"), ("", "")]
    shown = text.plain("", ("name", "text"), rows, room=30).splitlines()
    assert max(map(len, shown)) <= 30 and " ".join(line[7:] for line in shown[2:] if line) == rows[0][1]
    assert text.plain("", ("a" * 20, "b"), [], room=4).splitlines()[0] == "a" * 8 + "  b"
