# SPDX-License-Identifier: Apache-2.0
"""A device named ``musa`` on host memory, for end-to-end tests without hardware.

``fake_device.install()`` builds the extension (about a minute, then cached by torch), renames PrivateUse1 to ``musa`` and
registers a stand-in ``torch.musa``. Run as a program it checks the operator forward and backward on that device with the
library of ``MUSPACE_EMU_ALIAS=musa``, found through ``MUSPACE_LIBRARY_PATH``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension


class Stream:
    """The default stream: a null handle."""

    musa_stream = 0

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _device_module() -> types.ModuleType:
    """What muSPACE, torch's autocast and torch's random state ask of ``torch.musa``."""
    module = types.ModuleType("torch.musa")

    @contextlib.contextmanager
    def device(_device: object) -> Iterator[None]:
        yield

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "current_stream": lambda _device=None: Stream(),
        "synchronize": lambda _device=None: None,
        "get_device_name": lambda _device=None: "emulated musa",
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "manual_seed_all": lambda _seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_rng_state": lambda _device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda _state, _device=None: None,
        "device": device,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def install() -> None:
    """Make ``torch.device("musa")`` usable in this process; a second call does nothing."""
    if hasattr(torch, "musa"):
        return
    # A device thread of the autograd engine that has run Python code aborts when it is stopped after Python has finished.
    os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")
    source = Path(__file__).with_name("fake_device.cc")
    torch.utils.rename_privateuse1_backend("musa")
    torch._register_device_module("musa", _device_module())
    cpp_extension.load("muspace_fake_device", [str(source)], extra_cflags=["-O1"])
    torch.utils.generate_methods_for_privateuse1_backend()


def check_operator() -> None:
    """multi_scale_deformable_attn on ``musa``, forward and backward, against the same call on the CPU reference."""
    import muspace_msda
    from muspace_core import get_last_dispatch_report

    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor([[6, 5], [3, 2]])
    value = torch.randn(2, 36, 3, 32, generator=generator)
    locations = torch.rand(2, 7, 3, 2, 4, 2, generator=generator) * 1.4 - 0.2
    weights = torch.rand(2, 7, 3, 2, 4, generator=generator)

    def run(device: str, backend: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        inputs = [t.detach().to(device).requires_grad_() for t in (value, locations, weights)]
        starts = torch.tensor([0, 30], device=device)
        output = muspace_msda.ops.multi_scale_deformable_attn(
            inputs[0], shapes.to(device), starts, inputs[1], inputs[2], backend=backend
        )
        report = get_last_dispatch_report().as_dict()
        output.square().sum().backward()
        return [t.detach().cpu() for t in (output, *(i.grad for i in inputs))], report

    wanted, _ = run("cpu", "reference")
    got, report = run("musa", "auto")
    if report["selected_backend"] != "musa" or report["native_fallback"]:
        raise SystemExit(f"the musa library did not run: {report}")
    for name, ours, theirs in zip(("output", "value", "sampling_locations", "attention_weights"), got, wanted, strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        print(f"{name}: largest difference {error:.1e} of the peak")
        if not error < 1e-5:
            raise SystemExit(f"{name} is wrong on the emulated musa device")
    print(f"dispatch: {report['device']} ran {report['selected_backend']} by route {report['route']}")


if __name__ == "__main__":
    install()
    check_operator()
    # torch's device thread of the autograd engine may outlive Python and then aborts the process; everything is said by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
