# SPDX-License-Identifier: Apache-2.0
"""Measures one case in one dtype and pass: gate, then times, then floors, peer, goal and baseline beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from muspace_core.bench import gate, timer
from muspace_core.bench.case import Bar, BenchCase, Inputs, torch_dtype
from muspace_core.bench.floors import Ceilings, cache_floor_us, dram_floor_us
from muspace_core.spec import OpSpec

#: Rotating sets together exceed the L2 cache this many times, so that no set is still cached when its turn comes.
L2_MULTIPLE: Final = 4
#: What a row has only after it was measured.
MEASURED: Final = (
    *("backend", "route", "undecided_share", "reproducible", "error"),
    *("wall_us", "graph_us", "graph_error", "timing", "peak_bytes", "input_sets", "working_set_bytes"),
    *("work", "dram_floor_us", "cache_floor_us", "over_dram_floor", "over_cache_floor"),
    *("baseline_us", "baseline_peak_bytes", "speedup", "goal_met"),
)


@dataclass(frozen=True)
class Plan:
    """Where and how thoroughly to measure."""

    device: torch.device
    device_name: str
    l2_bytes: int
    ceilings: Ceilings
    backend: str = "auto"
    quick: bool = False
    baseline: bool = True

    @property
    def effort(self) -> timer.Effort:
        return timer.Effort.for_device(self.device, self.quick)


def measure(case: BenchCase, spec: OpSpec | None, dtype: str, pass_: str, plan: Plan) -> dict[str, Any]:
    """One row. A row that fails its gate or cannot run has ``error`` or ``deviations`` and no time."""
    row = _blank(case, dtype, pass_, plan)
    try:
        if spec is None:
            raise LookupError(f"{case.family} has no operator {case.operator}")
        inputs = case.inputs(torch_dtype(dtype), plan.device)
        _judge(row, case, spec, inputs, plan)
        if row["correct"]:
            _time(row, case, inputs, pass_, plan)
    except Exception as error:  # whatever goes wrong in one row must not lose the others
        row["error"] = _first_line(error)
        timer.release_memory(plan.device)
    return row


def _judge(row: dict[str, Any], case: BenchCase, spec: OpSpec, inputs: Inputs, plan: Plan) -> None:
    """The gate's verdict and the floors."""
    limits = case.tolerances.get(row["dtype"]) or spec.tolerances[row["dtype"]]
    verdict = gate.check(case, inputs, plan.backend, row["pass"], limits.output, limits.grad)
    report = verdict.report
    row.update(
        backend=report.selected_backend if report else None,
        route=report.route if report else None,
        correct=verdict.passed,
        deviations=dict(verdict.deviations),
        limits=dict(verdict.limits),
        undecided_share=verdict.undecided,
        reproducible=verdict.reproducible,
    )
    work = case.work(inputs, row["pass"])
    row["work"] = {**asdict(work), "compulsory_bytes": work.compulsory_bytes}
    row["dram_floor_us"] = dram_floor_us(work, plan.ceilings)
    row["cache_floor_us"] = cache_floor_us(work, plan.ceilings)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _blank(case: BenchCase, dtype: str, pass_: str, plan: Plan) -> dict[str, Any]:
    bar = case.bar(dtype, pass_, plan.device_name)
    row: dict[str, Any] = {
        "family": case.family,
        "operator": case.operator,
        "case": case.name,
        "shape": case.shape,
        "source": case.source,
        "dtype": dtype,
        "pass": pass_,
        "requested_backend": plan.backend,
        "peer": bar.peer or None if bar else None,
        "peer_us": bar.peer_us if bar else None,
        "goal_us": bar.goal_us if bar else None,
        "goal_met_by": bar.met_by if bar else None,
        "goal_speedup": case.speedups.get((plan.device.type, pass_)),
        "baseline": case.baseline_name if case.baseline else None,
        "correct": False,
        "deviations": {},
        "limits": {},
    }
    return row | dict.fromkeys(MEASURED)


def _bytes(values: Iterable[Any]) -> int:
    """Of tensors and of plans."""
    return sum(getattr(value, "nbytes", 0) for value in values)


def _copies(case: BenchCase, inputs: Inputs, plan: Plan) -> list[Inputs]:
    """The input sets to rotate through: one on a cpu or beyond the cache, else enough copies to defeat the cache."""
    size = _bytes(inputs.values())
    if plan.device.type == "cpu" or not plan.l2_bytes or not size:
        return [inputs]
    count = min(case.most_sets, max(1, math.ceil(L2_MULTIPLE * plan.l2_bytes / size)))
    return [inputs, *({name: x.clone() for name, x in inputs.items()} for _ in range(count - 1))]


