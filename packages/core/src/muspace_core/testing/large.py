# SPDX-License-Identifier: Apache-2.0
"""Tensors beyond 2**31 elements: memory that is reserved and barely touched, and a skip where there is too little of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch


def _free_gib(device: str) -> float:
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0] / 2**30
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 2**20
    return 0.0


def needs(gib: float, device: str, purpose: str = "") -> None:
    """Skips where less is free; ``purpose`` says what takes it."""
    if _free_gib(device) < gib:
        pytest.skip(f"needs {gib} GiB of free memory" + (f": {purpose}" if purpose else ""))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros whose pages the system provides on first use: torch.zeros would write them all."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    width = {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, width)).view(dtype)
