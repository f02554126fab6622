# SPDX-License-Identifier: Apache-2.0
"""Dispatch decisions over a library that says what it is told to."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from muspace_core import BackendUnavailable, MuspaceError, get_last_dispatch_report
from muspace_core.device import BACKENDS, DEVICE_TYPES, backend_for, launch_context, thread_count
from muspace_core.dispatch import REQUESTS, Dispatcher, choose_while_compiling
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

    def path(self, backend: str) -> Path | None:
        return Path(f"/somewhere/libtoy_{backend}.so") if backend in self.present else None

    def load(self, backend: str) -> str:
        assert backend in self.present
        return f"module of {backend}"


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
    dispatcher = _dispatcher("cpu")
    for attempt in (
        lambda: dispatcher.choose("auto", torch.device("cpu"), F32),
        lambda: dispatcher.why_not("auto", torch.ones(1)),
    ):
        with pytest.raises(ValueError, match=r"^MUSPACE_FORCE_BACKEND: expected one of .*; got 'tpu'"):
            attempt()
    assert dispatcher.choose("cpu", torch.device("cpu"), F32).backend == "cpu", "a named backend is what was asked for"


@pytest.mark.skipif(os.name != "posix", reason="environment variables are text here")
def test_a_forced_backend_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", os.fsdecode(b"\xff\xfe"))
    with pytest.raises(ValueError, match=r"^MUSPACE_FORCE_BACKEND: expected one of "):
        _dispatcher("cpu").choose("auto", torch.device("cpu"), F32)


@pytest.mark.parametrize("request_", ["tpu", "", "CPU"])
def test_unknown_requests(request_: str) -> None:
    with pytest.raises(ValueError, match="backend: expected one of"):
        _dispatcher("cpu").choose(request_, torch.device("cpu"), F32)
    with pytest.raises(ValueError, match="backend: expected one of"):
        _dispatcher("cpu").why_not(request_, torch.ones(1))
    with pytest.raises(ValueError, match="backend: expected one of"):
        _dispatcher("cpu").why_not(request_)


@pytest.mark.parametrize("request_", [None, 3, ["cpu"], {"cpu": 1}, torch.ones(1)], ids=str)
def test_requests_that_are_no_text(request_: Any) -> None:
    for attempt in (
        lambda: _dispatcher("cpu").choose(request_, torch.device("cpu"), F32),
        lambda: _dispatcher("cpu").why_not(request_, torch.ones(1)),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^backend: expected "):
            attempt()


def test_decisions_are_remembered() -> None:
    dispatcher = _dispatcher("cpu")
    for _ in range(5):
        dispatcher.choose("auto", torch.device("cpu"), F32)
    assert dispatcher.library.asked == 1  # type: ignore[attr-defined]


def test_a_choice_is_marked_as_a_constant_of_graphs_as_torch_does_it() -> None:
    """The mark is set without torch's decorator, which would import its compiler."""
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) and vars(marked).items() <= vars(choose_while_compiling).items()


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


def test_why_not_is_about_the_first_tensor() -> None:
    """The others are indices and geometry, whose dtypes and devices are not what dispatch goes by."""
    dispatcher = _dispatcher("cpu")
    indices = torch.zeros(2, dtype=torch.int64)
    for request in ("auto", "native", "cpu", "reference"):
        assert dispatcher.why_not(request, torch.ones(2), indices) is None, request
        assert dispatcher.why_not(request, torch.ones(2, device="meta"), indices) is None, "shapes alone run anywhere"
    for request in ("native", "cpu"):
        sentence = dispatcher.why_not(request, indices, torch.ones(2))
        assert sentence == "backend cpu accepts float32, got int64"


def test_why_not_auto_obeys_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = _dispatcher("cpu")
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "cuda")
    sentence = dispatcher.why_not("auto", torch.ones(2))
    with pytest.raises(BackendUnavailable) as caught:
        dispatcher.choose("auto", torch.device("cpu"), F32)
    assert sentence and sentence in str(caught.value) and "backend cuda needs tensors on cuda" in sentence
    for request in ("native", "cpu", "reference"):
        assert dispatcher.why_not(request, torch.ones(2)) is None, "the variable speaks of auto only"
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "reference")
    assert _dispatcher().why_not("auto", torch.ones(2)) is None
    monkeypatch.delenv("MUSPACE_FORCE_BACKEND")
    monkeypatch.setenv("MUSPACE_STRICT_PATCH", "1")
    sentence = _dispatcher().why_not("auto", torch.ones(2))
    assert sentence and "MUSPACE_STRICT_PATCH" in sentence


def test_why_not_without_tensors() -> None:
    dispatcher = _dispatcher("cpu")
    assert dispatcher.why_not("cpu") is None
    for absent in ("cuda", "hip", "musa", "emu"):
        assert dispatcher.why_not(absent) == f"libtoy_{absent}.so is not here"


def test_why_not_reference_without_one() -> None:
    for tensors in ((), (torch.ones(2),)):
        sentence = _dispatcher("cpu", reference=False).why_not("reference", *tensors)
        assert sentence and "no reference implementation" in sentence


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
    # Digits that are no ASCII, and digits that are no decimals, are no numbers to the library.
    for bad in ("0", "-1", "two", "1e3", " ", "²", "٣", "½", os.fsdecode(b"\xb2")):
        monkeypatch.setenv("MUSPACE_NUM_THREADS", bad)
        with pytest.raises(ValueError, match=r"^MUSPACE_NUM_THREADS: expected a positive integer, got "):
            thread_count()


@pytest.mark.parametrize("text", ["2147483648", "9" * 30, "9" * 5000], ids=["32-bit", "64-bit", "beyond int()"])
def test_a_huge_thread_count_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSPACE_NUM_THREADS", text)
    assert 256 <= thread_count() < 1 << 31


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


def test_the_report_describes_the_call_and_not_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary("cpu")
    dispatcher = Dispatcher(_spec(), library, lambda module, backend: f"{module}, {backend}")  # type: ignore[arg-type]
    dispatcher.record(dispatcher.choose("auto", torch.device("cpu"), F32), "auto", torch.ones(2), ())
    library.present = ()
    monkeypatch.setenv("MUSPACE_LIBRARY_PATH", "/another/place")
    monkeypatch.setenv("MUSPACE_FORCE_BACKEND", "reference")
    report = get_last_dispatch_report()
    assert report is not None
    assert (report.selected_backend, report.route) == ("cpu", "module of cpu, cpu")
    assert report.library == "/somewhere/libtoy_cpu.so"


def test_fake_tensors_are_recorded_as_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatcher = _dispatcher("cpu")
    with FakeTensorMode():
        fake = torch.empty(2)
    dispatcher.record(dispatcher.choose("auto", torch.device("cpu"), F32), "auto", fake, ())
    report = get_last_dispatch_report()
    assert report is not None
    assert (report.selected_backend, report.reason, report.library, report.route) == ("meta", "shapes only", None, "meta")


def test_errors_are_ours_and_ordinary() -> None:
    assert issubclass(BackendUnavailable, MuspaceError) and issubclass(BackendUnavailable, RuntimeError)
    assert not issubclass(BackendUnavailable, ValueError)
