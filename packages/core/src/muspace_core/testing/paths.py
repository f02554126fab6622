# SPDX-License-Identifier: Apache-2.0
"""Contract: the direct call and the registered operator are the same operator, bit for bit.

Plain tensors in eager mode go straight to the library; anything else that looks like a tensor (fake, functional, batched,
logged, subclassed, meta, traced) goes through ``torch.ops``.  Every observer below takes the second way.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from muspace_core.testing.cases import Arguments, Case, Subject
from muspace_core.testing.compare import assert_bits_equal, assert_close


class OperatorLog(TorchDispatchMode):
    """Records the calls of one namespace that pass the dispatcher, with detached copies of their arguments."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
            self.calls.append((func, *copies))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name() for func, _, _ in self.calls]


class Logged(torch.Tensor):
    """Wrapper subclass: holds a plain tensor and notes every operator that reaches it."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Logged:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device, strides=held.stride())

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.seen.append(func.name())
        args, kwargs = tree_map_only(Logged, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Logged, func(*args, **kwargs))


class Named(torch.Tensor):
    """Subclass without behaviour of its own."""


class PathContract(Subject):
    """Inherited through ``OpContract``."""

    def _function(
        self, tensors: Arguments, live: tuple[str, ...], backend: str, **keywords: Any
    ) -> Callable[..., torch.Tensor]:
        """The operator as a function of the ``live`` tensors alone."""

        def function(*values: torch.Tensor) -> torch.Tensor:
            return self.call(tensors | dict(zip(live, values, strict=True)), backend, **keywords)

        return function

    def _registered(self, tensors: Arguments, backend: str) -> OperatorLog:
        """Runs forward and backward under a logger and returns it."""
        live = self.live(tensors)
        log = OperatorLog(self.spec.package)
        with log:
            output = self.call(live, backend)
            output.backward(self.upstream_gradient(output))
        log.output = output.detach()  # type: ignore[attr-defined]
        log.gradients = {n: live[n].grad for n in self.floating if live[n] is not None}  # type: ignore[attr-defined]
        return log

    @pytest.fixture(autouse=True)
    def _only_native(self, request: pytest.FixtureRequest, backend: str) -> None:
        path_test = getattr(PathContract, getattr(request.function, "__name__", ""), None) is not None
        if backend == "reference" and path_test:
            pytest.skip("the registered operator is native")

    def test_dispatch_mode_sees_the_operator(self, case: Case, backend: str, device: str) -> None:
        if case.keywords:
            pytest.skip("keywords of the public function")
        tensors = self.tensors(case.build(), "float32", device)
        output, gradients, _ = self.run(tensors, backend)
        log = self._registered(tensors, backend)
        assert log.names == [self.spec.qualified_name, f"{self.spec.qualified_name}_backward"]
        assert_bits_equal(log.output, output, "output")  # type: ignore[attr-defined]
        for name in gradients:
            self._same_gradient(log.gradients[name], gradients[name], name, backend)  # type: ignore[attr-defined]

    def _same_gradient(self, found: torch.Tensor, wanted: torch.Tensor, name: str, backend: str) -> None:
        """Bits where they are promised without the deterministic switch."""
        if self.repeats_its_bits(name, backend):
            assert_bits_equal(found, wanted, f"gradient of {name}")
        else:
            assert_close(found, wanted, 1e-5, f"gradient of {name}")

    def test_fake_tensors(self, dtype: str, backend: str, device: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        tensors = self.tensors(self.smallest(), dtype, device, grad=True)
        real = self.call(tensors, backend)
        with FakeTensorMode() as mode:
            fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
            output = self.call(fake, backend)
            assert isinstance(output, FakeTensor)
            assert (output.shape, output.dtype, output.device) == (real.shape, real.dtype, real.device)
            assert output.stride() == real.stride()
            gradients = self.gradients(fake, output, torch.ones_like(output))
        for name, gradient in gradients.items():
            assert isinstance(gradient, FakeTensor)
            assert (gradient.shape, gradient.dtype) == (tensors[name].shape, tensors[name].dtype), name

    def test_meta_tensors(self, dtype: str, backend: str) -> None:
        tensors = self.tensors(self.smallest(), dtype)
        real = self.call(tensors) if backend == "cpu" else None
        meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}
        for name in self.floating:
            meta[name].requires_grad_()
        output = self.call(meta, backend)
        assert output.is_meta and output.dtype == tensors[self.storage[0]].dtype
        assert real is None or output.shape == real.shape
        for name, gradient in self.gradients(meta, output, torch.empty_like(output)).items():
            assert gradient.is_meta and (gradient.shape, gradient.dtype) == (meta[name].shape, meta[name].dtype)

    def test_functional_tensors(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        function = self._function(tensors, self.floating, backend)
        log = OperatorLog(self.spec.package)
        with log:
            output = torch.func.functionalize(function)(*[tensors[n] for n in self.floating])
        assert log.names == [self.spec.qualified_name]
        assert_bits_equal(output, wanted, "output")

    def test_function_transforms_of_the_gradient(self, backend: str, device: str) -> None:
        """torch.func.vjp: the right numbers, or torch's own refusal (its registered operators have no rule for it)."""
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted, gradients, grad_output = self.run(tensors, backend)
        function = self._function(tensors, self.floating, backend)
        try:
            output, pull_back, *_ = torch.func.vjp(function, *[tensors[n] for n in self.floating])
        except RuntimeError as error:
            assert "functorch transforms" in str(error)
            return
        assert_bits_equal(output, wanted, "output")
        for name, gradient in zip(self.floating, pull_back(grad_output), strict=True):
            self._same_gradient(gradient, gradients[name], name, backend)

    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_vmap(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        for name in self.floating:
            stacked = torch.stack([tensors[name], tensors[name] * 0.5, tensors[name] * 0.25])
            function = self._function(tensors, (name,), backend)
            wanted = torch.stack([function(row) for row in stacked])
            assert_bits_equal(torch.vmap(function)(stacked), wanted, f"batched over {name}")

    def test_vmap_over_every_tensor(self, backend: str, device: str) -> None:
        """Indices and tables too; the reference looks into them, which vmap refuses."""
        if backend == "reference":
            pytest.skip("the reference reads its indices")
        tensors = self.tensors(self.smallest(), "float32", device)
        names = tuple(k for k, v in tensors.items() if isinstance(v, torch.Tensor))
        other = {k: tensors[k] * 0.5 if k in self.floating else tensors[k] for k in names}
        stacked = [torch.stack([tensors[k], other[k]]) for k in names]
        function = self._function(tensors, names, backend)
        wanted = torch.stack([function(*[rows[place] for rows in stacked]) for place in range(2)])
        assert_bits_equal(torch.vmap(function)(*stacked), wanted, "batched over all")

    def test_wrapper_subclass(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted, gradients, grad_output = self.run(tensors, backend)
        wrapped = {k: Logged(v.detach().clone()) if k in self.floating else v for k, v in tensors.items()}
        for name in self.floating:
            wrapped[name].requires_grad_()
        Logged.seen = []
        output = self.call(wrapped, backend)
        assert isinstance(output, Logged)
        assert self.spec.qualified_name in Logged.seen
        assert_bits_equal(output.held, wanted, "output")
        found = self.gradients(wrapped, output, Logged(grad_output))
        assert f"{self.spec.qualified_name}_backward" in Logged.seen
        for name in self.floating:
            gradient = found[name]
            assert isinstance(gradient, Logged)
            self._same_gradient(gradient.held, gradients[name], name, backend)

    def test_distributed_tensors(self, backend: str, device: str) -> None:
        """A DTensor meets torch's dispatcher, which refuses what it cannot shard; the library never sees one."""
        if not torch.distributed.is_available() or torch.distributed.is_initialized():
            pytest.skip("torch.distributed: not available, or in use")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        try:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        except RuntimeError as error:
            pytest.skip(f"torch.distributed: gloo finds no network interface ({type(error).__name__})")
        try:
            mesh = init_device_mesh(device.partition(":")[0], (1,))
            shared = {
                k: distribute_tensor(v, mesh, [Replicate()]) if isinstance(v, torch.Tensor) else v for k, v in tensors.items()
            }
            try:
                output = self.call(shared, backend)
            except (NotImplementedError, RuntimeError) as error:
                assert "sharding" in str(error) or "DTensor" in str(error)
            else:
                assert isinstance(output, DTensor)
                assert_bits_equal(output.to_local(), wanted, "local part")
        finally:
            torch.distributed.destroy_process_group()

    def test_plain_subclass_and_parameter(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        for name in self.floating:
            named = self.call(tensors | {name: tensors[name].as_subclass(Named)}, backend)
            assert_bits_equal(named.as_subclass(torch.Tensor), wanted, f"{name} a subclass")
            parameter = self.call(tensors | {name: torch.nn.Parameter(tensors[name])}, backend)
            assert parameter.requires_grad
            assert_bits_equal(parameter, wanted, f"{name} a Parameter")

    def test_export(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        wanted = self.call(tensors, backend)
        function = self._function(tensors, tuple(k for k, v in tensors.items() if isinstance(v, torch.Tensor)), backend)

        class Model(torch.nn.Module):
            def forward(self, *values: torch.Tensor) -> torch.Tensor:
                return function(*values)

        values = tuple(v for v in tensors.values() if isinstance(v, torch.Tensor))
        program = torch.export.export(Model(), values, strict=False)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert any(self.spec.qualified_name.replace("::", ".") in target for target in targets), targets
        assert_bits_equal(program.module()(*values), wanted, "exported program")

    def test_opcheck(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device)
        log = self._registered(tensors, backend)
        for func, args, keywords in log.calls:
            live = args
            if func.name() == self.spec.qualified_name:
                live = tree_map_only(torch.Tensor, lambda t: t.requires_grad_() if t.is_floating_point() else t, args)
            torch.library.opcheck(func, live, keywords)

    def test_fake_kernels_follow_other_layouts(self, backend: str, device: str) -> None:
        """The fake kernel's strides are those of the real one for transposed inputs too."""
        tensors = self.tensors(self.smallest(), "float32", device)
        for func, args, keywords in self._registered(tensors, backend).calls:
            turned = tree_map_only(torch.Tensor, _reversed_storage, args)
            torch.library.opcheck(func, turned, keywords, test_utils=("test_schema", "test_faketensor"))

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_compile(self, dynamic: bool, backend: str, device: str) -> None:
        self._compiled("aot_eager", dynamic, backend, device)

    def test_compile_with_inductor(self, backend: str, device: str) -> None:
        if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("inductor: no C++ compiler")
        self._compiled("inductor", False, backend, device)

    def _compiled(self, compiler: str, dynamic: bool, backend: str, device: str) -> None:
        torch._dynamo.reset()
        tensors = self.tensors(self.smallest(), "float32", device)
        names = tuple(k for k, v in tensors.items() if isinstance(v, torch.Tensor))
        function = self._function(tensors, names, backend)
        # Work before and after, so that the operator sits inside a graph and not at its rim.
        compiled = torch.compile(lambda *v: function(*v) * 2, backend=compiler, fullgraph=True, dynamic=dynamic)
        for shift in (0.0, 0.125):
            moved = {k: v + shift if k in self.storage else v for k, v in tensors.items()}
            output, gradients, grad_output = self.run(moved, backend)
            live = {k: v.detach().requires_grad_() if k in self.floating else v for k, v in moved.items()}
            result = compiled(*[live[n] for n in names])
            assert_bits_equal(result, output * 2, "compiled output")
            found = self.gradients(live, result, grad_output * 0.5)
            for name in self.floating:
                self._same_gradient(found[name], gradients[name], name, backend)
        with torch.no_grad():
            assert_bits_equal(compiled(*[tensors[n] for n in names]), self.call(tensors, backend) * 2, "compiled, no gradient")

    def test_profiler_names_the_operator(self, backend: str, device: str) -> None:
        tensors = self.tensors(self.smallest(), "float32", device, grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output = self.call(tensors, backend)
            output.sum().backward()
        names = {event.key for event in profile.key_averages()}
        assert self.spec.qualified_name in names, sorted(names)
        assert any(self.spec.name in name and "ackward" in name for name in names), sorted(names)


def _reversed_storage(tensor: torch.Tensor) -> torch.Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)
