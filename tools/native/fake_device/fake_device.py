# SPDX-License-Identifier: Apache-2.0
"""A device named ``musa`` on host memory, for end-to-end tests without hardware.

``fake_device.install()`` builds the extension (about a minute, then cached by torch), renames PrivateUse1 to ``musa`` and
registers a stand-in ``torch.musa``. As a pytest plugin (``-p fake_device``) it does so before the tests, which
``--backend=musa`` then runs on that device with the library of ``MUSPACE_EMU_ALIAS=musa``, found through
``MUSPACE_LIBRARY_PATH``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
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


def pytest_configure() -> None:
    """As a pytest plugin: the device is there before anything asks for it."""
    install()


_status = 1


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """torch's device thread of the autograd engine may outlive Python and then aborts the process; everything is said."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
