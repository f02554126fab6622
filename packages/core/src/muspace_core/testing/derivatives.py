# SPDX-License-Identifier: Apache-2.0
"""Contract: one reverse derivative exists; the second and the forward-mode one are refused, never made up.

A derivative that is dropped without a word trains the wrong model, so every way of asking for one is tried here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from muspace_core.testing.cases import Arguments, Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.paths import OperatorLog

#: Who may be looking on: nobody (the direct call), or one that sends the call through the registered operator.
OBSERVERS = ("nobody", "profiler", "dispatch mode")


@contextlib.contextmanager
def _observed(observer: str, namespace: str) -> Iterator[None]:
    if observer == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            yield
    elif observer == "dispatch mode":
        with OperatorLog(namespace):
            yield
    else:
        yield


def _with_the_other_arguments(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
    """The second derivative hides behind an ordinary term that gives every leaf a gradient."""
    (first,) = torch.autograd.grad(output.sum(), leaves[name], create_graph=True)
    return (first.square().sum() + sum(leaf.sum() for leaf in leaves)).backward()


def _alone(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
    (first,) = torch.autograd.grad(output.sum(), leaves[name], create_graph=True)
    return first.square().sum().backward()


def _from_the_grad_attribute(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
    output.sum().backward(create_graph=True)
    penalty = leaves[name].grad
    assert penalty is not None
    return penalty.square().sum().backward()


def _of_the_upstream_gradient(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
    upstream = torch.ones_like(output).requires_grad_()
    (first,) = torch.autograd.grad(output, leaves[name], upstream, create_graph=True)
    return torch.autograd.grad(first.sum(), upstream)


def _of_both_ways(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
    """The upstream gradient needs one itself, so the first-order gradients depend on it in two ways."""
    upstream = torch.ones_like(output).requires_grad_()
    first = torch.autograd.grad(output, leaves, upstream, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves[name])


def _of_one_input(position: int) -> Callable[..., Any]:
    def ask(output: torch.Tensor, leaves: list[torch.Tensor], name: int) -> Any:
        (first,) = torch.autograd.grad(output.sum(), leaves[name], create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves[position % len(leaves)])

    return ask


#: Ways to ask for a second derivative, given the output, the leaves and which leaf the first derivative is of.
SECOND_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "alone": _alone,
    "with the other arguments": _with_the_other_arguments,
    "from the grad attribute": _from_the_grad_attribute,
    "of the upstream gradient": _of_the_upstream_gradient,
    "of both ways": _of_both_ways,
    "of the first input": _of_one_input(0),
    "of the last input": _of_one_input(-1),
}


class DerivativeContract(Subject):
    """Inherited through ``OpContract``."""

    @pytest.fixture(autouse=True)
    def _no_composed_reference(self, request: pytest.FixtureRequest, backend: str) -> None:
        derivative_test = getattr(DerivativeContract, getattr(request.function, "__name__", ""), None) is not None
        if backend == "reference" and derivative_test:
            pytest.skip("the reference is composed of differentiable torch operators")

    def _recorded(self, backend: str, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        return self.call(tensors, backend), [tensors[n] for n in self.floating]

    def _plain(self, backend: str, device: str) -> tuple[Arguments, Callable[[str], Callable[[torch.Tensor], torch.Tensor]]]:
        """Tensors, and the operator as a function of one of them."""
        tensors = self.tensors(self.smallest(), "float32", device)
        return tensors, lambda name: lambda tensor: self.call(tensors | {name: tensor}, backend)

    # ---- second derivative -----------------------------------------------------------------------------------------
    @pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True:UserWarning")
    @pytest.mark.parametrize("observer", OBSERVERS)
    @pytest.mark.parametrize("way", SECOND_DERIVATIVES)
    def test_double_backward_is_refused(self, way: str, observer: str, backend: str, device: str) -> None:
        for position in range(len(self.floating)):
            with _observed(observer, self.spec.package):
                output, leaves = self._recorded(backend, device)
                if self._gradient_is_constant() and way != "of the upstream gradient":
                    self._zero_second_derivative(lambda: SECOND_DERIVATIVES[way](output, leaves, position), leaves)  # noqa: B023
                    continue
                with pytest.raises(RuntimeError, match=r"(?i)once|twice|second|double") as caught:
                    SECOND_DERIVATIVES[way](output, leaves, position)
            assert self.spec.name in str(caught.value), caught.value

    def _gradient_is_constant(self) -> bool:
        """Linear in every floating argument together: the first derivative depends on none of them."""
        return self.saved is not None and not set(self.saved) & set(self.floating)

    def _zero_second_derivative(self, ask: Callable[[], Any], leaves: list[torch.Tensor]) -> None:
        """Refused by the operator, or by torch because nothing depends on the leaves, or left out beside another term."""
        try:
            ask()
        except RuntimeError as error:
            own = re.search(r"(?i)once|twice|second|double", str(error)) and self.spec.name in str(error)
            assert own or re.search("does not require grad|not have been used in the graph", str(error)), error
        else:
            assert all(leaf.grad is not None and bool((leaf.grad == 1).all()) for leaf in leaves)

    def test_double_backward_is_refused_to_those_who_hide_it(self, backend: str, device: str) -> None:
        """torch's own functions of second order: hessian, and jvp by two backwards."""
        tensors, function = self._plain(backend, device)
        functional = torch.autograd.functional
        for name in self.floating:
            scalar = function(name)
            if self._gradient_is_constant():
                assert not functional.hessian(lambda t, scalar=scalar: scalar(t).sum(), tensors[name]).any()
            else:
                with pytest.raises(RuntimeError, match=self.spec.name):
                    functional.hessian(lambda t, scalar=scalar: scalar(t).sum(), tensors[name])
            with pytest.raises(RuntimeError, match=self.spec.name):
                functional.jvp(scalar, tensors[name], torch.ones_like(tensors[name]))

    @pytest.mark.parametrize("observer", OBSERVERS)
    def test_a_first_derivative_may_create_a_graph(self, observer: str, backend: str, device: str) -> None:
        """Only what lies behind the first derivative is refused: its value, and terms beside it, are as ever."""
        output, leaves = self._recorded(backend, device)
        grad_output = self.upstream_gradient(output)
        wanted = torch.autograd.grad(output, leaves, grad_output)
        with _observed(observer, self.spec.package):
            output, leaves = self._recorded(backend, device)
            found = torch.autograd.grad(output, leaves, grad_output, create_graph=True)
            for name, left, right in zip(self.floating, found, wanted, strict=True):
                assert_close(left, right, self.spec.tolerances["float32"].grad, f"gradient of {name}")
            beside = torch.stack([(leaf * gradient.detach()).sum() for leaf, gradient in zip(leaves, found, strict=True)]).sum()
            for name, left, right in zip(self.floating, torch.autograd.grad(beside, leaves), found, strict=True):
                assert_bits_equal(left, right.detach(), f"gradient of the term beside, {name}")

    def test_batched_gradients(self, backend: str, device: str) -> None:
        """``is_grads_batched``, as vectorised Jacobians use it: one derivative for each gradient that comes in."""
        output, leaves = self._recorded(backend, device)
        gradients = torch.stack([self.upstream_gradient(output, seed) for seed in (1, 2)])
        found = torch.autograd.grad(output, leaves, gradients, is_grads_batched=True)
        for place in range(2):
            output, leaves = self._recorded(backend, device)
            alone = torch.autograd.grad(output, leaves, gradients[place])
            for name, many, one in zip(self.floating, found, alone, strict=True):
                assert_close(many[place], one, self.spec.tolerances["float32"].grad, f"gradient of {name}")

    # ---- forward mode ----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("observer", OBSERVERS)
    @pytest.mark.parametrize("recording", [True, False])
    def test_forward_mode_is_refused(self, recording: bool, observer: str, backend: str, device: str) -> None:
        tensors, function = self._plain(backend, device)
        wanted = self.call(tensors, backend)
        for name in self.floating:
            leaf = tensors[name].clone().requires_grad_(recording)
            with forward_ad.dual_level(), _observed(observer, self.spec.package), torch.set_grad_enabled(recording):
                dual = forward_ad.make_dual(leaf, torch.ones_like(leaf))
                with pytest.raises(RuntimeError, match=r"(?i)forward|jvp") as caught:
                    function(name)(dual)
                assert self.spec.name in str(caught.value), caught.value
                # Without a tangent the level changes nothing.
                assert_bits_equal(self.call(tensors, backend), wanted, "inside a level")
        assert_bits_equal(self.call(tensors, backend), wanted, "after the level")

    def test_forward_mode_transforms_are_refused(self, backend: str, device: str) -> None:
        tensors, function = self._plain(backend, device)
        for name in self.floating:
            given = tensors[name]
            with pytest.raises(RuntimeError, match=r"(?i)forward|jvp"):
                torch.func.jvp(function(name), (given,), (torch.ones_like(given),))
            with pytest.raises(RuntimeError, match=r"(?i)forward|jvp"):
                torch.func.jacfwd(function(name))(given)

    @pytest.mark.parametrize("observer", OBSERVERS)
    def test_forward_mode_over_the_backward_is_refused(self, observer: str, backend: str, device: str) -> None:
        """The upstream gradient is an input of the backward like any other; its tangent may not vanish there."""
        output, leaves = self._recorded(backend, device)
        with forward_ad.dual_level(), _observed(observer, self.spec.package):
            dual = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
            with pytest.raises(RuntimeError, match=r"(?i)forward|jvp"):
                torch.autograd.grad(output, leaves, dual)

    # ---- names -----------------------------------------------------------------------------------------------------
    def test_the_graph_names_the_operator(self, backend: str, device: str) -> None:
        """What anomaly mode, torchviz and a profile of the backward show."""
        output, _ = self._recorded(backend, device)
        assert output.grad_fn is not None
        assert output.grad_fn.name() == f"{self.spec.name}Backward"
        with OperatorLog(self.spec.package):
            output, _ = self._recorded(backend, device)
        assert output.grad_fn is not None and re.search(self.spec.name, output.grad_fn.name())
