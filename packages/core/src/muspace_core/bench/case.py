# SPDX-License-Identifier: Apache-2.0
"""What an operator family says about its benchmarks; ``packages/<family>/bench/cases/`` is made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from muspace_core.spec import Tolerance

#: Tensors by argument name; after ``prepare`` also what a caller computes once, such as a plan.
Inputs = dict[str, Any]

#: ``bwd_ordered`` is the backward under ``torch.use_deterministic_algorithms(True)``.
PASSES: Final = ("fwd", "bwd", "bwd_ordered")
#: Device types of accelerators, and the one on which peers and goals were measured.
GPU: Final = ("cuda", "musa")
H200: Final = "NVIDIA H200"
DTYPE_ALIASES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SHORT_DTYPES: Final = {name: alias for alias, name in DTYPE_ALIASES.items()}


@dataclass(frozen=True)
class Work:
    """What one call must do at least, counted from its actual inputs.

    ``gathered_bytes`` are the bytes that gathers ask of the caches, ``scattered_adds`` the fp32 additions if every sample
    adds for itself, ``launches`` the kernels that wait for one another.
    """

    read_bytes: int
    written_bytes: int
    flops: int = 0
    flop_kind: str = "float32"
    gathered_bytes: int = 0
    scattered_adds: int = 0
    launches: int = 1
    syncs: int = 0

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must cross DRAM even with perfect reuse."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Bar:
    """What the best peer reaches and what ours must reach on one device, for one dtype and pass.

    ``met_by`` says which column has to meet the goal: ``graph`` (replay) or ``wall`` (eager, back to back), the latter
    with ``allowance_us`` for the host's share of the call. With ``baseline`` the goal is an estimate, and what counts is the
    speed-up over the case's baseline in the same run.
    """

    device: str
    goal_us: float | None = None
    peer_us: float | None = None
    peer: str = ""
    met_by: str = "graph"
    allowance_us: float = 0.0


@dataclass(frozen=True)
class BenchCase:
    """One named shape of one operator.

    ``inputs(dtype, device)`` makes the arguments by name; ``call(inputs, backend)`` is the user's call; ``reference`` is
    its meaning and is fed with ``exact(inputs)``: the same numbers in fp64.  ``baseline`` is the best plain PyTorch
    formulation, timed in the same run; ``undecided(inputs)`` marks elements that the contract leaves open, of an argument's
    gradient or, as ``output``, of the result (they receive no gradient either).  ``prepare(inputs, backend)`` and
    ``prepare_baseline(inputs)`` add what a caller computes once and not per call; it is not timed.
    """

    family: str
    operator: str
    name: str
    shape: str
    source: str
    device_types: tuple[str, ...]
    dtypes: tuple[str, ...]
    passes: tuple[str, ...]
    inputs: Callable[[torch.dtype, torch.device], Inputs]
    call: Callable[[Inputs, str], torch.Tensor]
    reference: Callable[[Inputs], torch.Tensor]
    work: Callable[[Inputs, str], Work]
    differentiable: tuple[str, ...] = ()
    exact: Callable[[Inputs], Inputs] | None = None
    undecided: Callable[[Inputs], Mapping[str, torch.Tensor]] | None = None
    baseline: Callable[[Inputs], torch.Tensor] | None = None
    baseline_name: str = "PyTorch reference"
    prepare: Callable[[Inputs, str], Inputs] | None = None
    prepare_baseline: Callable[[Inputs], Inputs] | None = None
    #: At most so many input sets take turns on a GPU: where the peers ran on fewer, so do we.
    most_sets: int = 32
    #: Whether bits must agree between two runs of ``bwd`` too, as they must of ``fwd`` and ``bwd_ordered``.
    reproducible_backward: bool = False
    #: dtype → limits where those of the operator's spec, which are for small shapes, do not hold.
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    #: (dtype, pass) → bars, one per device they were set for.
    bars: Mapping[tuple[str, str], tuple[Bar, ...]] = field(default_factory=dict)
    #: (device type, pass) → how many times faster than the baseline ours must be.
    speedups: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def bar(self, dtype: str, pass_: str, device_name: str) -> Bar | None:
        """The bar that was set for this device, if one was."""
        return next((bar for bar in self.bars.get((dtype, pass_), ()) if bar.device in device_name), None)

    def exact_inputs(self, inputs: Inputs) -> Inputs:
        """``inputs`` for the reference, floating tensors in fp64."""
        if self.exact is not None:
            return self.exact(inputs)
        return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}

    def prepared(self, inputs: Inputs, backend: str) -> Inputs:
        """``inputs`` as our call takes them."""
        return inputs if self.prepare is None else self.prepare(inputs, backend)

    def prepared_baseline(self, inputs: Inputs) -> Inputs:
        """``inputs`` as the baseline takes them."""
        return inputs if self.prepare_baseline is None else self.prepare_baseline(inputs)


def host_allowance_us(pass_: str, results: int) -> float:
    """How far an eager time may exceed the goal of its kernels: the host budget of a call, and 3 µs per allocated result."""
    return (8.0 if pass_ == "fwd" else 20.0) + 3.0 * results


def torch_dtype(name: str) -> torch.dtype:
    """``torch.dtype`` of ``float32`` or its alias ``fp32``."""
    dtype: Any = getattr(torch, DTYPE_ALIASES.get(name, name))
    return dtype
