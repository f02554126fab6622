# SPDX-License-Identifier: Apache-2.0
"""Contract, third part: dispatch and its report, missing libraries, bad input, determinism, threads, processes, streams."""

from __future__ import annotations

import doctest
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from muspace_core import BackendUnavailable, get_last_dispatch_report
from muspace_core.device import BACKENDS
from muspace_core.dispatch import REQUESTS
from muspace_core.loader import NativeLibrary
from muspace_core.testing.cases import Arguments, ErrorCase, Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.process import in_child, in_threads

REPORT_KEYS = (
    "operator", "device", "dtype", "requested_backend", "selected_backend", "native_fallback", "route", "reason", "library",
    "versions",
)  # fmt: skip

#: Run in a fresh interpreter: what a process without the library does, and how often it says so.
_CHILD = """
import importlib, json, sys, warnings
import torch
package, name, path, requests, count = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(","), int(sys.argv[5])
arguments, named = torch.load(path)
operator = getattr(importlib.import_module(package), name)
from muspace_core import get_last_dispatch_report
found = []
for request in requests:
    keywords = {} if request == "default" else {"backend": request}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = {"request": request, "error": None, "report": None}
        try:
            for _ in range(count):
                total = operator(*arguments, **named, **keywords).double().sum().item()
            row["report"] = get_last_dispatch_report().as_dict()
            row["total"] = total
        except Exception as error:
            row["error"], row["type"] = str(error), [c.__name__ for c in type(error).__mro__]
    row["warnings"] = [[w.category.__name__, str(w.message), w.filename] for w in caught]
    found.append(row)
print(json.dumps(found))
"""

#: Run in a fresh interpreter: what a call under inference_mode leaves behind is met by the training that follows it.
_INFERENCE_FIRST = """
import importlib, sys
import torch
with_torch = set(sys.modules)
package, name, path, device, backend = sys.argv[1:]
operator = getattr(importlib.import_module(package), name)
keywords = {"backend": backend} if backend == "reference" else {}
forms, floating, by_keyword = torch.load(path)
for form, arguments in forms.items():
    arguments = {k: a.to(device) if isinstance(a, torch.Tensor) else a for k, a in arguments.items()}
    positional = [k for k in arguments if k not in by_keyword]
    named = {k: arguments[k] for k in by_keyword}
    with torch.inference_mode():
        wanted = operator(*[arguments[k] for k in positional], **named, **keywords).clone()
    leaves = [arguments[k].requires_grad_() for k in floating]
    output = operator(*[arguments[k] for k in positional], **named, **keywords)
    output.sum().backward()
    assert torch.equal(output.detach(), wanted.to(device)), form
    assert all(leaf.grad is not None for leaf in leaves), form
slow = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules) - with_torch
assert not slow, f"{slow}: seconds of import for who does not compile"
print("done")
"""


