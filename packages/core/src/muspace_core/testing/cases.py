# SPDX-License-Identifier: Apache-2.0
"""What an operator's test module hands to the contract: cases, error cases, and how arrays become tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from muspace_core.spec import OpSpec
from muspace_core.testing.calls import as_tensors, dtypes_on, on_backend, represented, upstream_gradient

#: Ordered name -> value of every positional argument: floating ndarray, integer ndarray, or anything passed as it is.
Arguments = dict[str, Any]

FLOATING = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A named, seeded input.  ``build`` returns fresh arguments; ``keywords`` go to the operator as they are."""

    name: str
    build: Callable[[], Arguments]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    warp_sensitive: bool = False
    slow: bool = False
    #: Backends on which the case would be too long.
    skip_on: tuple[str, ...] = ()
    #: Emulated thread-points, where the case needs more than the usual budget.
    emu_budget: int = 0

    def parameter(self) -> Any:
        marks = [pytest.mark.warp_sensitive] if self.warp_sensitive else []
        marks += [pytest.mark.slow] if self.slow else []
        marks += [pytest.mark.emu_budget(self.emu_budget)] if self.emu_budget else []
        return pytest.param(self, id=self.name, marks=marks)


@dataclass(frozen=True)
class ErrorCase:
    """A call that must be refused before anything is launched.

    ``change`` edits the tensors of the smallest case in place; ``message`` is the exact text, in which ``{device}`` stands
    for the device under test.  It names the argument, what was expected and what came.
    """

    name: str
    change: Callable[[Arguments], None]
    exception: type[Exception]
    message: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def check(self, call: Callable[[], Any], device: str) -> None:
        """``call()`` raises exactly this exception."""
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert str(caught.value) == self.message.replace("{device}", device)
        assert caught.type is self.exception

    def parameter(self) -> Any:
        return pytest.param(self, id=self.name)


@dataclass(frozen=True)
class EmptyCase:
    """A dimension of size zero: ``shrink`` maps the smallest case's arguments to the empty ones."""

    name: str
    shrink: Callable[[Arguments], Arguments]

    def parameter(self) -> Any:
        return pytest.param(self, id=self.name)


