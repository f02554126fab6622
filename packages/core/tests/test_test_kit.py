# SPDX-License-Identifier: Apache-2.0
"""The parts from which the operators' tests are built: a helper that lets anything pass would hide every fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from muspace_core.testing import large, properties, refusals
from muspace_core.testing.calls import as_tensors, on_backend, represented, upstream_gradient
from muspace_core.testing.process import in_threads
from muspace_core.testing.routes import assert_routes_agree


# ---- calls ---------------------------------------------------------------------------------------------------------
def test_only_the_reference_is_asked_for_by_name() -> None:
    call = on_backend(lambda *arguments, **keywords: (arguments, keywords))
    assert call("cpu", 1) == ((1,), {})
    assert call("reference", 1) == ((1,), {"backend": "reference"})
    assert call("reference", backend="auto") == ((), {"backend": "auto"})


def test_arrays_become_tensors() -> None:
    arguments = {
        "feats": np.array([1 / 3]), "depth": np.array([0.5]), "matrix": np.ones(2, np.float32), "rows": np.arange(2),
        "size": (1, 2), "absent": None,
    }  # fmt: skip
    made = as_tensors(arguments, "cpu", torch.bfloat16, depth=torch.float16)
    kinds = {name: value.dtype for name, value in made.items() if isinstance(value, torch.Tensor)}
    assert kinds == {"feats": torch.bfloat16, "depth": torch.float16, "matrix": torch.float32, "rows": torch.int64}
    assert made["size"] == (1, 2) and made["absent"] is None
    made["rows"][0] = 7
    assert arguments["rows"].tolist() == [0, 1], "the memory is not shared"
    assert represented(made["feats"]).dtype == np.float64 and represented(made["feats"]) == made["feats"].item()
    assert represented(made["rows"]).tolist() == [7, 1]


def test_upstream_gradient_is_seeded() -> None:
    output = torch.zeros(3, 2, dtype=torch.float16)
    assert upstream_gradient(output).dtype == torch.float16
    assert torch.equal(upstream_gradient(output), upstream_gradient(output))
    assert not torch.equal(upstream_gradient(output, 1), upstream_gradient(output, 2))


# ---- refusals ------------------------------------------------------------------------------------------------------
def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_messages_of_refusals() -> None:
    cases = {
        "feats: expected shape [N, C], got [4]": refusals.wrong_shape("n", "feats", lambda t: t[0], "[N, C]", "[4]"),
        "depth: expected shape [N], got [4]": refusals.wrong_shape("n", "feats", lambda t: t[0], "[N]", "[4]", "depth"),
        "feats: expected device cpu (that of depth), got meta": refusals.wrong_device("n", "feats", "depth"),
        "feats[1]: expected a cell, got 9": refusals.wrong_value("n", "feats", lambda t: t, "a cell", "9", "feats[1]"),
    }
    for message, case in cases.items():
        case.check(_raising(ValueError(message)), "cpu")
        for wrong in (ValueError(message + "."), TypeError(message)):
            with pytest.raises(AssertionError):
                case.check(_raising(wrong), "cpu")
    wrong_type = refusals.wrong_type("n", "feats", lambda t: t.int(), refusals.NARROW, "int32")
    wrong_type.check(_raising(TypeError("feats: expected dtype float32, bfloat16, float16, got int32")), "cpu")


def test_a_refusal_by_name_leaves_the_rest_open() -> None:
    case = refusals.refused("n", "B", lambda n: -n)
    case.check(_raising(ValueError("B: expected whatever")), "cpu")
    for wrong in (ValueError("B is negative"), ValueError("BB: expected whatever"), TypeError("B: expected whatever")):
        with pytest.raises(AssertionError):
            case.check(_raising(wrong), "cpu")


def test_changes_touch_their_argument_alone() -> None:
    rows, other = torch.arange(3), torch.arange(3)
    tensors = {"rows": rows, "other": other}
    refusals.put("rows", refusals.number_at(1, 9))(tensors)
    assert tensors["rows"].tolist() == [0, 9, 2] and rows.tolist() == [0, 1, 2] and tensors["other"] is other


# ---- routes --------------------------------------------------------------------------------------------------------
class Scaled(torch.autograd.Function):
    """The same number, whose gradient is that of a table: one entry a call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


@pytest.mark.parametrize(
    ("factors", "fault"),
    [
        ((1.0, 1.0, 1.0), None), ((1 + 1e-6, 1.0, 1.0), None), ((1.1, 1.0, 1.0), "largest difference"),
        ((1.0, 1.0, 1 + 1e-6), "bits"),
    ],
)  # fmt: skip
def test_routes_must_agree(factors: tuple[float, ...], fault: str | None) -> None:
    rest = list(factors)
    switched = []

    def forward() -> tuple[torch.Tensor, list[torch.Tensor]]:
        switched.append(torch.are_deterministic_algorithms_enabled())
        leaf = torch.ones(3, requires_grad=True)
        return Scaled.apply(leaf, rest.pop(0)), [leaf]

    if fault:
        with pytest.raises(AssertionError, match=fault):
            assert_routes_agree(forward, torch.ones_like, "cpu")
    else:
        runs = assert_routes_agree(forward, torch.ones_like, "cpu")
        assert [float(gradients[0][0]) for _, gradients in runs] == pytest.approx(factors)
    assert switched == [False, True, True] and not torch.are_deterministic_algorithms_enabled()


# ---- threads, property tests, memory -------------------------------------------------------------------------------
def test_threads_run_at_once_and_hand_on_their_faults() -> None:
    gate = threading.Barrier(2)  # passes only where both wait
    in_threads([lambda: gate.wait(10) and None] * 2)
    with pytest.raises(ZeroDivisionError):
        in_threads([lambda: None, lambda: 1 // 0 and None])
    with pytest.raises(AssertionError, match="deadlock"):
        in_threads([lambda: threading.Event().wait(5) and None], timeout=0.1)


def test_budget_of_property_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for forced, random, examples, derandomize in (("", "", 90, True), ("cpu", "1", 90, False), ("emu", "", 20, True)):
        monkeypatch.setenv("MUSPACE_FORCE_BACKEND", forced)
        monkeypatch.setenv("MUSPACE_TEST_RANDOM", random)
        found = properties.budget(90, emulated=20)
        assert (found.max_examples, found.derandomize, found.deadline) == (examples, derandomize, None)


def test_large_tensors_need_memory() -> None:
    large.needs(0, "cpu")
    with pytest.raises(pytest.skip.Exception, match=r"needs 1000000000 GiB of free memory: all of it"):
        large.needs(10**9, "cpu", "all of it")
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        assert not large.zeros((2, 3), dtype, "cpu").any() and large.zeros((2, 3), dtype, "cpu").dtype == dtype
