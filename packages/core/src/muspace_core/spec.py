# SPDX-License-Identifier: Apache-2.0
"""Operators as data: everything that dispatch, tests, benchmarks, the matrix page and the command line say about one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

STATUSES: Final = ("run", "emulated", "compiled", "stub-compiled", "absent")


@dataclass(frozen=True)
class Status:
    """How far one backend of an operator has been shown to work, and where.

    ``kind`` is one of ``run`` (executed on that hardware), ``emulated`` (the kernel text executed under the SIMT emulation),
    ``compiled``, ``stub-compiled`` (against stand-in headers) and ``absent``; ``note`` says where and when.
    """

    kind: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in STATUSES:
            raise ValueError(f"kind: expected one of {STATUSES}, got {self.kind!r}")


@dataclass(frozen=True)
class Tolerance:
    """Largest deviation from a higher-precision reference, relative to the reference's peak magnitude."""

    output: float
    grad: float


@dataclass(frozen=True)
class Switch:
    """An environment variable that changes one operator."""

    name: str
    default: str
    effect: str


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    ``schema`` is the torch schema of the registered forward operator without its name; ``dtypes`` maps a backend to the
    storage dtypes it accepts; ``reference`` is false for an operator that must never fall back.
    """

    family: str
    name: str
    summary: str
    schema: str
    backward_schema: str | None
    backends: Mapping[str, Status]
    dtypes: Mapping[str, tuple[str, ...]]
    tolerances: Mapping[str, Tolerance]
    determinism: str
    forward_routes: tuple[str, ...]
    backward_routes: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    models: tuple[str, ...] = ()
    lineage: str = ""
    reference: bool = True
    wheel: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wheel", f"muspace-{self.family}")

    @property
    def package(self) -> str:
        """Import name of the wheel."""
        return f"muspace_{self.family}"

    @property
    def qualified_name(self) -> str:
        """Name under ``torch.ops`` and in the profiler, ``muspace_<family>::<operator>``."""
        return f"muspace_{self.family}::{self.name}"