class Subject:
    """The operator under test and the data about it; ``OpContract`` adds the tests.

    A subclass sets ``spec``, ``operator``, ``oracle``, ``cases`` (smallest first), ``storage`` (arguments that carry the output
    dtype), ``geometry`` (floating arguments with a dtype of their own), and may set the rest.
    """

    spec: ClassVar[OpSpec]
    #: The public function, as ``staticmethod``.
    operator: ClassVar[Callable[..., Any]]
    #: ``oracle(arguments, grad_output, double) -> (output, {argument: gradient})``, float64, as ``staticmethod``.
    oracle: ClassVar[Callable[..., tuple[np.ndarray, dict[str, np.ndarray]]]]
    cases: ClassVar[Sequence[Case]]
    storage: ClassVar[tuple[str, ...]]
    geometry: ClassVar[tuple[str, ...]] = ()
    #: Arguments that the operator takes by keyword alone.
    by_keyword: ClassVar[tuple[str, ...]] = ()
    empty_cases: ClassVar[Sequence[EmptyCase]] = ()
    error_cases: ClassVar[Sequence[ErrorCase]] = ()
    #: Other ways to write the smallest case's call: name -> change of its tensors that leaves the meaning.
    forms: ClassVar[Mapping[str, Callable[[Arguments], Arguments]]] = {}
    #: ``excused(arguments) -> {argument: mask}`` true where a gradient is compared, as ``staticmethod``.
    excused: ClassVar[Callable[[Arguments], dict[str, np.ndarray]] | None] = None
    #: Environment that leads to the ordered, bit-reproducible backward is torch's own switch; this is its route's name.
    ordered_route: ClassVar[str | None] = None
    #: The backward repeats its bits on every backend without that switch.
    reproducible: ClassVar[bool] = False
    #: Tensor arguments whose memory the backward reads; ``None``: all of them.  The others may be changed or freed before it.
    saved: ClassVar[tuple[str, ...] | None] = None

    # ---- parametrisation -------------------------------------------------------------------------------------------
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cls = metafunc.cls
        backend = metafunc.config.option.muspace_backend
        names = metafunc.fixturenames
        if "case" in names:
            chosen = [c for c in cls.cases if backend not in c.skip_on]
            metafunc.parametrize("case", [c.parameter() for c in chosen])
        if "dtype" in names:
            metafunc.parametrize("dtype", cls.dtypes_on(backend))
        if "mixed" in names:
            metafunc.parametrize("mixed", [pytest.param(m, id="-".join(m)) for m in cls.mixed_dtypes_on(backend)])
        if "error_case" in names:
            metafunc.parametrize("error_case", [c.parameter() for c in cls.error_cases])
        if "empty_case" in names:
            metafunc.parametrize("empty_case", [c.parameter() for c in cls.empty_cases])

    @classmethod
    def dtypes_on(cls, backend: str) -> tuple[str, ...]:
        """Storage dtypes the spec promises on a backend; the reference is held to what the cpu backend promises."""
        return dtypes_on(cls.spec, backend)

    @classmethod
    def mixed_dtypes_on(cls, backend: str) -> list[tuple[str, ...]]:
        """(storage, geometry...) combinations in which at least one geometry argument differs from the storage."""
        found: list[tuple[str, ...]] = []
        for storage in cls.dtypes_on(backend):
            if storage == "float64":
                found.append((storage, *["float32"] * len(cls.geometry)))
                continue
            for position in range(len(cls.geometry) + 1):
                for other in ("float32", "float16", "bfloat16"):
                    if other == storage:
                        continue
                    kinds = [other] * len(cls.geometry)
                    if position < len(cls.geometry):
                        kinds[position] = storage
                    if any(k != storage for k in kinds):
                        found.append((storage, *kinds))
        return list(dict.fromkeys(found))

    # ---- tensors ---------------------------------------------------------------------------------------------------
    @property
    def floating(self) -> tuple[str, ...]:
        return (*self.storage, *self.geometry)

    def smallest(self) -> Arguments:
        return self.cases[0].build()

    def output_dtype(self, tensors: Arguments) -> torch.dtype:
        """Dtype of the output; that of the first storage argument unless an operator promotes."""
        return tensors[self.storage[0]].dtype

    def repeats_its_bits(self, name: str, backend: str) -> bool:
        """Whether the gradient of ``name`` is promised to the bit without the deterministic switch."""
        return self.reproducible or backend == "cpu" or name in self.geometry

    def tensors(
        self,
        arguments: Arguments,
        dtypes: str | Sequence[str] = "float32",
        device: str = "cpu",
        grad: Sequence[str] | bool = (),
    ) -> Arguments:
        """Arrays as tensors: storage arguments in the first dtype, each geometry argument in its own."""
        kinds = [dtypes] * (1 + len(self.geometry)) if isinstance(dtypes, str) else list(dtypes)
        by_name = dict.fromkeys(self.storage, kinds[0]) | dict(zip(self.geometry, kinds[1:], strict=True))
        made = as_tensors(arguments, device, torch.float64, **{name: FLOATING[kind] for name, kind in by_name.items()})
        for name in self.floating if grad is True else (grad or ()):
            if made[name] is not None:
                made[name].requires_grad_()
        return made

    def represented(self, tensors: Arguments) -> Arguments:
        """The exact values the tensors hold, as float64 (and integer) arrays: what the oracle must be asked about."""
        return {name: represented(v) if isinstance(v, torch.Tensor) else v for name, v in tensors.items()}

    def call(self, tensors: Arguments, pytest_backend: str = "cpu", **keywords: Any) -> torch.Tensor:
        """The public function on the backend under test (which ``auto`` selects, except for the reference)."""
        return on_backend(self.invoke)(pytest_backend, tensors, **keywords)

    def invoke(self, tensors: Arguments, **keywords: Any) -> torch.Tensor:
        """The public function with these arguments, and no backend chosen for it."""
        positional = [v for k, v in tensors.items() if k not in self.by_keyword]
        named = {k: v for k, v in tensors.items() if k in self.by_keyword}
        return type(self).operator(*positional, **named, **keywords)

    def gradients(self, tensors: Arguments, output: torch.Tensor, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
        names = [n for n in self.floating if isinstance(tensors[n], torch.Tensor) and tensors[n].requires_grad]
        found = torch.autograd.grad(output, [tensors[n] for n in names], grad_output)
        return dict(zip(names, found, strict=True))

    def live(self, tensors: Arguments) -> Arguments:
        """The same arguments, every floating one a new leaf that requires a gradient; an absent one (None) stays absent."""
        return {
            k: v.detach().requires_grad_() if k in self.floating and isinstance(v, torch.Tensor) else v
            for k, v in tensors.items()
        }

    def run(
        self, tensors: Arguments, backend: str = "cpu", seed: int = 1, **keywords: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """Output, gradients and the seeded upstream gradient, every floating argument requiring one."""
        live = self.live(tensors)
        output = self.call(live, backend, **keywords)
        grad_output = self.upstream_gradient(output, seed)
        return output.detach(), self.gradients(live, output, grad_output), grad_output

    upstream_gradient = staticmethod(upstream_gradient)
