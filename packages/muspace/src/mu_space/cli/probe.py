# SPDX-License-Identifier: Apache-2.0
"""Probes that may crash or hang (vendor builds of torch, native libraries): each is run in a child process by ``env``.

``python -m mu_space.cli.probe torch|ffi|libraries`` prints one line of JSON.  Every library is opened in a child of its own,
forked once the imports are done, so that one that kills its process is one finding among the others.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

from mu_space import families
from mu_space.compatibility import distribution_version, musa_devices

BACKENDS: Final = ("cpu", "cuda", "hip", "musa", "emu")
LIBRARY_SECONDS: Final = 20
#: On some builds of torch tvm_ffi would compile an add-on at import, which a report has no use for.
NO_ADD_ON: Final = ("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")


def torch_facts() -> dict[str, Any]:
    """What torch was built for and which devices it sees."""
    torch = importlib.import_module("torch")
    facts: dict[str, Any] = {
        "importable": True,
        "version": str(torch.__version__),
        "built_for_cuda": torch.version.cuda,
        "built_for_hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "cuda_devices": {"count": 0, "names": [], "reason": None},
        "musa_devices": musa_devices(),
    }
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts["cuda_devices"].update(count=count, names=[torch.cuda.get_device_name(i) for i in range(count)])
        if count:
            facts["cuda_devices"]["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    except Exception as error:  # a driver that does not match says so here
        facts["cuda_devices"]["reason"] = f"{type(error).__name__}: {error}"
    return facts


def library_facts() -> list[dict[str, Any]]:
    """Every backend library of every installed family: where it is, whether it opens, and its own description or the reason."""
    os.environ.setdefault(*NO_ADD_ON)
    for module in ("tvm_ffi", "muspace_core.loader", *families.installed().values()):
        with contextlib.suppress(Exception):  # once for all children; what it raises, each of them meets again and reports
            importlib.import_module(module)
    return [_isolated(family, package, backend) for family, package in families.installed().items() for backend in BACKENDS]


def fact(family: str, backend: str, **values: Any) -> dict[str, Any]:
    """What is known of one library; every key is there."""
    return {"family": family, "backend": backend, "path": None, "loadable": False, "abi_info": None, "reason": None, **values}


def _isolated(family: str, package: str, backend: str) -> dict[str, Any]:
    """The facts of one library, from a child that it may kill or block."""
    name = f"lib{family}_{backend}.so"
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(_library(package, family, backend)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's threads: the child uses none of them
        child.start()
    sending.close()
    try:
        if receiving.poll(LIBRARY_SECONDS):
            return receiving.recv()
        return fact(family, backend, reason=f"{name} was not open within {LIBRARY_SECONDS} s")
    except EOFError:
        child.join()
        return fact(family, backend, reason=f"{name} ended the process that opened it ({_ending(child.exitcode)})")
    finally:
        child.kill()
        child.join()


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"status {status}"


def _library(package: str, family: str, backend: str) -> dict[str, Any]:
    try:
        library = importlib.import_module("muspace_core.loader").NativeLibrary(package, family)
        path = library.path(backend)
        reason = library.failure(backend)
        info = library.abi_info(backend) if reason is None else None
    except Exception as error:  # a package that does not import is itself the finding
        return fact(family, backend, reason=f"{package} could not be imported: {type(error).__name__}: {error}")
    return fact(family, backend, path=str(path) if path else None, loadable=reason is None, abi_info=info, reason=reason)


def ffi_facts() -> dict[str, Any]:
    """tvm-ffi as installed, and whether it imports by itself, whatever the state of torch."""
    os.environ.setdefault(*NO_ADD_ON)
    try:
        module = importlib.import_module("tvm_ffi")
        return {"importable": True, "version": str(module.__version__), "error": None}
    except Exception as error:
        version = distribution_version("apache-tvm-ffi")
        return {"importable": False, "version": version, "error": f"{type(error).__name__}: {error}"}


PROBES: Final[dict[str, Callable[[], Any]]] = {
    "torch": torch_facts,
    "ffi": ffi_facts,
    "libraries": library_facts,
}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
