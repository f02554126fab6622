# SPDX-License-Identifier: Apache-2.0
"""Finds and opens ``lib<family>_<backend>.so``, lazily and at most once, and remembers why it could not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muspace_core import environment
from muspace_core.errors import BackendUnavailable

#: First field of a library's ``abi_info()``; a library with another number speaks other signatures.
ABI: int = 1


def _import_tvm_ffi() -> Any:
    # On a torch without the native exchange table, tvm_ffi would compile a C++ add-on at import. Nothing here needs it.
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    return importlib.import_module("tvm_ffi")


class NativeLibrary:
    """The native libraries of one operator family.

    ``path(backend)`` finds the file, ``function(backend, name)`` returns a callable that takes torch tensors and integers,
    ``failure(backend)`` is the sentence that says why a backend is not there, or ``None``.

    >>> NativeLibrary("muspace_msda", "msda").failure("cpu") is None   # doctest: +SKIP
    True
    """

    def __init__(self, package: str, family: str) -> None:
        self.package = package
        self.family = family
        self._modules: dict[tuple[str, str], Any] = {}
        self._failures: dict[tuple[str, str], str] = {}
        self._functions: dict[tuple[str, object, str], Callable[..., Any]] = {}

    def path(self, backend: str) -> Path | None:
        """File of a backend: ``MUSPACE_LIBRARY_PATH`` first and alone if it is set, then ``_lib`` beside the package."""
        name = f"lib{self.family}_{backend}.so"
        folders = environment.LIBRARY_PATH.value()
        if folders:
            roots = [Path(folder) for folder in folders.split(os.pathsep) if folder]
        else:
            roots = [Path(entry) / "_lib" for entry in importlib.import_module(self.package).__path__]
        return next((root / name for root in roots if (root / name).is_file()), None)

    def load(self, backend: str) -> Any:
        """The opened library; raises ``BackendUnavailable`` with the remembered reason."""
        key = (backend, environment.LIBRARY_PATH.value())
        module = self._modules.get(key)
        if module is None:
            if key not in self._failures:
                try:
                    module = self._modules[key] = self._open(backend)
                    return module
                except BackendUnavailable as error:
                    self._failures[key] = str(error)
            raise BackendUnavailable(self._failures[key])
        return module

    def _open(self, backend: str) -> Any:
        path = self.path(backend)
        if path is None:
            name, folders = f"lib{self.family}_{backend}.so", environment.LIBRARY_PATH.value()
            if folders:
                variable = environment.LIBRARY_PATH.name
                raise BackendUnavailable(
                    f"{name} is not in {folders}; correct {variable}, or unset it to use the installed muspace-{self.family}"
                )
            remedy = f"install a muspace-{self.family} wheel built for {backend}, or rebuild with MUSPACE_BACKENDS={backend}"
            if backend == "emu":
                remedy = "the emulation is in no wheel: build it with MUSPACE_BACKENDS=emu"
            raise BackendUnavailable(f"{name} is not in {self.package}/_lib; {remedy}")
        try:
            module = _import_tvm_ffi().load_module(str(path))
            info = dict(field.split("=", 1) for field in module.get_function("abi_info")().split(";"))
        except Exception as error:  # the loader's own text (missing soname, wrong architecture) is the useful part
            raise BackendUnavailable(f"{path.name} could not be opened: {error}") from error
        if info.get("muspace-abi") != str(ABI):
            raise BackendUnavailable(
                f"{path.name} has muspace-abi {info.get('muspace-abi')}, this muspace-core speaks {ABI}; "
                f"install a muspace-{self.family} of the same release"
            )
        if (info.get("family"), info.get("backend")) != (self.family, backend):
            raise BackendUnavailable(f"{path.name} says that it is {info.get('family')} for {info.get('backend')}")
        return module

    def failure(self, backend: str) -> str | None:
        """Why ``backend`` cannot be loaded, or ``None`` if it can (and now is)."""
        try:
            self.load(backend)
        except BackendUnavailable as error:
            return str(error)
        return None

    def abi_info(self, backend: str) -> str:
        """The library's own description, ``muspace-abi=…;family=…;backend=…;ffi=…;arch=…``."""
        return self.load(backend).get_function("abi_info")()

    def function(self, backend: str, name: str) -> Callable[..., Any]:
        """A native function; on a device whose tensors cannot be passed directly it converts them to DLPack capsules."""
        key = (backend, environment.LIBRARY_PATH.raw(), name)
        function = self._functions.get(key)
        if function is None:
            function = self.load(backend).get_function(name)
            if backend == "musa":
                function = _with_capsules(function)
            self._functions[key] = function
        return function


def _with_capsules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes tensors as they are, and as DLPack capsules once the direct exchange has been refused.

    A PrivateUse1 backend that hands out no native stream handle refuses the exchange with a RuntimeError before the
    function runs, so repeating the call is safe. ``Tensor.__dlpack__`` is no way out: it fails on a renamed backend.
    """
    from_dlpack = _import_tvm_ffi().from_dlpack
    to_dlpack = torch.utils.dlpack.to_dlpack
    direct = True

    def capsule(argument: Any) -> Any:
        return from_dlpack(to_dlpack(argument)) if isinstance(argument, torch.Tensor) else argument

    def call(*arguments: Any) -> Any:
        nonlocal direct
        if direct:
            try:
                return function(*arguments)
            except RuntimeError as error:
                if "native handle" not in str(error):
                    raise
                direct = False
        return function(*map(capsule, arguments))

    return call
