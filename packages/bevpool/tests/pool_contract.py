# SPDX-License-Identifier: Apache-2.0
"""What the five pooling operators promise beyond the contract of every operator: plans, and bits that repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import on_backend, represented
from muspace_core.testing.cases import Arguments, Case
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.contract import OpContract

NATIVE = ("cpu", "emu", "cuda", "hip", "musa")
#: Inherited tests that start interpreters without a library, seconds each.
IN_NEW_PROCESSES = ("test_missing_library", "test_missing_library_under_strict_mode")


class PoolContract(OpContract):
    """A subclass also sets ``plan``, ``indices``, ``strangers`` and may set ``optional``."""

    reproducible = True
    #: ``plan(tensors, **keywords)``: the public builder given the tensors of a call, as ``staticmethod``.
    plan: ClassVar[Callable[..., Any]]
    #: Index arguments, which a plan stands for.
    indices: ClassVar[tuple[str, ...]]
    #: Those of them that may be ``None`` beside a plan.
    optional: ClassVar[tuple[str, ...]] = ()
    #: The one operator of the five whose processes without a library are started: they share dispatcher and library.
    in_new_processes: ClassVar[str] = "bev_pool_v2"
    #: Changes of the smallest call's arrays after which its plan no longer fits.
    strangers: ClassVar[Mapping[str, Callable[[Arguments], Arguments]]] = {}

    @pytest.fixture(autouse=True)
    def _one_operator_starts_processes(self, request: pytest.FixtureRequest) -> None:
        if getattr(request.function, "__name__", "") in IN_NEW_PROCESSES and self.spec.name != self.in_new_processes:
            pytest.skip(f"shown on {self.in_new_processes}: one dispatcher, one library")

    def planned(self, tensors: Arguments, backend: str, **keywords: Any) -> Any:
        return on_backend(type(self).plan)(backend, tensors, **keywords)

    def _same(self, tensors: Arguments, backend: str, plan: Any, what: str, **keywords: Any) -> None:
        """Output and gradients with the plan have the bits of the call without."""
        output, gradients, _ = self.run(tensors, backend, **keywords)
        found, found_gradients, _ = self.run(tensors, backend, plan=plan, **keywords)
        assert_bits_equal(found, output, f"output, {what}")
        self._gradients_repeat(found_gradients, gradients, backend, what)

    def _gradients_repeat(self, found: Mapping[str, Any], wanted: Mapping[str, Any], backend: str, what: str = "again") -> None:
        """Same bits; the reference is composed of torch's operators, some of which add in any order."""
        for name in self.floating:
            if backend == "reference":
                assert_close(found[name], wanted[name], self._tolerance(str(found[name].dtype).partition(".")[2], "grad"))
            else:
                assert_bits_equal(found[name], wanted[name], f"gradient of {name}, {what}")

    # ---- plans -----------------------------------------------------------------------------------------------------
    def test_a_plan_gives_the_same_bits(self, case: Case, backend: str, device: str) -> None:
        tensors = self.tensors(case.build(), "float32", device)
        self._same(tensors, backend, self.planned(tensors, backend, **case.keywords), case.name, **case.keywords)

    def test_a_plan_serves_every_dtype(self, dtype: str, backend: str, device: str) -> None:
        plan = self.planned(self.tensors(self.smallest(), "float32", device), backend)
        self._same(self.tensors(self.smallest(), dtype, device), backend, plan, dtype)

    def test_a_plan_serves_other_numbers(self, backend: str, device: str) -> None:
        """The features of the next frames, in another order of use, after a gradient was taken."""
        tensors = self.tensors(self.smallest(), "float32", device)
        plan = self.planned(tensors, backend)
        for scale in (1.0, -3.0, 0.0, 1.0):
            changed = tensors | {name: tensors[name] * scale + scale for name in self.floating}
            self._same(changed, backend, plan, f"scaled by {scale}")

    def test_a_plan_serves_other_channels(self, backend: str, device: str) -> None:
        """Indices know nothing of channels: one plan for the image features of any network."""
        widest = next(c for c in self.cases if c.name == "c32")
        narrow = next(c for c in self.cases if c.name == "c3")
        plan = self.planned(self.tensors(narrow.build(), "float32", device), backend)
        wide = narrow.build() | {n: widest.build()[n] for n in self.floating}
        for name, value in widest.build().items():
            if name == "bev_feat_shape":
                wide[name] = value
        self._same(self.tensors(wide, "float32", device), backend, plan, "32 channels by the plan of 3")

    def test_indices_may_be_left_out_beside_a_plan(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        plan = self.planned(tensors, backend)
        output, gradients, _ = self.run(tensors, backend)
        found, found_gradients, _ = self.run(tensors | dict.fromkeys(self.optional), backend, plan=plan)
        assert_bits_equal(found, output, "output")
        self._gradients_repeat(found_gradients, gradients, backend)

    def test_a_plan_outlives_its_indices(self, backend: str, device: str) -> None:
        """A plan is made once and its index tensors may then be overwritten."""
        tensors = self.tensors(self.smallest(), "float32", device)
        output, gradients, _ = self.run(tensors, backend)
        given = {k: v.clone() if k in self.indices else v for k, v in tensors.items()}
        plan = self.planned(given, backend)
        for name in self.indices:
            given[name].zero_()
        found, found_gradients, _ = self.run(tensors, backend, plan=plan)
        assert_bits_equal(found, output, "output")
        self._gradients_repeat(found_gradients, gradients, backend)

    def test_a_plan_of_other_sizes_is_refused(self, backend: str, device: str) -> None:
        plan = self.planned(self.tensors(self.smallest(), "float32", device), backend)
        for name, change in self.strangers.items():
            other = self.tensors(change(self.smallest()), "float32", device)
            self.call(other, backend)
            with pytest.raises(ValueError) as caught:
                self.call(other, backend, plan=plan)
            assert str(caught.value).startswith("plan: expected "), (name, caught.value)

    @pytest.mark.parametrize("wrong", ["plan", 1, [1, 2], "tensor"])
    def test_only_a_plan_is_a_plan(self, wrong: Any, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        given = torch.zeros(4, dtype=torch.int32, device=device) if wrong == "tensor" else wrong
        with pytest.raises(TypeError, match=r"^plan: expected "):
            self.call(tensors, backend, plan=given)

    def test_a_plan_of_another_device_is_refused(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        plan = self.planned(tensors, backend)
        elsewhere = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
        with pytest.raises(ValueError, match=r"^plan: expected "):
            self.call(elsewhere, backend, plan=plan)
        if device != "cpu":
            on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
            with pytest.raises(ValueError, match=r"^plan: expected "):
                self.call(on_host, backend, plan=plan)

    def test_a_plan_from_inference_mode_trains(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        with torch.inference_mode():
            plan = self.planned(tensors, backend)
            self.call(tensors, backend, plan=plan)
        self._same(tensors, backend, plan, "plan of an inference")

    def test_the_builder_takes_strided_indices(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        strided = dict(tensors)
        for name in self.indices:
            wide = tensors[name].repeat_interleave(2, -1)
            strided[name] = wide[..., ::2]
            assert strided[name].numel() < 2 or not strided[name].is_contiguous()
        self._same(tensors, backend, self.planned(strided, backend), "strided indices")

    @pytest.mark.backends(*NATIVE)
    def test_a_planned_call_compiles(self, backend: str, device: str) -> None:
        torch._dynamo.reset()
        tensors = self.tensors(self.smallest(), "float32", device)
        plan = self.planned(tensors, backend)
        output, gradients, grad_output = self.run(tensors, backend, plan=plan)
        names = self.floating
        function = self._function(tensors, names, backend, plan=plan)
        compiled = torch.compile(lambda *v: function(*v) * 2, backend="aot_eager", fullgraph=True)
        live = [tensors[n].detach().requires_grad_() for n in names]
        result = compiled(*live)
        assert_bits_equal(result, output * 2, "compiled output")
        for name, found in zip(names, torch.autograd.grad(result, live, grad_output * 0.5), strict=True):
            assert_bits_equal(found, gradients[name], f"gradient of {name}")

    # ---- bits ------------------------------------------------------------------------------------------------------
    def test_everything_repeats_its_bits(self, case: Case, backend: str, device: str) -> None:
        """Without any switch; and the deterministic switch changes nothing."""
        tensors = self.tensors(case.build(), "float32", device)
        results = []
        for switch in (False, False, True):
            torch.use_deterministic_algorithms(switch)
            results.append(self.run(tensors, backend, **case.keywords))
        torch.use_deterministic_algorithms(False)
        for output, gradients, _ in results[1:]:
            assert_bits_equal(output, results[0][0], "output")
            self._gradients_repeat(gradients, results[0][1], backend)

    @pytest.mark.backends("cpu")
    def test_the_thread_count_changes_no_bit(self, case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = self.tensors(case.build(), "float32")
        plans = []
        results = []
        for threads in ("1", "2", "5"):
            monkeypatch.setenv("MUSPACE_NUM_THREADS", threads)
            plans.append(self.planned(tensors, "cpu", **case.keywords))
            results.append(self.run(tensors, "cpu", **case.keywords))
        # A plan made by one number of threads, used by another.
        results += [self.run(tensors, "cpu", plan=plan, **case.keywords) for plan in plans]
        for output, gradients, _ in results[1:]:
            assert_bits_equal(output, results[0][0], "output")
            self._gradients_repeat(gradients, results[0][1], backend)

    def test_the_check_changes_nothing(self, case: Case, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Points outside the grid belong to a right call."""
        tensors = self.tensors(case.build(), "float32", device)
        wanted, gradients, _ = self.run(tensors, backend, **case.keywords)
        monkeypatch.setenv("MUSPACE_CHECK", "1")
        found, found_gradients, _ = self.run(tensors, backend, **case.keywords)
        assert_bits_equal(found, wanted, "output")
        self._gradients_repeat(found_gradients, gradients, backend)

    def test_output_is_summed_once(self, backend: str, device: str) -> None:
        """Integers: sums in any order are exact, so nothing may be lost, doubled or put elsewhere."""
        case = self.cases[-1 if backend != "emu" else 0]
        tensors = self.tensors(case.build(), "float32", device)
        whole = tensors | {name: (tensors[name] * 4).round() for name in self.floating}
        output, _, grad_output = self.run(whole, backend, **case.keywords)
        wanted, _ = type(self).oracle(self.represented(whole), represented(grad_output), False)
        assert_close(output, wanted, 1e-30, "output of integers")

    @pytest.mark.parametrize("shift", [1, 3])
    def test_memory_of_any_alignment(self, shift: int, dtype: str, backend: str, device: str) -> None:
        """Contiguous views that begin one element into their memory: wide loads may not be taken for granted."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device=tensor.device)
            return buffer[shift:].view(tensor.shape).copy_(tensor)

        for case in (c for c in self.cases if c.name in ("tiny", "c8", "c32", "summed_c32")):
            tensors = self.tensors(case.build(), dtype, device)
            output, gradients, grad_output = self.run(tensors, backend, **case.keywords)
            elsewhere = {k: moved(v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
            live = elsewhere | {k: elsewhere[k].detach().requires_grad_() for k in self.floating}
            found = self.call(live, backend, **case.keywords)
            assert_bits_equal(found, output, f"output of {case.name}")
            self._gradients_repeat(self.gradients(live, found, moved(grad_output.contiguous())), gradients, backend, case.name)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_a_non_finite_number_stays_where_it_belongs(self, number: float, backend: str, device: str) -> None:
        """One of them in the features, and one in the depth: only the sums that use it may show it."""
        for case in (c for c in self.cases if c.name in ("tiny", "c33", "borders", "odd_plane", "heights")):
            for name in self.floating:
                tensors = self.tensors(case.build(), "float32", device)
                flat = tensors[name].view(-1)
                flat[flat.numel() // 3] = number
                output, gradients, grad_output = self.run(tensors, backend, **case.keywords)
                with np.errstate(invalid="ignore"):
                    wanted, of = type(self).oracle(self.represented(tensors), represented(grad_output), False)
                assert_close(output, wanted, 2e-6, f"output of {case.name} with {number} in {name}")
                for other in self.floating:
                    assert_close(gradients[other], of[other], 1e-5, f"gradient of {other} with {number} in {name}, {case.name}")

    # ---- gradient --------------------------------------------------------------------------------------------------
    @pytest.mark.backends("cpu", "reference")
    def test_gradcheck(self, backend: str) -> None:
        for case in itertools.islice((c for c in self.cases if c.name in ("tiny", "c3", "c1", "sweeps_summed")), 3):
            tensors = self.tensors(case.build(), "float64", grad=True)
            leaves = tuple(tensors[n] for n in self.floating)
            function = self._function(tensors, self.floating, backend, **case.keywords)
            torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=case.name != "tiny")
