# SPDX-License-Identifier: Apache-2.0
"""Contract: tensors without ordinary memory.  Zero tensors count as zeros; the others are refused by name.

A null pointer that reaches a kernel ends the process, so on the host each such call is made in a forked child.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from muspace_core.testing.cases import Arguments, Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.numerics import LAYOUTS
from muspace_core.testing.paths import OperatorLog
from muspace_core.testing.process import in_child

_FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def _outcome(call: Callable[[], Any]) -> list[str]:
    """Class name and text of what ``call`` raises; of nothing if it returns."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no exception", ""]


#: Layouts of a freed argument; all but the first are made dense before a launch, which reads the memory.
FREED = ("dense", "transposed", "negated")


def _freed(tensor: torch.Tensor, layout: str = "dense") -> torch.Tensor:
    """A tensor of its own whose storage has been given back, as sharded training does between uses."""
    own = tensor.detach().clone()
    if layout != "dense" and tensor.is_floating_point():
        own = LAYOUTS[layout](own)
    elif layout == "transposed":
        own = own.repeat_interleave(2, -1)[..., ::2]
    own.untyped_storage().resize_(0)
    return own.requires_grad_(tensor.requires_grad)


def _zero_tensor(shape: tuple[int, ...], device: str) -> torch.Tensor:
    try:
        return torch._efficientzerotensor(shape, device=device)
    except NotImplementedError:
        pytest.skip(f"torch makes no zero tensors on {device}")


