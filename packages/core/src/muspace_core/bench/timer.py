# SPDX-License-Identifier: Apache-2.0
"""Times calls: device events around back-to-back batches on a GPU, the performance counter on a cpu.

A batch is a run of calls with no synchronisation in between, as a training step issues them; its mean is one observation
and the median over batches, on a cpu the best of them, is the result.  Calls rotate over several input sets where one set
would stay in the L2 cache.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

Call = Callable[[], Any]
WARM_SECONDS: Final = 0.1
SETTLE_SECONDS: Final = 0.005


@dataclass(frozen=True)
class Effort:
    """How long to measure: batches of at least ``batch_seconds`` each, fewer where they last longer than ``most_seconds``."""

    batches: int = 7
    batch_seconds: float = 0.02
    most_calls: int = 2000
    least_batches: int = 3
    most_seconds: float = 5.0

    @staticmethod
    def for_device(device: torch.device, quick: bool = False) -> Effort:
        """Enough for a 1 % spread on an idle GPU; on a cpu many short batches, one of which runs undisturbed."""
        if quick:
            return Effort(batches=3, batch_seconds=0.005)
        return Effort() if device.type != "cpu" else Effort(batches=21, batch_seconds=0.01, least_batches=7, most_seconds=10.0)


@dataclass(frozen=True)
class Timing:
    """µs per call over batches of ``calls`` calls."""

    median_us: float
    best_us: float
    worst_us: float
    batches: int
    calls: int


def device_module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.musa`` … with streams and events."""
    return getattr(torch, device.type)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        device_module(device).synchronize(device)


def _batch_seconds(run: Callable[[int], None], count: int, device: torch.device) -> float:
    if device.type == "cpu":
        begin = time.perf_counter()
        run(count)
        return time.perf_counter() - begin
    module = device_module(device)
    first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
    synchronize(device)
    first.record()
    run(count)
    last.record()
    synchronize(device)
    return first.elapsed_time(last) * 1e-3


class _Series:
    """Batches of ``run(count)``, which makes ``count * per_run`` calls; ``count`` is a multiple of ``multiple``."""

    def __init__(self, run: Callable[[int], None], device: torch.device, effort: Effort, multiple: int, per_run: int) -> None:
        self._run, self._device, self._multiple, self._per_run = run, device, multiple, per_run
        self._means: list[float] = []
        begin, rounds = time.perf_counter(), 0
        while rounds < 2 or time.perf_counter() - begin < min(WARM_SECONDS, effort.batch_seconds * 2):
            run(multiple)
            synchronize(device)
            rounds += 1
        estimate = _batch_seconds(run, multiple, device) / multiple
        count = max(1, min(effort.most_calls, round(effort.batch_seconds / max(estimate, 1e-7))))
        self._count = -(-count // multiple) * multiple

    def batch(self) -> None:
        if self._device.type == "cpu":
            # OpenMP threads of the contender before spin for milliseconds on the cores that are measured now.
            time.sleep(SETTLE_SECONDS)
            self._run(self._multiple)
        seconds = _batch_seconds(self._run, self._count, self._device)
        self._means.append(seconds / (self._count * self._per_run) * 1e6)

    def timing(self) -> Timing:
        means = self._means
        return Timing(statistics.median(means), min(means), max(means), len(means), self._count * self._per_run)


def _measure(series: Sequence[_Series], effort: Effort) -> list[Timing]:
    """One batch of each in turn, so that a disturbance of the machine hits all of them."""
    collecting = gc.isenabled()
    gc.disable()
    begin = time.perf_counter()
    try:
        for done in range(effort.batches):
            if done >= effort.least_batches and time.perf_counter() - begin > effort.most_seconds:
                break
            for entry in series:
                entry.batch()
    finally:
        if collecting:
            gc.enable()
    return [entry.timing() for entry in series]


def _eager(calls: Sequence[Call], device: torch.device, effort: Effort) -> _Series:
    def run(count: int) -> None:
        for _ in range(count // len(calls)):
            for call in calls:
                call()

    return _Series(run, device, effort, multiple=len(calls), per_run=1)


def time_calls(calls: Sequence[Call], device: torch.device, effort: Effort) -> Timing:
    """Eager calls, issued back to back in rotation."""
    return time_alternately([calls], device, effort)[0]


def time_alternately(contenders: Sequence[Sequence[Call]], device: torch.device, effort: Effort) -> list[Timing]:
    """Several implementations, a batch of each in turn: the fair way to get a ratio on a shared machine."""
    return _measure([_eager(calls, device, effort) for calls in contenders], effort)


def time_graph(build: Callable[[], Sequence[Call]], device: torch.device, effort: Effort) -> tuple[Timing | None, str | None]:
    """Replay of a CUDA graph that holds one or more rounds of the calls; ``None`` and the reason where it cannot be.

    ``build`` runs on the capture stream, so that a backward belongs to a forward of the same stream.
    """
    if device.type != "cuda":
        return None, f"no graph replay on {device.type}"
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            calls = build()
            for _ in range(2):
                for call in calls:
                    call()
            synchronize(device)
            # A graph of one short call would time the launch of the graph.
            rounds = -(-16 // len(calls))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(rounds):
                    for call in calls:
                        call()

            def run(count: int) -> None:
                for _ in range(count):
                    graph.replay()

            series = _Series(run, device, effort, multiple=1, per_run=rounds * len(calls))
            return _measure([series], effort)[0], None
    except Exception as error:  # the eager times stand, whatever the capture objects to
        synchronize(device)
        return None, (str(error).splitlines() or [type(error).__name__])[0]


def release_memory(device: torch.device) -> None:
    """Gives what a failed row left behind back to the device, as far as that works."""
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            device_module(device).empty_cache()


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Most device memory that one call holds beyond what was there before; ``None`` on a cpu."""
    if device.type == "cpu":
        return None
    module = device_module(device)
    synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    result = call()
    synchronize(device)
    del result
    return int(module.max_memory_allocated(device) - before)


def copy_bandwidth(device: torch.device, total_bytes: int, effort: Effort) -> float:
    """Bytes per second that a copy reads and writes, for two buffers of ``total_bytes`` together."""
    elements = total_bytes // 8
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device, effort)
    return total_bytes / (timing.best_us * 1e-6)
