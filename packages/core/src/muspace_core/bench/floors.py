# SPDX-License-Identifier: Apache-2.0
"""How fast a call could be at all on this device: what it must move over what the device was measured to move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from muspace_core.bench.case import Work
from muspace_core.bench.timer import Effort, copy_bandwidth

GIB: Final = 1 << 30


@dataclass(frozen=True)
class CacheModel:
    """Rates behind the first-level cache. None of them is a law: reuse in L1 or sums in registers go below the floor."""

    gather_bytes_per_s: float
    adds_per_s: float
    launch_us: float
    sync_us: float
    source: str


@dataclass(frozen=True)
class Ceilings:
    """What the device of this run can do."""

    copy_bytes_per_s: float
    cache: CacheModel | None
    flops_per_s: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "flops_per_s": dict(self.flops_per_s)}


#: Device name → constants that were measured on it with separate micro-kernels.
CACHE_MODELS: Final = {
    "NVIDIA H200": CacheModel(9.5e12, 0.9e12, 3.5, 16.0, "micro-kernels on an NVIDIA H200"),
}
FLOPS: Final = {
    "NVIDIA H200": {"float32": 60e12, "tf32": 400e12, "float16": 790e12, "bfloat16": 790e12},
}
#: Two buffers that fit into one core's L2 and are too small for torch to split: the rate of cached data on one cpu thread.
CPU_CACHE_BYTES: Final = 1 << 17


def measure_ceilings(device: torch.device, device_name: str, quick: bool = False) -> Ceilings:
    """Copy bandwidth of this run; cached rates from the table for a GPU, measured for a cpu."""
    effort = Effort.for_device(device, quick)
    if device.type == "cpu":
        copy = copy_bandwidth(device, GIB // 4 if quick else GIB // 2, effort)
        cached = copy_bandwidth(device, CPU_CACHE_BYTES, effort) * torch.get_num_threads()
        # An addition into memory reads and writes four bytes.
        return Ceilings(copy, CacheModel(cached, cached / 8, 0.0, 0.0, "64 KiB copy of one thread in this run, times threads"))
    copy = copy_bandwidth(device, 2 * GIB, effort)
    known = next((name for name in CACHE_MODELS if name in device_name), None)
    return Ceilings(copy, CACHE_MODELS[known] if known else None, FLOPS[known] if known else {})


def dram_floor_us(work: Work, ceilings: Ceilings) -> float:
    """Compulsory bytes at the copy bandwidth, or the arithmetic at its peak, whichever takes longer."""
    seconds = work.compulsory_bytes / ceilings.copy_bytes_per_s
    peak = ceilings.flops_per_s.get(work.flop_kind)
    return max(seconds, work.flops / peak if peak else 0.0) * 1e6


def cache_floor_us(work: Work, ceilings: Ceilings) -> float | None:
    """Gathers and scatters at the cached rates (they overlap), launches and syncs (they do not); ``None`` if unknown."""
    cache = ceilings.cache
    if cache is None:
        return None
    moved = max(work.gathered_bytes / cache.gather_bytes_per_s, work.scattered_adds / cache.adds_per_s) * 1e6
    return moved + work.launches * cache.launch_us + work.syncs * cache.sync_us
