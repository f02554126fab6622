# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend of a call, says why another one would not do, and remembers what the last public call did."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from muspace_core import environment
from muspace_core.device import BACKENDS, DEVICE_TYPES, backend_for
from muspace_core.errors import BackendUnavailable
from muspace_core.loader import NativeLibrary
from muspace_core.spec import OpSpec

_deterministic = torch.are_deterministic_algorithms_enabled
_is_compiling = torch.compiler.is_compiling
REQUESTS = ("auto", "native", *BACKENDS, "reference")


@dataclass(frozen=True)
class DispatchReport:
    """What the last public operator call of this process did.

    Recorded by forward calls in eager mode only: backward passes, compiled graphs and calls that raise record nothing.
    Where a gradient was recorded, ``route`` is ``<forward>+<backward>``; the backward route is fixed at forward time.
    """

    operator: str
    device: str
    dtype: str
    requested_backend: str
    selected_backend: str
    native_fallback: bool
    route: str
    reason: str
    library: str | None
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, keys in the order above."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """Outcome of a dispatch decision: the backend, why, whether it is a fallback, and the library that was loaded for it."""

    backend: str
    reason: str
    fallback: bool = False
    path: str | None = None
    module: Any = None


_SHAPES_ONLY = Choice("meta", "shapes only")


class Dispatcher:
    """The dispatch decisions of one operator over one family's libraries.

    ``route(module, backend, *details)`` names the route of a call from what ``record`` was given; it runs when a report is
    read, and ``module`` is the library that ran then.
    """

    def __init__(self, spec: OpSpec, library: NativeLibrary, route: Callable[..., str]) -> None:
        self.spec = spec
        self.library = library
        self.route = route
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._warned: set[str] = set()
        _DISPATCHERS[spec.qualified_name] = self

    def why_not(self, backend: str, *tensors: torch.Tensor) -> str | None:
        """The sentence with which dispatch would refuse ``backend`` for a call whose first tensor is ``tensors[0]``.

        ``None`` if it would run there, by whatever backend ``auto`` and ``native`` stand for. Without tensors it speaks of
        the library alone.
        """
        _check_request(backend, "backend")
        if not tensors:
            if backend == "reference" and not self.spec.reference:
                return f"{self.spec.name} has no reference implementation"
            return self.library.failure(backend) if backend in BACKENDS else None
        try:
            choice = self._decide(backend, tensors[0].device.type, tensors[0].dtype)
        except BackendUnavailable as error:
            return str(error).removeprefix(f"{self.spec.name}: ")
        return choice.reason if choice.fallback else None

    def choose(self, requested: str, device: torch.device, dtype: torch.dtype) -> Choice:
        """Backend for a call; raises ``BackendUnavailable`` for a request that cannot be met and in strict mode."""
        if type(requested) is not str:
            raise TypeError(f"backend: expected a string, got {type(requested).__name__}")
        key = (requested, device, dtype, *environment.dispatch_state())
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._decide(requested, device.type, dtype)
        if choice.fallback and device.type not in self._warned:
            device_type = device.type
            self._warned.add(device_type)
            warnings.warn(
                f"{self.spec.name} runs its PyTorch reference on {device_type}: {choice.reason}",
                RuntimeWarning,
                stacklevel=4,  # the caller of the public function, through run
            )
        return choice

    def _decide(self, requested: str, device_type: str, dtype: torch.dtype) -> Choice:
        _check_request(requested, "backend")
        if device_type == "meta":
            return _SHAPES_ONLY
        reason, hint = "requested", ""
        if requested == "auto":
            reason = f"native backend of {device_type}"
            forced = environment.FORCE_BACKEND.value()
            if forced:
                _check_request(forced, environment.FORCE_BACKEND.name)
                requested, reason = forced, f"{environment.FORCE_BACKEND.name}={forced}"
                hint = f" ({reason})"
        if requested == "reference":
            if not self.spec.reference:
                raise BackendUnavailable(f"{self.spec.name} has no reference implementation{hint}")
            return Choice("reference", reason)
        backend = self._resolve(requested, device_type)
        refusal = self._refusal(backend, device_type, dtype)
        if refusal is None and backend is not None:
            return Choice(backend, reason, path=str(self.library.path(backend)), module=self.library.load(backend))
        if requested != "auto" or not self.spec.reference:
            raise BackendUnavailable(f"{self.spec.name}: {refusal}{hint}")
        if environment.STRICT.enabled():
            raise BackendUnavailable(f"{self.spec.name}: {refusal} ({environment.STRICT.name} forbids the reference)")
        return Choice("reference", str(refusal), fallback=True)

    @staticmethod
    def _resolve(requested: str, device_type: str) -> str | None:
        return backend_for(device_type) if requested in ("auto", "native") else requested

    def _refusal(self, backend: str | None, device_type: str, dtype: torch.dtype) -> str | None:
        if backend is None:
            return f"device {device_type} has no native backend"
        if DEVICE_TYPES[backend] != device_type:
            return f"backend {backend} needs tensors on {DEVICE_TYPES[backend]}, these are on {device_type}"
        if backend_for(device_type) != backend and backend != "emu":
            return f"backend {backend} needs a torch built for it, this one is built for {backend_for(device_type)}"
        name = str(dtype).removeprefix("torch.")
        accepted = self.spec.dtypes.get(backend, ())
        if name not in accepted:
            return f"backend {backend} accepts {', '.join(accepted) or 'nothing'}, got {name}"
        return self.library.failure(backend)

    def record(self, choice: Choice, requested: str, tensor: torch.Tensor, details: tuple[Any, ...]) -> None:
        """Remembers the call that made ``tensor``; one tuple assignment, rendered only when somebody asks.

        ``details`` hold sizes and flags, never a tensor, so that the report keeps no memory alive.
        """
        global _last
        if type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor):
            choice = _SHAPES_ONLY
        _last = (self, choice, requested, tensor.device, tensor.dtype, details)
        if environment.DISPATCH_LOG.enabled():
            print(f"muspace: {get_last_dispatch_report()}", file=sys.stderr)

    def run(
        self,
        requested: str,
        anchor: torch.Tensor,
        native: Callable[..., torch.Tensor],
        reference: Callable[..., torch.Tensor],
        arguments: tuple[Any, ...],
        details: tuple[Any, ...],
    ) -> torch.Tensor:
        """One public call: chooses by the device and dtype of ``anchor``, runs, records the report.

        Either ``native(*arguments, backend, deterministic)``, which enters the registered operator, or
        ``reference(*arguments)``; ``route`` gets ``(*details, deterministic, gradient recorded)``.
        """
        deterministic = _deterministic()
        if _is_compiling():
            selected = choose_while_compiling(self.spec.qualified_name, requested, anchor.device.type, anchor.dtype)
            return reference(*arguments) if selected == "reference" else native(*arguments, selected, deterministic)
        choice = self.choose(requested, anchor.device, anchor.dtype)
        output = reference(*arguments) if choice.backend == "reference" else native(*arguments, choice.backend, deterministic)
        self.record(choice, requested, output, (*details, deterministic, output.requires_grad))
        return output


_DISPATCHERS: dict[str, Dispatcher] = {}


def choose_while_compiling(qualified_name: str, requested: str, device_type: str, dtype: torch.dtype) -> str:
    """``Dispatcher.choose`` for traced code: runs once, at compile time, and is a constant of the graph."""
    return _DISPATCHERS[qualified_name].choose(requested, torch.device(device_type), dtype).backend


# What torch.compiler.assume_constant_result does, but for its import of dynamo, which takes seconds that nobody who does not
# compile should wait for.
choose_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]

_last: tuple[Dispatcher, Choice, str, torch.device, torch.dtype, tuple[Any, ...]] | None = None


def _check_request(backend: str, origin: str) -> None:
    if backend not in REQUESTS:
        raise ValueError(f"{origin}: expected one of {', '.join(REQUESTS)}; got {backend!r}")


@functools.cache
def _versions(package: str) -> dict[str, str]:
    import importlib.metadata

    found = {"torch": str(torch.__version__)}
    for distribution in ("muspace-core", package.replace("_", "-"), "apache-tvm-ffi"):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[distribution] = "source tree"
    return found


def get_last_dispatch_report() -> DispatchReport | None:
    """Report of the last public operator call of this process, or ``None`` before the first.

    >>> from muspace_core import get_last_dispatch_report
    >>> get_last_dispatch_report() is None or get_last_dispatch_report().operator != ""
    True
    """
    if _last is None:
        return None
    dispatcher, choice, requested, device, dtype, details = _last
    native = choice.backend in BACKENDS
    return DispatchReport(
        operator=dispatcher.spec.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        requested_backend=requested,
        selected_backend=choice.backend,
        native_fallback=choice.fallback,
        route=dispatcher.route(choice.module, choice.backend, *details) if native else choice.backend,
        reason=choice.reason,
        library=choice.path,
        versions=dict(_versions(dispatcher.spec.package)),
    )
