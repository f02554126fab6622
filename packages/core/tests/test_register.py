# SPDX-License-Identifier: Apache-2.0
"""``register`` on an operator written in Python: every path of the contract without any native library."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from muspace_core.register import register, takes_direct_path
from muspace_core.spec import OpSpec, Status, Tolerance
from muspace_core.testing.cases import Arguments, Case
from muspace_core.testing.derivatives import DerivativeContract
from muspace_core.testing.paths import Logged, Named, OperatorLog, PathContract

SPEC = OpSpec(
    family="toy",
    name="scale_rows",
    summary="each row times its own factor",
    schema="(Tensor value, Tensor factor) -> Tensor",
    backward_schema="(Tensor grad_output, Tensor value, Tensor factor) -> (Tensor, Tensor)",
    backends={"cpu": Status("run")},
    dtypes={"cpu": ("float32", "float64")},
    tolerances={"float32": Tolerance(1e-6, 1e-6), "float64": Tolerance(1e-12, 1e-12)},
    determinism="bit-reproducible",
    forward_routes=("native",),
    backward_routes=("native",),
)
CALLS: list[str] = []


def _forward(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # Whatever arrives has memory of its own: a subclass without behaviour may, a fake or a wrapper may not.
    assert type(value) in (torch.Tensor, torch.nn.Parameter, Named), f"{type(value).__name__} reached the native function"
    assert not value.is_meta and value.data_ptr()
    CALLS.append("forward")
    return (value.detach().contiguous() * factor.detach()[:, None]).clone()


def _backward(grad_output: torch.Tensor, value: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("backward")
    return (grad_output * factor[:, None]).contiguous(), (grad_output * value).sum(1)


OPERATOR = register(
    SPEC,
    forward=_forward,
    backward=_backward,
    fake_forward=lambda value, factor: value.new_empty(value.shape),
    fake_backward=lambda grad_output, value, factor: (value.new_empty(value.shape), factor.new_empty(factor.shape)),
    tensor_count=2,
    differentiable=(0, 1),
)


def _arguments() -> Arguments:
    random = np.random.default_rng(2)
    return {"value": random.standard_normal((3, 4)), "factor": random.standard_normal(3)}


@pytest.mark.backends("cpu")
class TestScaleRows(PathContract, DerivativeContract):
    spec = SPEC
    operator = staticmethod(OPERATOR)
    cases = (Case("rows", _arguments),)
    storage = ("value",)
    geometry = ("factor",)


def _pair(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, requires_grad=grad), torch.randn(3, requires_grad=grad)


def test_eager_calls_go_straight() -> None:
    assert takes_direct_path(_pair()) and takes_direct_path(_pair(grad=True))
    assert takes_direct_path((torch.nn.Parameter(torch.ones(1)),))


@pytest.mark.parametrize("position", [0, 1])
def test_anything_else_does_not(position: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
    for strange in (fake, torch.ones(3).as_subclass(Named), Logged(torch.ones(3)), torch.ones(3, device="meta")):
        tensors = [torch.ones(3), torch.ones(3)]
        tensors[position] = strange
        assert not takes_direct_path(tensors), type(strange)


def test_nor_under_a_mode_or_a_transform() -> None:
    plain = _pair()
    with OperatorLog("muspace_toy"):
        assert not takes_direct_path(plain)
    seen: list[bool] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        seen.append(takes_direct_path((value, plain[1])))
        return value.sin()

    torch.vmap(note)(torch.randn(2, 3, 4))
    torch.func.functionalize(note)(plain[0])
    torch.func.vjp(note, plain[0])
    torch.func.jvp(note, (plain[0],), (plain[0],))
    assert seen == [False] * 4
    assert takes_direct_path(plain)


def test_native_runs_once_a_call() -> None:
    CALLS.clear()
    value, factor = _pair(grad=True)
    OPERATOR(value, factor).sum().backward()
    assert CALLS == ["forward", "backward"]
    CALLS.clear()
    with torch.no_grad():
        OPERATOR(value, factor)
    assert CALLS == ["forward"]


def test_records_gradient() -> None:
    value, factor = _pair()
    assert not OPERATOR.records_gradient((value, factor))
    assert OPERATOR.records_gradient((value, factor.requires_grad_()))
    with torch.no_grad():
        assert not OPERATOR.records_gradient((value, factor))


def test_nothing_is_saved_without_a_gradient() -> None:
    value, factor = _pair()
    assert OPERATOR(value, factor).grad_fn is None


def test_hooks_and_anomaly_mode_see_the_backward() -> None:
    value, factor = _pair(grad=True)
    noted: list[torch.Size] = []
    value.register_hook(lambda g: noted.append(g.shape))
    with torch.autograd.detect_anomaly(check_nan=True):
        OPERATOR(value, factor).sum().backward()
    assert noted == [value.shape]


def test_saved_tensor_hooks_apply() -> None:
    """Checkpointing and offloading live on these hooks."""
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    value, factor = _pair(grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        OPERATOR(value, factor).sum().backward()
    assert value.shape in packed and factor.shape in packed


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    value, factor = _pair(grad=True)
    plain = torch.autograd.grad(OPERATOR(value.sin(), factor).square().sum(), [value, factor])
    output = checkpoint(lambda v, f: OPERATOR(v.sin(), f), value, factor, use_reentrant=reentrant)
    output.square().sum().backward()
    torch.testing.assert_close((value.grad, factor.grad), plain)


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    CALLS.clear()
    yield
