# SPDX-License-Identifier: Apache-2.0
"""The machine of a measurement: enough to repeat it, nothing that identifies a person or a host."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from muspace_core.bench.timer import device_module


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Marketing name of a GPU, model name of the cpu."""
    return _cpu_model() if device.type == "cpu" else str(device_module(device).get_device_name(device))


def l2_bytes(device: torch.device) -> int:
    """Size of a GPU's L2 cache, 0 where torch does not tell or on a cpu."""
    if device.type == "cpu":
        return 0
    properties = device_module(device).get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or 0)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def slug(text: str) -> str:
    """``NVIDIA H200`` → ``nvidia-h200``, for file names."""
    return re.sub(r"-+", "-", re.sub(r"[^a-z0-9]+", "-", text.lower().replace("(r)", "").replace("(tm)", ""))).strip("-")


def facts(device: torch.device) -> dict[str, Any]:
    """Machine, device and software, JSON-ready."""
    on_gpu = device.type != "cpu"
    properties = device_module(device).get_device_properties(device) if on_gpu else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch_musa": _version("torch_musa"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "device_type": device.type,
        "device": device_name(device),
        "device_memory_bytes": int(properties.total_memory) if properties is not None else None,
        "l2_bytes": l2_bytes(device) or None,
    }
