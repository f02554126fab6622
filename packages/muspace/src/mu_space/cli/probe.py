# SPDX-License-Identifier: Apache-2.0
"""Probes that may crash or hang (vendor builds of torch, native libraries): each is run in a child process by ``env``.

``python -m mu_space.cli.probe torch|libraries`` prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, Final

from mu_space import families
from mu_space.compatibility import distribution_version, musa_devices

BACKENDS: Final = ("cpu", "cuda", "hip", "musa", "emu")


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
    facts: list[dict[str, Any]] = []
    for family, package in families.installed().items():
        try:
            loader = importlib.import_module("muspace_core.loader")
            library = loader.NativeLibrary(package, family)
            facts += [_library(library, family, backend) for backend in BACKENDS]
        except Exception as error:  # a package that does not import is itself the finding
            reason = f"{package} could not be imported: {type(error).__name__}: {error}"
            facts += [_fact(family, backend, reason=reason) for backend in BACKENDS]
    return facts


def _fact(family: str, backend: str, **values: Any) -> dict[str, Any]:
    return {"family": family, "backend": backend, "path": None, "loadable": False, "abi_info": None, "reason": None, **values}


def _library(library: Any, family: str, backend: str) -> dict[str, Any]:
    path = library.path(backend)
    reason = library.failure(backend)
    info = library.abi_info(backend) if reason is None else None
    return _fact(family, backend, path=str(path) if path else None, loadable=reason is None, abi_info=info, reason=reason)


def ffi_facts() -> dict[str, Any]:
    """tvm-ffi as installed, and whether it imports."""
    try:
        module = importlib.import_module("muspace_core.loader")._import_tvm_ffi()
        return {"importable": True, "version": str(module.__version__), "error": None}
    except Exception as error:
        version = distribution_version("apache-tvm-ffi")
        return {"importable": False, "version": version, "error": f"{type(error).__name__}: {error}"}


PROBES: Final[dict[str, Callable[[], Any]]] = {
    "torch": torch_facts,
    "libraries": lambda: {"ffi": ffi_facts(), "libraries": library_facts()},
}


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