def _calls(
    case: BenchCase, sets: Sequence[Inputs], call: Callable[[Inputs], torch.Tensor], pass_: str
) -> list[Callable[[], Any]]:
    """What is timed: the public call, or autograd's backward through it with the forward done beforehand."""
    if pass_ == "fwd":
        return [functools.partial(call, inputs) for inputs in sets]
    calls: list[Callable[[], Any]] = []
    upstream: torch.Tensor | None = None
    for inputs in sets:
        leaves = gate.with_gradients(case, inputs)
        output = call(leaves)
        upstream = gate.grad_output(output) if upstream is None else upstream
        wanted = [leaves[name] for name in case.differentiable]
        calls.append(functools.partial(torch.autograd.grad, output, wanted, upstream, retain_graph=True))
    return calls


def _baseline(row: dict[str, Any], case: BenchCase, sets: Sequence[Inputs], pass_: str, plan: Plan) -> list[Callable[[], Any]]:
    """Calls of the baseline, each of which ran once; empty, with the reason in the row, if it cannot be had."""
    if case.baseline is None or not plan.baseline or pass_ == "bwd_ordered":
        return []
    try:
        calls = _calls(case, [case.prepared_baseline(inputs) for inputs in sets], case.baseline, pass_)
        row["baseline_peak_bytes"] = timer.peak_memory(calls[0], plan.device)
        for call in calls:
            call()
        timer.synchronize(plan.device)
    except RuntimeError as error:  # most likely out of memory
        row["baseline"] = f"{case.baseline_name}: {_first_line(error)}"
        timer.release_memory(plan.device)
        return []
    return calls


def _time(row: dict[str, Any], case: BenchCase, inputs: Inputs, pass_: str, plan: Plan) -> None:
    sets = _copies(case, inputs, plan)
    prepared = [case.prepared(entry, plan.backend) for entry in sets]

    def ours() -> list[Callable[[], Any]]:
        return _calls(case, prepared, lambda x: case.call(x, plan.backend), pass_)

    with gate.determinism(pass_ == "bwd_ordered"):
        contenders = [ours()]
        row["peak_bytes"] = timer.peak_memory(contenders[0][0], plan.device)
        plain = _baseline(row, case, sets[:2], pass_, plan)
        wall, *baseline = timer.time_alternately([*contenders, *([plain] if plain else [])], plan.device, plan.effort)
        del contenders, plain
        graph, row["graph_error"] = timer.time_graph(ours, plan.device, plan.effort)
    row.update(
        wall_us=_representative(wall, plan),
        graph_us=_representative(graph, plan) if graph else None,
        timing={"wall": asdict(wall), "graph": asdict(graph) if graph else None},
        input_sets=len(sets),
        working_set_bytes=sum(_bytes(entry.values()) for entry in prepared),
    )
    best = min(row["wall_us"], row["graph_us"] or row["wall_us"])
    row["over_dram_floor"] = best / row["dram_floor_us"] if row["dram_floor_us"] else None
    row["over_cache_floor"] = best / row["cache_floor_us"] if row["cache_floor_us"] else None
    if baseline:
        row["baseline_us"] = _representative(baseline[0], plan)
        row["speedup"] = row["baseline_us"] / row["wall_us"]
    row["goal_met"] = _goal_met(row, case.bar(row["dtype"], pass_, plan.device_name))


def _representative(timing: timer.Timing, plan: Plan) -> float:
    """The median of the batches; on a cpu, where other processes only ever add time, the best one."""
    return timing.best_us if plan.device.type == "cpu" else timing.median_us


def _goal_met(row: dict[str, Any], bar: Bar | None) -> bool | None:
    """Whether the bar of this device, or the speed-up over the baseline, is met; ``None`` where none is set."""
    if bar is not None and bar.goal_us is not None and bar.met_by != "baseline":
        if bar.met_by == "graph":
            return row["graph_us"] <= bar.goal_us if row["graph_us"] is not None else None
        return bool(row["wall_us"] <= bar.goal_us + bar.allowance_us)
    if row["goal_speedup"] is not None and row["speedup"] is not None:
        return bool(row["speedup"] >= row["goal_speedup"])
    return None
