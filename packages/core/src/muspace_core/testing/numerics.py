# SPDX-License-Identifier: Apache-2.0
"""Contract: values and gradients against the oracle, over dtypes, layouts and empty sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from muspace_core.testing.cases import Arguments, Case, EmptyCase, Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close, assert_rounded_once, assert_same_support


def _scattered(tensor: torch.Tensor) -> torch.Tensor:
    """Same values, every second element of a larger buffer, with a storage offset."""
    buffer = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), 7.0, dtype=tensor.dtype, device=tensor.device)
    view = buffer[..., 1::2]
    view.copy_(tensor)
    return view


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Same values with the dimensions stored in reverse order."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """Same values as a view whose negative bit is set (what ``.imag`` of a conjugate gives)."""
    if tensor.dtype is torch.bool:
        return tensor
    if not tensor.is_floating_point():
        return torch._neg_view(-tensor)
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    return view


LAYOUTS = {"scattered": _scattered, "transposed": _transposed, "negated": _negated}


class NumericContract(Subject):
    """Inherited through ``OpContract``."""

    def _tolerance(self, dtype: str, which: str) -> float:
        return float(getattr(self.spec.tolerances[dtype], which))

    def _check(self, tensors: Arguments, backend: str, **keywords: Any) -> None:
        storage = self.output_dtype(tensors)
        dtype = str(storage).removeprefix("torch.")
        output, gradients, grad_output = self.run(tensors, backend, **keywords)
        represented = self.represented(tensors)
        wanted, wanted_gradients = type(self).oracle(represented, grad_output.double().cpu().numpy(), dtype == "float64")
        assert output.dtype == storage, f"output dtype: expected {storage}, got {output.dtype}"
        assert_close(output, wanted, self._tolerance(dtype, "output"), "output")
        fp32 = self.spec.tolerances["float32"]
        assert_rounded_once(output, wanted, fp32.output, "output")
        excused = type(self).excused
        masks = excused(represented) if excused else {}
        for name, gradient in gradients.items():
            assert gradient.dtype == tensors[name].dtype, f"gradient of {name}: dtype {gradient.dtype}"
            own = str(tensors[name].dtype).removeprefix("torch.")
            tolerance = max(self._tolerance(dtype, "grad"), self._tolerance(own, "grad"))
            assert_close(gradient, wanted_gradients[name], tolerance, f"gradient of {name}", masks.get(name))
            if name not in masks:
                assert_rounded_once(gradient, wanted_gradients[name], fp32.grad, f"gradient of {name}")
                assert_same_support(gradient, wanted_gradients[name], f"gradient of {name}")

    def test_matches_the_oracle(self, case: Case, dtype: str, backend: str, device: str) -> None:
        self._check(self.tensors(case.build(), dtype, device), backend, **case.keywords)

    def test_mixed_dtypes(self, mixed: tuple[str, ...], backend: str, device: str) -> None:
        self._check(self.tensors(self.smallest(), mixed, device), backend)

    def test_tolerances_are_below_one_percent(self) -> None:
        for dtype, tolerance in self.spec.tolerances.items():
            assert 0 < tolerance.output < 0.01 and 0 < tolerance.grad < 0.01, dtype

    def test_empty(self, empty_case: EmptyCase, backend: str, device: str) -> None:
        tensors = self.tensors(empty_case.shrink(self.smallest()), "float32", device, grad=True)
        output = self.call(tensors, backend)
        wanted, gradients = type(self).oracle(self.represented(tensors), np.zeros(tuple(output.shape)), False)
        assert tuple(output.shape) == wanted.shape
        assert output.requires_grad, "an empty call keeps its place in the graph"
        assert (output == 0).all()
        found = self.gradients(tensors, output, torch.ones_like(output))
        for name, gradient in found.items():
            assert tuple(gradient.shape) == gradients[name].shape and (gradient == 0).all(), name

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_strided_inputs(self, layout: str, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        strided = {k: LAYOUTS[layout](v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
        output, gradients, _ = self.run(tensors, backend)
        again, again_gradients, _ = self.run(strided, backend)
        assert_bits_equal(again, output, "output")
        for name in self.floating:
            if self.repeats_its_bits(name, backend):
                assert_bits_equal(again_gradients[name].contiguous(), gradients[name], f"gradient of {name}")
            else:
                assert_close(again_gradients[name], gradients[name], self._tolerance("float32", "grad"), f"gradient of {name}")

    def test_views_at_odd_addresses(self, dtype: str, backend: str, device: str) -> None:
        """Contiguous, but one element into their storage: kernels that load 16 bytes at a time must not be handed them."""
        tensors = self.tensors(self.smallest(), dtype, device)

        def shifted(tensor: torch.Tensor) -> torch.Tensor:
            room = tensor.new_zeros(tensor.numel() + 1)
            room[1:] = tensor.reshape(-1)
            return room[1:].view(tensor.shape)

        moved = {k: shifted(v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
        output, gradients, grad_output = self.run(tensors, backend)
        live = self.live(moved)
        again = self.call(live, backend)
        assert_bits_equal(again, output, "output")
        for name, gradient in self.gradients(live, again, shifted(grad_output)).items():
            if self.repeats_its_bits(name, backend):
                assert_bits_equal(gradient, gradients[name], f"gradient of {name}")
            else:
                assert_close(gradient, gradients[name], self._tolerance(dtype, "grad"), f"gradient of {name}")

    def test_expanded_inputs(self, backend: str, device: str) -> None:
        """Stride-0 dimensions, as ``expand`` leaves them; the gradient has the expanded shape."""
        tensors = self.tensors(self.smallest(), "float32", device)
        for name in self.floating:
            expanded = tensors[name][:1].expand_as(tensors[name])
            changed, plain = dict(tensors), dict(tensors)
            changed[name], plain[name] = expanded, expanded.clone(memory_format=torch.contiguous_format)
            output, gradients, _ = self.run(changed, backend)
            wanted, wanted_gradients, _ = self.run(plain, backend)
            assert_bits_equal(output, wanted, f"output with {name} expanded")
            assert_close(gradients[name], wanted_gradients[name], self._tolerance("float32", "grad"), f"gradient of {name}")

    def test_strided_integer_inputs(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        names = [k for k, v in tensors.items() if isinstance(v, torch.Tensor) and not v.is_floating_point()]
        strided = dict(tensors) | {k: _transposed(_scattered_integer(tensors[k])) for k in names}
        assert_bits_equal(self.call(strided, backend), self.call(tensors, backend), "output")

    def test_expanded_upstream_gradient(self, backend: str, device: str) -> None:
        """``output.sum()`` sends a stride-0 gradient."""
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        output = self.call(tensors, backend)
        names = list(self.floating)
        summed = torch.autograd.grad(output.sum(), [tensors[n] for n in names], retain_graph=True)
        plain = torch.autograd.grad(output, [tensors[n] for n in names], torch.ones_like(output))
        for name, left, right in zip(names, summed, plain, strict=True):
            assert_close(left, right, self._tolerance("float32", "grad"), f"gradient of {name}")

    def test_transposed_upstream_gradient(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        output = self.call(tensors, backend)
        plain = self.upstream_gradient(output)
        names = list(self.floating)
        wanted = torch.autograd.grad(output, [tensors[n] for n in names], plain, retain_graph=True)
        found = torch.autograd.grad(output, [tensors[n] for n in names], _transposed(plain))
        for name, left, right in zip(names, found, wanted, strict=True):
            assert_close(left, right, self._tolerance("float32", "grad"), f"gradient of {name}")

    def test_every_subset_of_gradients(self, backend: str, device: str) -> None:
        """Frozen inputs get none, the others get what they would have got together."""
        arguments = self.smallest()
        _, full, grad_output = self.run(self.tensors(arguments, "float32", device), backend)
        for count in range(1, len(self.floating)):
            for chosen in itertools.combinations(self.floating, count):
                tensors = self.tensors(arguments, "float32", device, grad=chosen)
                output = self.call(tensors, backend)
                output.backward(grad_output)
                for name in self.floating:
                    if name in chosen:
                        assert_close(tensors[name].grad, full[name], self._tolerance("float32", "grad"), f"{name} of {chosen}")
                    else:
                        assert tensors[name].grad is None

    def test_no_gradient_is_recorded_without_need(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        recorded = self.call(tensors, backend)
        assert recorded.requires_grad
        with torch.no_grad():
            assert_bits_equal(self.call(tensors, backend), recorded, "under no_grad")
        with torch.inference_mode():
            inferred = self.call(tensors, backend)
            assert not inferred.requires_grad
            assert_bits_equal(inferred.clone(), recorded, "under inference_mode")
        assert not self.call(self.tensors(self.smallest(), "float32", device), backend).requires_grad

    def test_backward_twice_through_a_retained_graph(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        output = self.call(tensors, backend)
        grad_output = self.upstream_gradient(output)
        leaves = [tensors[n] for n in self.floating]
        first = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
        second = torch.autograd.grad(output, leaves, grad_output)
        for name, left, right in zip(self.floating, first, second, strict=True):
            assert_close(right, left, self._tolerance("float32", "grad"), f"gradient of {name}")
        with pytest.raises(RuntimeError):
            torch.autograd.grad(output, leaves, grad_output)

    @pytest.mark.backends("emu", "cuda", "hip", "musa")
    def test_float64_where_the_spec_has_none(self, backend: str, device: str) -> None:
        if "float64" in self.spec.dtypes[backend]:
            pytest.skip(f"{backend} takes float64")
        tensors = self.tensors(self.smallest(), ("float64", *["float32"] * len(self.geometry)), device)
        with pytest.raises((TypeError, RuntimeError), match="float64"):
            self.call(tensors, backend, backend=backend)

    def test_inputs_are_left_alone(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        before = {k: v.clone() for k, v in tensors.items() if isinstance(v, torch.Tensor)}
        self.run(tensors, backend)
        for name, copy in before.items():
            assert_bits_equal(tensors[name], copy, name)

    def test_an_input_changed_before_backward_is_noticed(self, backend: str, device: str) -> None:
        if backend == "reference":
            pytest.skip("the reference saves copies")
        if self.saved is not None and self.storage[0] not in self.saved:
            pytest.skip("the backward does not read it")
        tensors = self.tensors(self.smallest(), "float32", device, grad=self.geometry or self.storage)
        live = dict(tensors)
        live[self.storage[0]] = tensors[self.storage[0]].detach().clone()
        output = self.call(live, backend)
        live[self.storage[0]].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def _scattered_integer(tensor: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
    buffer[..., ::2] = tensor
    return buffer[..., ::2]