class MemoryContract(Subject):
    """Inherited through ``OpContract``."""

    def _outcomes(self, calls: dict[str, Callable[[], Any]], device: str, backend: str = "") -> dict[str, list[str]]:
        """What each call raises; in a child on the host, where a crash is then a failed test.

        Not for the reference: torch's own thread pool does not survive a fork, and its operators know such tensors.
        """

        def answers(names: list[str]) -> dict[str, list[str]]:
            return {name: _outcome(calls[name]) for name in names}

        if device != "cpu" or backend == "reference":
            return answers(list(calls))
        try:
            return dict(json.loads(in_child(lambda: json.dumps(answers(list(calls))).encode())))
        except AssertionError:
            outcomes: dict[str, list[str]] = {}
        for name in calls:  # a crash must not hide the others: one child each
            try:
                outcomes |= json.loads(in_child(lambda name=name: json.dumps(answers([name])).encode()))  # type: ignore[misc]
            except AssertionError as error:
                outcomes[name] = ["crash", str(error)]
        return outcomes

    def _tensor_names(self, tensors: Arguments) -> list[str]:
        return [k for k, v in tensors.items() if isinstance(v, torch.Tensor)]

    # ---- zero tensors ----------------------------------------------------------------------------------------------
    @_FORKS
    def test_zero_tensors_are_zeros(self, backend: str, device: str) -> None:
        """torch makes them in its own formulas (an unused gradient); they have a shape and no memory."""
        tensors = self.tensors(self.smallest(), "float32", device)

        def check(name: str) -> None:
            shape = tuple(tensors[name].shape)
            output, gradients, _ = self.run(tensors | {name: torch.zeros(shape, device=device)}, backend)
            found, other, _ = self.run(tensors | {name: _zero_tensor(shape, device)}, backend)
            assert_bits_equal(found, output, f"output for {name}")
            for of, gradient in other.items():
                assert_close(gradient, gradients[of], self.spec.tolerances["float32"].grad, f"gradient of {of} for {name}")
            plain = self.call(tensors | {name: _zero_tensor(shape, device)}, backend)
            assert_bits_equal(plain, output, f"output for {name}, no gradient")

        calls: dict[str, Callable[[], Any]] = {name: lambda name=name: check(name) for name in self.floating}  # type: ignore[misc]
        assert self._outcomes(calls, device, backend) == {name: ["no exception", ""] for name in self.floating}

    @_FORKS
    @pytest.mark.parametrize("path", ["direct", "registered"])
    def test_a_zero_upstream_gradient(self, path: str, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)

        def work() -> None:
            output = self.call(tensors, backend)
            nothing = _zero_tensor(tuple(output.shape), device)
            for name, gradient in self.gradients(tensors, output, nothing).items():
                assert gradient.shape == tensors[name].shape and bool((gradient == 0).all()), f"gradient of {name}"

        def call() -> None:
            if path == "direct":
                return work()
            with OperatorLog(self.spec.package):
                return work()

        assert self._outcomes({"zero": call}, device, backend) == {"zero": ["no exception", ""]}

    # ---- freed storage ---------------------------------------------------------------------------------------------
    @_FORKS
    @pytest.mark.parametrize("recording", [True, False])
    @pytest.mark.parametrize("layout", FREED)
    def test_freed_arguments_are_refused(self, layout: str, recording: bool, backend: str, device: str) -> None:
        """In every form of the call: a conversion that comes before the launch reads the memory as well."""
        if backend == "reference":
            pytest.skip("torch's own operators meet the freed storage")
        tensors = self.tensors(self.smallest(), "float32", device, grad=recording)
        for form, change in ({"tensors": dict} | dict(self.forms)).items():
            given = change(dict(tensors))
            names = self._tensor_names(given) if layout != "negated" else list(self.floating)
            calls: dict[str, Callable[[], Any]] = {
                name: lambda name=name, given=given: self.call(given | {name: _freed(given[name], layout)}, backend)  # type: ignore[misc]
                for name in names
            }
            self._refused_by_name(self._outcomes(calls, device), form)

    @_FORKS
    def test_freed_before_backward_is_refused(self, backend: str, device: str) -> None:
        """A saved argument that was freed between the passes, and a freed upstream gradient."""
        if backend == "reference":
            pytest.skip("torch's own operators meet the freed storage")
        tensors = self.tensors(self.smallest(), "float32", device)

        def late(name: str) -> None:
            given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
            live = given | {k: given[k].requires_grad_() for k in self.floating}
            output = self.call(live, backend)
            upstream = torch.ones_like(output)
            (upstream if name == "grad_output" else given[name]).untyped_storage().resize_(0)
            self.gradients(live, output, upstream)

        names = [*self._tensor_names(tensors), "grad_output"]
        calls: dict[str, Callable[[], Any]] = {name: lambda name=name: late(name) for name in names}  # type: ignore[misc]
        outcomes = self._outcomes(calls, device)
        unread = set() if self.saved is None else set(self._tensor_names(tensors)) - set(self.saved)
        kept = {k: v for k, v in outcomes.items() if not (k in unread and v[0] == "no exception")}
        self._refused_by_name(kept)

    @staticmethod
    def _refused_by_name(outcomes: dict[str, list[str]], form: str = "tensors") -> None:
        wrong = {k: v for k, v in outcomes.items() if v[0] != "ValueError" or not v[1].startswith(f"{k}: expected ")}
        assert not wrong, (form, wrong)

    # ---- other layouts ---------------------------------------------------------------------------------------------
    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
    @pytest.mark.parametrize("layout", ["sparse_coo", "mkldnn"])
    def test_other_layouts_are_refused(self, layout: str, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        names = self._tensor_names(tensors)
        if layout == "mkldnn":  # torch has these up to five dimensions
            names = [n for n in self.floating if tensors[n].dim() <= 5]
        if layout == "mkldnn" and (device != "cpu" or not torch.backends.mkldnn.is_available()):
            pytest.skip("mkldnn tensors live on the cpu")
        for name in names:
            try:
                other = tensors[name].to_sparse() if layout == "sparse_coo" else tensors[name].to_mkldnn()
            except NotImplementedError:
                pytest.skip(f"torch has no {layout} tensors on {device}")
            with pytest.raises(ValueError, match="strided") as caught:
                self.call(tensors | {name: other}, backend)
            assert str(caught.value).startswith(f"{name}: expected "), caught.value