class RuntimeContract(Subject):
    """Inherited through ``OpContract``."""

    # ---- dispatch and report ---------------------------------------------------------------------------------------
    def test_report(self, dtype: str, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), dtype, device)
        self.call(tensors, backend)
        report = get_last_dispatch_report()
        assert report is not None
        data = report.as_dict()
        assert tuple(data) == REPORT_KEYS
        assert data["operator"] == self.spec.name
        assert data["device"] == device and data["dtype"] == dtype
        assert data["selected_backend"] == backend and data["native_fallback"] is False
        assert data["requested_backend"] == ("reference" if backend == "reference" else "auto")
        assert isinstance(data["reason"], str) and data["reason"]
        assert data["versions"]["torch"] == str(torch.__version__)
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in data["versions"].items())
        if backend != "reference":
            assert data["route"] in self.spec.forward_routes
            assert Path(data["library"]).name == f"lib{self.spec.family}_{backend}.so" and Path(data["library"]).is_file()
        json.dumps(data)

    def test_report_names_both_routes_when_a_gradient_is_recorded(self, backend: str, device: str) -> None:
        if backend == "reference":
            pytest.skip("the reference has no routes")
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        output = self.call(tensors, backend)
        report = get_last_dispatch_report()
        assert report is not None
        forward, _, backward = report.route.partition("+")
        assert forward in self.spec.forward_routes and backward in self.spec.backward_routes, report.route
        output.sum().backward()
        assert get_last_dispatch_report() == report, "backward records nothing"
        with torch.no_grad():
            self.call(tensors, backend)
        report = get_last_dispatch_report()
        assert report is not None and report.route in self.spec.forward_routes

    def test_the_report_describes_the_call(
        self, backend: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What holds when the report is read has no part in it, and reading never raises."""
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        self.call(tensors, backend)
        wanted = get_last_dispatch_report()
        self.call(tensors, backend)  # not read before the changes
        for name, text in (
            ("MUSPACE_LIBRARY_PATH", str(tmp_path)), ("MUSPACE_FORCE_BACKEND", "tpu"), ("MUSPACE_STRICT_PATCH", "1"),
        ):  # fmt: skip
            monkeypatch.setenv(name, text)
        torch.use_deterministic_algorithms(True)
        assert get_last_dispatch_report() == wanted

    def test_fake_tensors_are_reported_like_meta(self, backend: str, device: str) -> None:
        """Shapes only: nothing ran natively."""
        if backend == "reference":
            pytest.skip("the registered operator is native")
        from torch._subclasses.fake_tensor import FakeTensorMode

        tensors = self.tensors(self.smallest(), "float32", device)
        self.call({k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}, backend)
        meta = get_last_dispatch_report()
        with FakeTensorMode() as mode:
            self.call({k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}, backend)
        fake = get_last_dispatch_report()
        assert meta is not None and fake is not None
        for report, place in ((meta, "meta"), (fake, device)):
            assert (report.selected_backend, report.reason, report.library) == ("meta", "shapes only", None), report
            assert report.native_fallback is False and report.device == place and report.dtype == "float32"
        assert fake.route == meta.route and fake.route not in (*self.spec.forward_routes, *self.spec.backward_routes)

    # ---- why_not ---------------------------------------------------------------------------------------------------
    def _first_and_the_rest(self, tensors: Arguments) -> list[torch.Tensor]:
        """Every tensor of the call, the one that decides first."""
        rest = [v for k, v in tensors.items() if isinstance(v, torch.Tensor) and k != self.storage[0]]
        return [tensors[self.storage[0]], *rest]

    @pytest.mark.parametrize("place", ["device", "meta"])
    @pytest.mark.parametrize("forced", [None, "reference", "cpu", "emu", "musa"])
    def test_why_not_agrees_with_dispatch(
        self, forced: str | None, place: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("MUSPACE_FORCE_BACKEND", raising=False)
        if forced:
            monkeypatch.setenv("MUSPACE_FORCE_BACKEND", forced)
        why_not = importlib.import_module(self.spec.package).why_not
        tensors = self.tensors(self.smallest(), "float32", device if place == "device" else "meta")
        for request in REQUESTS:
            sentence = why_not(request, *self._first_and_the_rest(tensors))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a fallback warns; the report says it too
                    self.invoke(tensors, backend=request)
            except BackendUnavailable as error:
                assert sentence and sentence in str(error), (request, sentence, error)
            else:
                report = get_last_dispatch_report()
                assert report is not None
                assert sentence is None or (report.native_fallback and sentence == report.reason), (request, sentence)

    def test_why_not_without_tensors_asks_the_library(self) -> None:
        why_not = importlib.import_module(self.spec.package).why_not
        library = NativeLibrary(self.spec.package, self.spec.family)
        for name in BACKENDS:
            assert why_not(name) == library.failure(name), name
        assert (why_not("reference") is None) == self.spec.reference

    def test_a_forced_backend_that_does_not_exist(self, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.invoke(tensors, backend=backend)
        monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "tpu")
        with pytest.raises(ValueError, match=r"^MUSPACE_FORCE_BACKEND: expected one of .*cpu.*tpu"):
            self.invoke(tensors)
        assert_bits_equal(self.invoke(tensors, backend=backend), wanted, "a named backend is not forced")

    # ---- libraries -------------------------------------------------------------------------------------------------
    def test_a_library_under_another_name_is_refused(
        self, backend: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file name is a claim; what the library says of itself decides."""
        path = NativeLibrary(self.spec.package, self.spec.family).path(backend)
        if path is None:
            pytest.skip("needs a native backend")
        other = "cpu" if backend != "cpu" else "emu"
        shutil.copy(path, tmp_path / f"lib{self.spec.family}_{other}.so")
        shutil.copy(path, tmp_path / f"libstranger_{backend}.so")
        monkeypatch.setenv("MUSPACE_LIBRARY_PATH", str(tmp_path))
        text = NativeLibrary(self.spec.package, self.spec.family).failure(other)
        assert text and f"lib{self.spec.family}_{other}.so" in text and backend in text, text
        text = NativeLibrary(self.spec.package, "stranger").failure(backend)
        assert text and f"libstranger_{backend}.so" in text and self.spec.family in text, text
        with pytest.raises(BackendUnavailable, match=rf"lib{self.spec.family}_{other}\.so"):
            self.invoke(self.tensors(self.smallest(), "float32"), backend=other)

    def test_backend_forms(self, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if backend == "reference":
            pytest.skip("forms of a native backend")
        monkeypatch.delenv("MUSPACE_FORCE_BACKEND", raising=False)
        tensors = self.tensors(self.smallest(), "float32", device)
        named = self.invoke(tensors, backend=backend)
        forms = ["auto", "native"] if backend != "emu" else []
        for form in forms:
            assert_bits_equal(self.invoke(tensors, backend=form), named, form)
            report = get_last_dispatch_report()
            assert report is not None
            assert (report.requested_backend, report.selected_backend) == (form, backend)
        if self.spec.reference:
            tolerance = self.spec.tolerances["float32"].output
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # asked for, so nothing to warn about
                assert_close(self.invoke(tensors, backend="reference"), named, tolerance, "reference")
            report = get_last_dispatch_report()
            assert report is not None and report.selected_backend == "reference" and report.native_fallback is False

    def test_unknown_backend(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        with pytest.raises(ValueError, match=r"backend: expected one of .*auto.*; got 'tpu'"):
            self.invoke(tensors, backend="tpu")

    def test_backend_of_another_device(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        other = "musa" if backend != "musa" else "cpu"
        with pytest.raises(BackendUnavailable, match=rf"backend {other} needs tensors on .*") as caught:
            self.invoke(tensors, backend=other)
        why_not = importlib.import_module(self.spec.package).why_not
        sentence = why_not(other, tensors[self.storage[0]])
        assert sentence and sentence in str(caught.value)
        assert why_not(backend, tensors[self.storage[0]]) is None
        assert issubclass(BackendUnavailable, RuntimeError)

    def test_dispatch_log(self, backend: str, device: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        self.call(tensors, backend)
        assert capfd.readouterr().err == ""
        monkeypatch.setenv("MUSPACE_DISPATCH_LOG", "1")
        self.call(tensors, backend)
        lines = [line for line in capfd.readouterr().err.splitlines() if line]
        assert len(lines) == 1 and self.spec.name in lines[0] and backend in lines[0], lines
        monkeypatch.setenv("MUSPACE_DISPATCH_LOG", "0")
        self.call(tensors, backend)
        assert capfd.readouterr().err == ""

    def test_strict_mode_changes_nothing_where_the_native_backend_runs(
        self, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if backend == "reference":
            pytest.skip("needs a native backend")
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        monkeypatch.setenv("MUSPACE_STRICT_PATCH", "1")
        assert_bits_equal(self.call(tensors, backend), wanted, "strict")

    def _child(self, folder: Path, backend: str, requests: str, count: int, **environment: str) -> list[dict[str, Any]]:
        tensors = self.tensors(self.smallest(), "float32")
        positional = [v for k, v in tensors.items() if k not in self.by_keyword]
        torch.save((positional, {k: tensors[k] for k in self.by_keyword}), folder / "arguments.pt")
        empty = folder / "no libraries here"
        empty.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MUSPACE_")}
        command = [
            sys.executable,
            "-c",
            _CHILD,
            self.spec.package,
            self.spec.name,
            str(folder / "arguments.pt"),
            requests,
            str(count),
        ]
        done = subprocess.run(
            command,
            env=kept | {"MUSPACE_LIBRARY_PATH": str(empty)} | environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]))

    @pytest.mark.backends("cpu")
    def test_missing_library(self, tmp_path: Path, backend: str) -> None:
        rows = self._child(tmp_path, backend, "default,auto,cpu,native,reference", 3)
        default, auto, cpu, native, reference = rows
        for row in (cpu, native):
            assert row["type"][0] == "BackendUnavailable" and "RuntimeError" in row["type"]
            assert f"lib{self.spec.family}_cpu.so" in row["error"] and "MUSPACE_LIBRARY_PATH" in row["error"], row["error"]
            assert "\n" not in row["error"], "one sentence"
        assert reference["error"] is None and reference["warnings"] == []
        if not self.spec.reference:
            assert default["type"][0] == auto["type"][0] == "BackendUnavailable"
            return
        for row in (default, auto):
            assert row["error"] is None
            assert row["report"]["selected_backend"] == "reference" and row["report"]["native_fallback"] is True
            assert f"lib{self.spec.family}_cpu.so" in row["report"]["reason"]
            assert row["report"]["library"] is None
        said = [w for row in rows for w in row["warnings"]]
        assert len(said) == 1, f"one warning per operator and device, got {said}"
        assert self.spec.name in said[0][1] and "cpu" in said[0][1]
        assert said[0][2] == "<string>", f"the warning points at the caller, not at {said[0][2]}"
        wanted = float(self.call(self.tensors(self.smallest(), "float32")).double().sum())
        assert abs(default["total"] - wanted) <= 1e-4 * max(1.0, abs(wanted))

    @pytest.mark.backends("cpu")
    def test_missing_library_under_strict_mode(self, tmp_path: Path, backend: str) -> None:
        default, reference = self._child(tmp_path, backend, "default,reference", 1, MUSPACE_STRICT_PATCH="1")
        assert default["type"][0] == "BackendUnavailable"
        assert "MUSPACE_STRICT_PATCH" in default["error"] and f"lib{self.spec.family}_cpu.so" in default["error"]
        assert reference["error"] is None, "asking for the reference is not a fallback"

    # ---- bad input -------------------------------------------------------------------------------------------------
    def test_bad_input(self, error_case: ErrorCase, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        error_case.change(tensors)
        error_case.check(lambda: self.call(tensors, backend, **error_case.keywords), device)

    def test_a_refused_call_leaves_the_last_report(self, backend: str, device: str) -> None:
        self.call(self.tensors(self.smallest(), "float32", device), backend)
        before = get_last_dispatch_report()
        for case in self.error_cases:
            tensors = self.tensors(self.smallest(), "float32", device)
            case.change(tensors)
            with pytest.raises(case.exception):
                self.call(tensors, backend, **case.keywords)
            assert get_last_dispatch_report() == before, case.name

    # ---- determinism -----------------------------------------------------------------------------------------------
    def test_forward_repeats_its_bits(self, case: Any, dtype: str, backend: str, device: str) -> None:
        tensors = self.tensors(case.build(), dtype, device)
        first = self.call(tensors, backend, **case.keywords)
        assert_bits_equal(self.call(tensors, backend, **case.keywords), first, "second run")

    @pytest.mark.warp_sensitive
    @pytest.mark.emu_budget(2_000_000)  # an ordered route sorts, and a sort has a size below which it does not shrink
    def test_backward_repeats_its_bits_under_deterministic_algorithms(self, dtype: str, backend: str, device: str) -> None:
        tensors = self.tensors(self.cases[0 if backend == "emu" else -1].build(), dtype, device)
        torch.use_deterministic_algorithms(True)
        _, first, _ = self.run(tensors, backend)
        report = get_last_dispatch_report()
        _, second, _ = self.run(tensors, backend)
        torch.use_deterministic_algorithms(False)
        for name in self.floating:
            assert_bits_equal(second[name], first[name], f"gradient of {name}")
        if self.ordered_route and backend not in ("reference", "cpu"):
            assert report is not None and report.route.partition("+")[2] == self.ordered_route, report

    @pytest.mark.backends("emu")
    @pytest.mark.warp_sensitive
    def test_the_order_of_blocks_and_lanes_does_not_matter(self, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Random schedules of the emulation: same bits where they are promised, same sums where atomics end them.

        Sequential lanes hide a missing barrier; a random order shows it as another result.
        """
        tensors = self.tensors(case.build(), "float32")
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            results = []
            for seed in ("0", "1", "2"):
                monkeypatch.setenv("MUSPACE_EMU_SEED", seed)
                results.append(self.run(tensors, "emu", **case.keywords))
            torch.use_deterministic_algorithms(False)
            for output, gradients, _ in results[1:]:
                assert_bits_equal(output, results[0][0], "output")
                for name in gradients:
                    if deterministic or self.repeats_its_bits(name, "emu"):
                        assert_bits_equal(gradients[name], results[0][1][name], f"gradient of {name}")
                    else:
                        assert_close(gradients[name], results[0][1][name], 1e-5, f"gradient of {name}")

    @pytest.mark.backends("emu")
    def test_the_emulation_budget_is_enforced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MUSPACE_EMU_BUDGET", "10")
        with pytest.raises(RuntimeError, match="MUSPACE_EMU_BUDGET=10"):
            self.call(self.tensors(self.smallest(), "float32"))

    @pytest.mark.backends("emu")
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_a_launch_that_stops_is_never_silent(self, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every launch of a call is checked: with less and less budget the call raises or is whole, never a part of itself."""
        tensors = self.tensors(self.smallest(), "float32")
        torch.use_deterministic_algorithms(deterministic)
        monkeypatch.setenv("MUSPACE_EMU_BUDGET", "0")
        output, gradients, _ = self.run(tensors, "emu")
        refused = 0
        for budget in (30, 100, 300, 1000, 2000, 4000, 8000, 16000, 32000, 64000):
            monkeypatch.setenv("MUSPACE_EMU_BUDGET", str(budget))
            try:
                found, found_gradients, _ = self.run(tensors, "emu")
            except RuntimeError as error:
                assert "MUSPACE_EMU_BUDGET" in str(error)
                refused += 1
                continue
            assert_bits_equal(found, output, f"output with a budget of {budget}")
            for name, gradient in gradients.items():
                assert_close(found_gradients[name], gradient, 1e-5, f"gradient of {name} with a budget of {budget}")
        assert refused

    @pytest.mark.backends("cpu")
    def test_cpu_backward_repeats_its_bits_for_every_thread_count(self, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = self.tensors(self.cases[-1].build(), dtype)
        results = []
        for threads in ("1", "2", "3", "7"):
            monkeypatch.setenv("MUSPACE_NUM_THREADS", threads)
            results.append(self.run(tensors))
        for output, gradients, _ in results[1:]:
            assert_bits_equal(output, results[0][0], "output")
            for name in self.floating:
                assert_bits_equal(gradients[name], results[0][1][name], f"gradient of {name}")

    @pytest.mark.backends("cpu")
    @pytest.mark.parametrize("text", ["0", "-2", "many", "1.5", "²", "٣"])
    def test_bad_thread_count(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MUSPACE_NUM_THREADS", text)
        with pytest.raises(ValueError, match=f"MUSPACE_NUM_THREADS: expected a positive integer, got '{text}'"):
            self.call(self.tensors(self.smallest(), "float32"))

    @pytest.mark.backends("cpu")
    @pytest.mark.parametrize("text", ["100000", "9" * 30])
    def test_more_threads_than_there_are(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = self.tensors(self.cases[-1].build(), "float32")
        wanted = self.call(tensors)
        monkeypatch.setenv("MUSPACE_NUM_THREADS", text)
        assert_bits_equal(self.call(tensors), wanted, f"with {text} threads")

    # ---- threads and processes -------------------------------------------------------------------------------------
    def test_two_threads_at_once(self, backend: str, device: str) -> None:
        rounds = 2 if backend == "emu" else 25
        inputs = []
        for scale in (1.0, -0.5):
            tensors = self.tensors(self.smallest(), "float32", device)
            tensors[self.storage[0]] = tensors[self.storage[0]] * scale
            inputs.append((tensors, self.run(tensors, backend)))

        def work(tensors: Any, wanted: Any) -> None:
            for _ in range(rounds):
                output, gradients, _ = self.run(tensors, backend)
                assert_bits_equal(output, wanted[0], "output")
                for name in self.floating:
                    assert_close(gradients[name], wanted[1][name], 1e-5, f"gradient of {name}")

        in_threads([functools.partial(work, *pair) for pair in inputs])

    @pytest.mark.backends("cpu", "emu")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_use_after_fork(self, backend: str) -> None:
        """The pool's threads do not survive a fork; a child must notice, not wait for them."""
        tensors = self.tensors(self.smallest(), "float32")
        output, gradients, _ = self.run(tensors, backend)
        wanted = b"".join(t.contiguous().numpy().tobytes() for t in (output, *gradients.values()))
        for _ in range(2):
            assert in_child(lambda: self._bytes(tensors, backend)) == wanted
        # And the parent still works, with its own pool.
        assert self._bytes(tensors, backend) == wanted

    def _bytes(self, tensors: Any, backend: str) -> bytes:
        output, gradients, _ = self.run(tensors, backend)
        return b"".join(t.contiguous().numpy().tobytes() for t in (output, *gradients.values()))

    @pytest.mark.backends("cpu")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_in_data_loader_workers(self) -> None:
        """Workers are forked after the pool has started, and set torch to one thread."""
        tensors = self.tensors(self.smallest(), "float32")
        wanted = self.call(tensors)
        loader = torch.utils.data.DataLoader(_Calls(self, tensors), batch_size=None, num_workers=2, timeout=60)
        for found in loader:
            assert_bits_equal(found, wanted, "from a worker")

    def test_training_after_inference(self, backend: str, device: str, tmp_path: Path) -> None:
        """Nothing that a call keeps for the next one may be an inference tensor; every form of the call, in a new process.

        There it also shows that no compiler is imported for a call that is not compiled.
        """
        tensors = self.tensors(self.smallest(), "float32")
        forms = {"tensors": tensors} | {name: change(dict(tensors)) for name, change in self.forms.items()}
        torch.save((forms, self.floating, self.by_keyword), tmp_path / "forms.pt")
        given = (self.spec.package, self.spec.name, str(tmp_path / "forms.pt"), device, backend)
        done = subprocess.run(
            [sys.executable, "-c", _INFERENCE_FIRST, *given], check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr

    def test_forms_of_the_call_agree(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        for name, change in self.forms.items():
            assert_bits_equal(self.call(change(dict(tensors)), backend), wanted, name)

    # ---- streams ---------------------------------------------------------------------------------------------------
    @pytest.mark.backends("cuda", "hip", "musa")
    def test_side_stream(self, backend: str, device: str) -> None:
        """The work is queued behind what the caller's current stream already holds."""
        module = getattr(torch, device.partition(":")[0])
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        name = self.storage[0]
        late = torch.zeros_like(tensors[name])
        module.synchronize()
        stream = module.Stream()
        with module.stream(stream):
            module._sleep(50_000_000)
            late.copy_(tensors[name])
            output = self.call(tensors | {name: late}, backend)
        stream.synchronize()
        assert_bits_equal(output, wanted, "on a side stream")

    @pytest.mark.backends("cuda", "hip")
    def test_graph_capture(self, backend: str, device: str) -> None:
        """Forward and backward contain no host synchronise."""
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        grad_output = self.upstream_gradient(self.call(tensors, backend))
        leaves = [tensors[n] for n in self.floating]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                wanted = self.call(tensors, backend)
                wanted_gradients = torch.autograd.grad(wanted, leaves, grad_output)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.call(tensors, backend)
            gradients = torch.autograd.grad(output, leaves, grad_output)
        graph.replay()
        torch.cuda.synchronize()
        assert_bits_equal(output, wanted, "replayed")
        for name, found, other in zip(self.floating, gradients, wanted_gradients, strict=True):
            assert_close(found, other, 1e-5, f"gradient of {name}")

    @pytest.mark.backends("cuda", "hip")
    def test_no_host_synchronise(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        self.call(tensors, backend).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.call(tensors, backend).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # ---- documentation ---------------------------------------------------------------------------------------------
    @pytest.mark.backends("cpu")
    def test_docstring(self) -> None:
        """The example runs, and determinism and errors are documented."""
        operator = type(self).operator
        text = operator.__doc__ or ""
        assert "Determinism" in text and "Raises" in text and "Returns" in text and ">>>" in text
        for name in self.smallest():
            assert name in text, f"{name} is not documented"
        namespace = dict(vars(importlib.import_module(operator.__module__)))
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        for test in doctest.DocTestFinder(recurse=False).find(operator, self.spec.name, globs=namespace):
            runner.run(test)
        assert runner.tries > 0 and runner.failures == 0


class _Calls(torch.utils.data.Dataset):
    """Four times the same operator call, made wherever the items are fetched."""

    def __init__(self, contract: RuntimeContract, tensors: Any) -> None:
        self.contract, self.tensors = contract, tensors

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.contract.call(self.tensors)
