# SPDX-License-Identifier: Apache-2.0
"""Contract: dispatch and its report, missing libraries, bad input, and the public docstring."""

from __future__ import annotations

import doctest
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


class DispatchContract(Subject):
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
