# SPDX-License-Identifier: Apache-2.0
"""Correctness before speed: compares one call with the reference in fp64; without a pass no time is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muspace_core.bench import draw
from muspace_core.bench.case import BenchCase, Inputs
from muspace_core.dispatch import DispatchReport, get_last_dispatch_report


@dataclass(frozen=True)
class Verdict:
    """Deviations relative to the reference's peak, by tensor; ``undecided`` is the largest share of elements left out.

    ``report`` is that of our call, before any other operator ran.
    """

    deviations: Mapping[str, float]
    limits: Mapping[str, float]
    undecided: float
    reproducible: bool
    passed: bool
    report: DispatchReport | None


@contextlib.contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """``torch.use_deterministic_algorithms`` for the duration."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def grad_output(output: torch.Tensor) -> torch.Tensor:
    """A dense, seeded gradient in the layout of the output, the same numbers for every implementation."""
    grad = torch.empty_like(output, requires_grad=False)
    return grad.copy_(draw.normal("gradient", output.shape, output.device, output.dtype))


def with_gradients(case: BenchCase, inputs: Inputs) -> Inputs:
    """The inputs as leaves that want gradients."""
    return {name: x.detach().requires_grad_() if name in case.differentiable else x for name, x in inputs.items()}


def results(case: BenchCase, inputs: Inputs, call: Any, pass_: str, upstream: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Output, and for a backward pass the gradients, of one call."""
    if pass_ == "fwd":
        with torch.no_grad():
            return {"output": call(inputs)}
    leaves = with_gradients(case, inputs)
    output = call(leaves)
    grads = torch.autograd.grad(output, [leaves[name] for name in case.differentiable], upstream)
    named = {f"grad_{name}": grad for name, grad in zip(case.differentiable, grads, strict=True)}
    return {"output": output.detach(), **named}


def deviation(actual: torch.Tensor, expected: torch.Tensor, undecided: torch.Tensor | None) -> float:
    """Largest absolute difference over the reference's peak; NaN or Inf where there is none counts as infinite."""
    difference = (actual.double() - expected).abs()
    if undecided is not None:
        difference = difference.masked_fill(undecided, 0.0)
    if difference.numel() == 0:
        return 0.0
    worst, peak = float(difference.max()), float(expected.abs().max())
    if worst != worst:
        return float("inf")
    return worst / peak if peak > 0 else worst


def check(case: BenchCase, inputs: Inputs, backend: str, pass_: str, output_limit: float, grad_limit: float) -> Verdict:
    """Runs the call twice (bits must agree where they are promised to) and the reference once."""

    def call(x: Inputs) -> torch.Tensor:
        return case.call(x, backend)

    prepared = case.prepared(inputs, backend)
    open_ = dict(case.undecided(inputs)) if case.undecided else {}
    masks = {name if name == "output" else f"grad_{name}": mask for name, mask in open_.items()}
    upstream = None
    if pass_ != "fwd":
        with torch.no_grad():
            upstream = grad_output(call(prepared))
        if "output" in masks:
            upstream = upstream.masked_fill(masks["output"], 0.0)
    with determinism(pass_ == "bwd_ordered"):
        first = results(case, prepared, call, pass_, upstream)
        report = get_last_dispatch_report()
        second = results(case, prepared, call, pass_, upstream)
    reproducible = all(torch.equal(first[name], second[name]) for name in first)
    del second, prepared
    exact_upstream = upstream.double() if upstream is not None else None
    expected = results(case, case.exact_inputs(inputs), case.reference, pass_, exact_upstream)
    deviations = {name: deviation(first[name], expected[name], masks.get(name)) for name in first}
    limits = {name: output_limit if name == "output" else grad_limit for name in first}
    share = max((float(mask.double().mean()) for name, mask in masks.items() if name in first), default=0.0)
    promised = pass_ in ("fwd", "bwd_ordered") or case.reproducible_backward
    passed = all(deviations[name] <= limits[name] for name in deviations) and (reproducible or not promised)
    return Verdict(deviations, limits, share, reproducible, passed, report)
