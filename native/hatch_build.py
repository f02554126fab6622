# SPDX-License-Identifier: Apache-2.0
"""The build hook of every native package: CMake builds ``lib<family>_<backend>.so``, the wheel takes them in.

Environment
    MUSPACE_BACKENDS     list (``;`` or ``,``) among cpu, cuda, hip, musa, emu; without it cpu and every toolchain found
    MUSPACE_SKIP_NATIVE  ``1`` builds nothing: a quick Python-only editable install
    MUSPACE_CUDA_ARCHS, MUSPACE_HIP_ARCHS, MUSA_ARCH, MUSA_HOME   handed to CMake
    CMAKE_BUILD_PARALLEL_LEVEL                                    as CMake defines it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BACKENDS = ("cpu", "cuda", "hip", "musa", "emu")
CMAKE_VARIABLES = ("MUSPACE_CUDA_ARCHS", "MUSPACE_HIP_ARCHS", "MUSA_ARCH", "MUSA_HOME")


def found_backends() -> list[str]:
    """cpu, and every device backend whose compiler is on this machine."""
    hip_homes = [os.environ.get("ROCM_PATH"), "/opt/dtk", "/opt/rocm"]
    hip = any(home and Path(home, "bin", "hipcc").exists() for home in hip_homes) or shutil.which("hipcc")
    musa = Path(os.environ.get("MUSA_HOME") or "/usr/local/musa", "bin", "mcc").exists()
    present = {"cuda": shutil.which("nvcc"), "hip": hip, "musa": musa}
    return ["cpu", *(name for name, there in present.items() if there)]


def wanted_backends(editable: bool) -> list[str]:
    """The backends to build; the emulation stays out of wheels whatever the variable says."""
    text = os.environ.get("MUSPACE_BACKENDS", "").replace(",", ";")
    names = list(dict.fromkeys(name.strip() for name in text.split(";") if name.strip())) or found_backends()
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ValueError(f"MUSPACE_BACKENDS names {unknown}; expected some of {list(BACKENDS)}")
    chosen = [name for name in names if editable or name != "emu"]
    if not chosen:
        raise ValueError("MUSPACE_BACKENDS leaves no backend: emu is never in a wheel")
    return chosen


class NativeBuildHook(BuildHookInterface):
    """Editable installs build incrementally and in place; wheels build in a fresh folder and leave the tree alone."""

    PLUGIN_NAME = "custom"
    _scratch: str | None = None

    def dependencies(self) -> list[str]:
        if self._skipped():
            return []
        return [need for tool, need in (("cmake", "cmake>=3.24"), ("ninja", "ninja")) if not self._usable(tool)]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or self._skipped():
            return
        editable, root, package = version == "editable", Path(self.root), self.config["package"]
        if not editable:
            self._scratch = tempfile.mkdtemp(prefix="muspace-build-")
        build = Path(self._scratch) if self._scratch else root / "build" / "editable"
        built = self._build(root, build, wanted_backends(editable)) / package / "_lib"
        if editable:
            target = root / "src" / package / "_lib"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(built, target)
        else:
            build_data["force_include"][str(built)] = f"{package}/_lib"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _build(self, root: Path, build: Path, backends: list[str]) -> Path:
        """Configure, build and install into a fresh stage folder (the build folder is kept for the next time)."""
        stage = build / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        defines = {name: os.environ[name] for name in CMAKE_VARIABLES if os.environ.get(name)}
        defines |= {"CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable}
        defines["MUSPACE_BACKENDS"] = ";".join(backends)
        self._cmake("-S", root, "-B", build, "-G", "Ninja", *(f"-D{name}={value}" for name, value in defines.items()))
        self._cmake("--build", build)
        self._cmake("--install", build, "--prefix", stage, "--strip")
        return stage

    @staticmethod
    def _cmake(*arguments: object) -> None:
        subprocess.run(["cmake", *map(str, arguments)], check=True)

    @staticmethod
    def _skipped() -> bool:
        return os.environ.get("MUSPACE_SKIP_NATIVE") == "1"

    @staticmethod
    def _usable(tool: str) -> bool:
        """Runs the tool: a wheel's script of an outer environment may be on PATH and unable to import itself."""
        try:
            return subprocess.run([tool, "--version"], capture_output=True, check=False).returncode == 0
        except OSError:
            return False
