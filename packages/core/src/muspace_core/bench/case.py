# SPDX-License-Identifier: Apache-2.0
"""What an operator family says about its benchmarks; ``packages/<family>/bench/cases.py`` is made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

Inputs = dict[str, torch.Tensor]

#: ``bwd_ordered`` is the backward under ``torch.use_deterministic_algorithms(True)``.
PASSES: Final = ("fwd", "bwd", "bwd_ordered")
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
    with ``allowance_us`` for the host's share of the call.
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
    formulation, timed in the same run; ``undecided(inputs)`` marks gradient elements that the contract leaves open.
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
    #: (dtype, pass) → bars, one per device they were set for.
    bars: Mapping[tuple[str, str], tuple[Bar, ...]] = field(default_factory=dict)
    #: pass → how many times faster than the baseline ours must be on a cpu.
    cpu_speedups: Mapping[str, float] = field(default_factory=dict)

    def bar(self, dtype: str, pass_: str, device_name: str) -> Bar | None:
        """The bar that was set for this device, if one was."""
        return next((bar for bar in self.bars.get((dtype, pass_), ()) if bar.device in device_name), None)

    def exact_inputs(self, inputs: Inputs) -> Inputs:
        """``inputs`` for the reference, floating tensors in fp64."""
        if self.exact is not None:
            return self.exact(inputs)
        return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def torch_dtype(name: str) -> torch.dtype:
    """``torch.dtype`` of ``float32`` or its alias ``fp32``."""
    dtype: Any = getattr(torch, DTYPE_ALIASES.get(name, name))
    return dtype
