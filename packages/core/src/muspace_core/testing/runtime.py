# SPDX-License-Identifier: Apache-2.0
"""Contract: determinism, threads, processes, streams."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muspace_core import get_last_dispatch_report
from muspace_core.testing.cases import Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close
from muspace_core.testing.process import in_child, in_threads

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


class _Calls(torch.utils.data.Dataset):
    """Four times the same operator call, made wherever the items are fetched."""

    def __init__(self, contract: RuntimeContract, tensors: Any) -> None:
        self.contract, self.tensors = contract, tensors

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.contract.call(self.tensors)
