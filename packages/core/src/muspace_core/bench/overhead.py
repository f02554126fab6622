# SPDX-License-Identifier: Apache-2.0
"""Host time of one call: what the Python layers cost beyond the kernel's own work.

Measured with one query, so that the kernel does next to nothing: wall time of a call minus the time of the output's
``torch.empty``, best of seven batches, without and with a gradient being recorded.  On a GPU nothing is waited for inside a
batch, and the host time of an in-place ``add_`` is reported beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from muspace_core.bench.case import Inputs
from muspace_core.bench.timer import synchronize

BATCHES: Final = 7
#: Budgets on an idle core for an operator of three tensors.
BUDGET_US: Final = {"without_grad_us": 8.0, "with_grad_us": 20.0}


@dataclass(frozen=True)
class OverheadCase:
    """The smallest sensible call of an operator; ``bind(inputs, backend)`` returns it without arguments left to pass."""

    family: str
    operator: str
    shape: str
    inputs: Callable[[torch.dtype, torch.device], Inputs]
    bind: Callable[[Inputs, str], Callable[[], torch.Tensor]]
    differentiable: tuple[str, ...]


def host_us(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Best host time per call over seven batches; the device's queue is drained between batches, never inside one."""
    for _ in range(20):
        call()
    best = float("inf")
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BATCHES):
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, time.perf_counter() - begin)
    finally:
        if collecting:
            gc.enable()
    synchronize(device)
    return best / calls * 1e6


def measure(case: OverheadCase, device: torch.device, backend: str = "auto", quick: bool = False) -> dict[str, Any]:
    """One row: host µs of a call without and with gradient, output allocation subtracted."""
    # A GPU queue holds about a thousand launches; a full one would make the host wait.
    # On a cpu a short batch is the likelier to run undisturbed.
    calls = 200 if quick or device.type != "cpu" else 500
    inputs = case.inputs(torch.float32, device)
    leaves = {name: x.detach().requires_grad_() if name in case.differentiable else x for name, x in inputs.items()}
    call, recording = case.bind(inputs, backend), case.bind(leaves, backend)
    output = call()
    shape, dtype = output.shape, output.dtype
    empty = host_us(lambda: torch.empty(shape, dtype=dtype, device=device), device, calls)
    plain = host_us(call, device, calls)
    recorded = host_us(recording, device, calls)
    wanted = [leaves[name] for name in case.differentiable]
    upstream = torch.ones_like(output)
    both = host_us(lambda: torch.autograd.grad(recording(), wanted, upstream), device, calls)
    scratch = torch.zeros(8, device=device)
    row: dict[str, Any] = {
        "family": case.family,
        "operator": case.operator,
        "shape": case.shape,
        "device": device.type,
        "backend": backend,
        "empty_us": empty,
        "without_grad_us": plain - empty,
        "with_grad_us": recorded - empty,
        "forward_backward_us": both - empty,
        "add_us": host_us(lambda: scratch.add_(1.0), device, calls),
        "budget_us": dict(BUDGET_US),
    }
    # The budget is one of an idle cpu core; the host time of a GPU call stands beside the one of x.add_ instead.
    on_cpu = device.type == "cpu"
    row["within_budget"] = all(row[name] <= limit for name, limit in BUDGET_US.items()) if on_cpu else None
    return row
