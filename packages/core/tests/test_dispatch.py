# SPDX-License-Identifier: Apache-2.0
"""Dispatch decisions over a library that says what it is told to."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from muspace_core import BackendUnavailable, MuspaceError, get_last_dispatch_report
from muspace_core.device import BACKENDS, DEVICE_TYPES, backend_for, launch_context, thread_count
from muspace_core.dispatch import REQUESTS, Dispatcher
from muspace_core.spec import OpSpec, Status, Tolerance

VARIABLES = (
    "MUSPACE_FORCE_BACKEND",
    "MUSPACE_STRICT_PATCH",
    "MUSPACE_LIBRARY_PATH",
    "MUSPACE_DISPATCH_LOG",
    "MUSPACE_NUM_THREADS",
)
F32 = torch.float32


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class FakeLibrary:
    """Has the named backends; the others fail with a sentence."""

    package, family = "muspace_core", "toy"

    def __init__(self, *present: str) -> None:
        self.present = present
        self.asked = 0

    def failure(self, backend: str) -> str | None:
        self.asked += 1
        return None if backend in self.present else f"libtoy_{backend}.so is not here"

    def load(self, backend: str) -> str:
        return f"module of {backend}"

    def path(self, backend: str) -> Path | None:
        return Path(f"/somewhere/libtoy_{backend}.so") if backend in self.present else None


def _spec(reference: bool = True, name: str = "toy") -> OpSpec:
    return OpSpec(
        family="toy", name=name, summary="", schema="(Tensor x) -> Tensor", backward_schema=None,
        backends={"cpu": Status("run")}, dtypes={"cpu": ("float32",), "emu": ("float32",), "cuda": ("float32",)},
        tolerances={"float32": Tolerance(1e-6, 1e-6)}, determinism="", forward_routes=("native",), reference=reference,
    )  # fmt: skip


def _dispatcher(*present: str, reference: bool = True) -> Dispatcher:
    return Dispatcher(_spec(reference), FakeLibrary(*present), lambda *arguments: "/".join(arguments))


@pytest.mark.parametrize("request_", ["auto", "native", "cpu"])
def test_the_native_backend_of_the_device(request_: str) -> None:
    choice = _dispatcher("cpu").choose(request_, torch.device("cpu"), F32)
    assert choice.backend == "cpu" and not choice.fallback and choice.reason


def test_requests_are_those_of_the_documentation() -> None:
    assert set(REQUESTS) == {"auto", "native", "reference", "cpu", "cuda", "hip", "musa", "emu"}
    assert set(BACKENDS) == set(DEVICE_TYPES)


@pytest.mark.parametrize("request_", ["native", "cpu"])
def test_a_named_backend_never_falls_back(request_: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"libtoy_cpu\.so is not here"):
        _dispatcher().choose(request_, torch.device("cpu"), F32)


def test_auto_falls_back_with_one_warning_per_device() -> None:
    dispatcher = _dispatcher()
    with pytest.warns(RuntimeWarning, match="toy .*reference.* cpu: libtoy_cpu.so is not here"):
        choice = dispatcher.choose("auto", torch.device("cpu"), F32)
    assert choice.backend == "reference" and choice.fallback
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatcher.choose("auto", torch.device("cpu"), F32).fallback
        assert dispatcher.choose("auto", torch.device("cpu"), torch.float64).fallback
    with pytest.warns(RuntimeWarning, match="xpu"):
        dispatcher.choose("auto", torch.device("xpu"), F32)


def test_strict_mode_forbids_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = _dispatcher()
    with pytest.warns(RuntimeWarning):
        dispatcher.choose("auto", torch.device("cpu"), F32)
    monkeypatch.setenv("MUSPACE_STRICT_PATCH", "1")
    with pytest.raises(BackendUnavailable, match="MUSPACE_STRICT_PATCH"):
        dispatcher.choose("auto", torch.device("cpu"), F32)
    with pytest.raises(BackendUnavailable, match="xpu"):
        dispatcher.choose("auto", torch.device("xpu"), F32)
    assert dispatcher.choose("reference", torch.device("cpu"), F32).backend == "reference"
    monkeypatch.setenv("MUSPACE_STRICT_PATCH", "0")
    assert dispatcher.choose("auto", torch.device("cpu"), F32).fallback


def test_an_operator_without_reference_always_raises() -> None:
    dispatcher = _dispatcher(reference=False)
    for request in ("auto", "reference"):
        with pytest.raises(BackendUnavailable):
            dispatcher.choose(request, torch.device("cpu"), F32)


def test_a_dtype_the_backend_lacks_is_named() -> None:
    dispatcher = _dispatcher("cpu")
    with pytest.raises(BackendUnavailable, match="cpu accepts float32, got float64"):
        dispatcher.choose("cpu", torch.device("cpu"), torch.float64)
    with pytest.warns(RuntimeWarning, match="float64"):
        assert dispatcher.choose("auto", torch.device("cpu"), torch.float64).fallback


@pytest.mark.parametrize("backend", ["cuda", "hip", "musa"])
def test_a_backend_of_another_device(backend: str) -> None:
    with pytest.raises(
        BackendUnavailable, match=f"backend {backend} needs tensors on {DEVICE_TYPES[backend]}, these are on cpu"
    ):
        _dispatcher("cpu", backend).choose(backend, torch.device("cpu"), F32)


def test_emu_takes_cpu_tensors_and_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = _dispatcher("emu", "cpu")
    assert dispatcher.choose("auto", torch.device("cpu"), F32).backend == "cpu"
    assert dispatcher.choose("emu", torch.device("cpu"), F32).backend == "emu"
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "emu")
    assert dispatcher.choose("auto", torch.device("cpu"), F32).backend == "emu"
    assert dispatcher.choose("cpu", torch.device("cpu"), F32).backend == "cpu", "a named backend is what was asked for"
    with pytest.raises(BackendUnavailable):
        _dispatcher("emu", "cpu").choose("auto", torch.device("cuda"), F32)


def test_a_forced_backend_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "tpu")
    with pytest.raises(ValueError, match="tpu"):
        _dispatcher("cpu").choose("auto", torch.device("cpu"), F32)


@pytest.mark.parametrize("request_", ["tpu", "", "CPU"])
def test_unknown_requests(request_: str) -> None:
    with pytest.raises(ValueError, match="backend: expected one of"):
        _dispatcher("cpu").choose(request_, torch.device("cpu"), F32)
    with pytest.raises(ValueError, match="backend: expected one of"):
        _dispatcher("cpu").why_not(request_, torch.ones(1))


def test_decisions_are_remembered() -> None:
    dispatcher = _dispatcher("cpu")
    for _ in range(5):
        dispatcher.choose("auto", torch.device("cpu"), F32)
    assert dispatcher.library.asked == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("present", [("cpu",), ()])
@pytest.mark.parametrize("backend", ["cpu", "native", "cuda", "musa", "emu", "reference"])
def test_why_not_is_the_sentence_of_the_exception(backend: str, present: tuple[str, ...]) -> None:
    dispatcher = _dispatcher(*present)
    sentence = dispatcher.why_not(backend, torch.ones(2))
    try:
        dispatcher.choose(backend, torch.device("cpu"), F32)
    except BackendUnavailable as error:
        assert sentence and sentence in str(error)
    else:
        assert sentence is None


def test_why_not_auto_with_a_reference() -> None:
    """``auto`` would run, on the reference: the sentence is the reason of the fallback or nothing, never an exception."""
    sentence = _dispatcher().why_not("auto", torch.ones(2))
    assert sentence is None or "libtoy_cpu.so" in sentence


def test_device_to_backend() -> None:
    assert backend_for("cpu") == "cpu" and backend_for("musa") == "musa"
    assert backend_for("cuda") == ("hip" if torch.version.hip else "cuda")
    for other in ("xpu", "mps", "meta", "privateuseone"):
        assert backend_for(other) is None


def test_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_count() == torch.get_num_threads()
    monkeypatch.setenv("MUSPACE_NUM_THREADS", "5")
    assert thread_count() == launch_context("cpu", torch.device("cpu")) == 5
    assert launch_context("emu", torch.device("cpu")) == 0
    for bad in ("0", "-1", "two", "1e3", " "):
        monkeypatch.setenv("MUSPACE_NUM_THREADS", bad)
        with pytest.raises(ValueError, match="MUSPACE_NUM_THREADS"):
            thread_count()


def test_the_report_is_rendered_when_asked_for() -> None:
    dispatcher = _dispatcher("cpu")
    rendered: list[tuple[str, ...]] = []

    def route(*arguments: str) -> str:
        rendered.append(arguments)
        return "native"

    dispatcher.route = route
    dispatcher.record(dispatcher.choose("auto", torch.device("cpu"), F32), "auto", torch.ones(2), ("wide",))
    assert not rendered
    report = get_last_dispatch_report()
    assert rendered == [("module of cpu", "cpu", "wide")] and report is not None
    assert report.as_dict() == {
        "operator": "toy", "device": "cpu", "dtype": "float32", "requested_backend": "auto", "selected_backend": "cpu",
        "native_fallback": False, "route": "native", "reason": report.reason, "library": "/somewhere/libtoy_cpu.so",
        "versions": report.versions,
    }  # fmt: skip
    assert list(report.as_dict()) == [
        "operator", "device", "dtype", "requested_backend", "selected_backend", "native_fallback", "route", "reason", "library",
        "versions",
    ]  # fmt: skip
    report.as_dict()["versions"]["torch"] = "changed"
    again = get_last_dispatch_report()
    assert again is not None and again.versions["torch"] == str(torch.__version__), "a caller cannot change the next report"


def test_errors_are_ours_and_ordinary() -> None:
    assert issubclass(BackendUnavailable, MuspaceError) and issubclass(BackendUnavailable, RuntimeError)
    assert not issubclass(BackendUnavailable, ValueError)
