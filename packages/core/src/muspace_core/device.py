# SPDX-License-Identifier: Apache-2.0
"""torch device ↔ backend, and the one integer every native call ends with.  Nothing here opens a device."""

from __future__ import annotations

from typing import Final

import torch

from muspace_core import environment

BACKENDS: Final = ("cpu", "cuda", "hip", "musa", "emu")
#: More threads than any machine has; a larger wish is cut to it.
MOST_THREADS: Final = 1 << 16
#: Device type on which a backend's tensors live.
DEVICE_TYPES: Final = {"cpu": "cpu", "cuda": "cuda", "hip": "cuda", "musa": "musa", "emu": "cpu"}


def backend_for(device_type: str) -> str | None:
    """Native backend of a torch device type, or ``None`` where muSPACE has none (xpu, mps …)."""
    if device_type == "cuda":
        return "hip" if torch.version.hip else "cuda"
    return device_type if device_type in ("cpu", "musa") else None


def _musa_stream(index: int) -> int:
    # Private in torch_musa 2.7.1 and absent from some builds; the public stream object is the fallback.
    try:
        from torch_musa import _MUSAC

        return int(_MUSAC._musa_getCurrentRawStream(index))
    except (ImportError, AttributeError):
        return int(getattr(torch, "musa").current_stream(index).musa_stream)  # noqa: B009 - torch_musa adds it


def thread_count() -> int:
    """Threads that a cpu call may use: ``MUSPACE_NUM_THREADS``, else ``torch.get_num_threads()``."""
    text = environment.NUM_THREADS.value()
    if not text:
        return torch.get_num_threads()
    digits = text.lstrip("0")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{environment.NUM_THREADS.name}: expected a positive integer, got {text!r}")
    return min(int(digits[:9]), MOST_THREADS)  # int() refuses thousands of digits


def launch_context(backend: str, device: torch.device) -> int:
    """The last integer of a native call: thread count on cpu, raw handle of the caller's current stream on a GPU."""
    if backend == "cpu":
        return thread_count()
    if backend in ("cuda", "hip"):
        return torch._C._cuda_getCurrentRawStream(device.index)
    if backend == "musa":
        return _musa_stream(device.index or 0)
    return 0
