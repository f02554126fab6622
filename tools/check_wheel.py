# SPDX-License-Identifier: Apache-2.0
"""Checks built wheels: tag, exported symbols, needed libraries, stray files.

``check_wheel.py dist/*.whl`` prints what it finds and exits 1 on a fault.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: What a library may ask of the system. tvm_ffi is in the process before it is opened; a GPU runtime comes with the driver.
NEEDED = re.compile(
    r"^(libtvm_ffi\.so|libc\.so\.6|libm\.so\.6|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-x86-64\.so\.2|libpthread\.so\.0"
    r"|libdl\.so\.2|librt\.so\.1|libamdhip64\.so\.\d+|libmusart\.so(\.\d+)*|libmusa\.so(\.\d+)*)$"
)
ALLOWED_SUFFIXES = {".py", ".so", ".typed", ".toml", ".json"}


def tool(*arguments: str) -> str:
    """Output of a binutils program."""
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def check_library(path: Path) -> list[str]:
    """Complaints about one shared library."""
    exported = [line.split()[-1] for line in tool("nm", "-D", "--defined-only", str(path)).splitlines()]
    stray = [name for name in exported if not name.startswith("__tvm_ffi_")]
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", tool("readelf", "-d", str(path)))
    dynamic = tool("readelf", "-d", str(path))
    glibc = max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", tool("objdump", "-T", str(path))))
    print(f"  {path.name}: {len(exported)} exports, glibc >= {'.'.join(map(str, glibc))}, needs {', '.join(needed)}")
    complaints = [f"{path.name}: exports {name}" for name in stray]
    complaints += [f"{path.name}: needs {name}" for name in needed if not NEEDED.match(name)]
    if "RPATH" in dynamic or "RUNPATH" in dynamic:
        complaints.append(f"{path.name}: has a run path")
    if not exported:
        complaints.append(f"{path.name}: exports nothing")
    return complaints


def check_wheel(path: Path) -> list[str]:
    """Complaints about one wheel."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        libraries = [name for name in names if name.endswith(".so")]
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {len(names)} files, {len(libraries)} libraries")
        tag = "py3-none-linux_x86_64" if libraries else "py3-none-any"
        complaints = [] if path.stem.endswith(tag) else [f"{path.name}: the tag should be {tag}"]
        complaints += [f"{path.name}: {name} is not for users" for name in libraries if "_emu" in name]
        files = [name for name in names if ".dist-info/" not in name and not name.endswith("/")]
        complaints += [f"{path.name}: stray file {name}" for name in files if Path(name).suffix not in ALLOWED_SUFFIXES]
        complaints += [f"{path.name}: no {file}" for file in ("LICENSE", "NOTICE") if not any(n.endswith(file) for n in names)]
        for name in libraries:
            complaints += check_library(Path(archive.extract(name, folder)))
        return complaints


def main(wheels: list[str]) -> int:
    if not wheels:
        print("usage: check_wheel.py WHEEL...", file=sys.stderr)
        return 2
    complaints = [complaint for wheel in wheels for complaint in check_wheel(Path(wheel))]
    print("\n".join(complaints) or "wheels: nothing to complain about")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
