# SPDX-License-Identifier: Apache-2.0
"""``mu-space env``: what is here, what loads, and why the rest does not.  Nothing a broken installation does can stop it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from mu_space import __version__, families
from mu_space.cli import probe, text
from mu_space.compatibility import PROFILES, compatibility_report, distribution_version

EPILOG: Final = """\
Exit status: 0; 1 only under --strict, when torch, tvm-ffi, an operator wheel, its cpu library or the library of a visible
device does not work, or, with --profile, when this machine is not one of the profile's MUSA stacks with a device.

examples:
  mu-space env
  mu-space env --json > env.json
  mu-space env --profile core --strict
"""
PROBE_SECONDS: Final = 120
FFI_RANGE: Final = ((0, 1, 9), (0, 2))
#: Tool → variable that names its installation, and folders to look into after PATH.
TOOLS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "nvcc": ("CUDA_HOME", ("/usr/local/cuda/bin",)),
    "hipcc": ("ROCM_PATH", ("/opt/rocm/bin", "/opt/dtk/bin")),
    "mcc": ("MUSA_HOME", ("/usr/local/musa/bin",)),
    "clang": ("", ()),
    "cmake": ("", ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="NAME", help=f"also judge this MUSA stack profile ({', '.join(PROFILES)})")
    parser.add_argument("--strict", action="store_true", help="exit 1, with the reasons, if something needed here fails")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as error:  # a report must come out whatever is broken; the text is the finding
        return {"error": f"{type(error).__name__}: {error}"}


def _child(name: str) -> Any:
    """One probe in a child process, so that a crash or a hang of a vendor library is a line of the report.

    What the probe prints, or a dictionary with the single key ``error``.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "mu_space.cli.probe", name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"the {name} probe did not answer within {PROBE_SECONDS} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = done.stderr.strip().splitlines()
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return {"error": lines[-1] if lines else f"the {name} probe ended with {how} and said nothing"}


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "cores": os.cpu_count(),
    }


def _packages() -> dict[str, str | None]:
    wheels = ["muspace", "muspace-core", *(f"muspace-{family}" for family in sorted({*families.KNOWN, *families.installed()}))]
    others = ["apache-tvm-ffi", "torch", "torch_musa", "numpy", "triton"]
    found = {name: distribution_version(name) for name in [*wheels, *others]}
    found["muspace"] = found["muspace"] or f"{__version__} (source tree)"
    for family in families.installed():
        found[f"muspace-{family}"] = found[f"muspace-{family}"] or "source tree"
    return found


def _tool(name: str) -> dict[str, Any]:
    variable, roots = TOOLS[name]
    home = os.environ.get(variable, "") if variable else ""
    first = [str(Path(home) / "bin")] if home else []
    path = shutil.which(name, path=os.pathsep.join([*first, *os.environ.get("PATH", "").split(os.pathsep), *roots]))
    if path is None:
        return {"path": None, "version": None}
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    line = next((line for line in shown if "release" in line or "version" in line.lower()), "")
    return {"path": path, "version": line.strip() or None}


def _nvidia_driver() -> dict[str, Any]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return {"driver": None, "devices": []}
    query = [path, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    rows = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip().splitlines()
    cells = [[cell.strip() for cell in row.split(",")] for row in rows if row.count(",") == 2]
    return {"driver": cells[0][1] if cells else None, "devices": [f"{name} ({capability})" for name, _, capability in cells]}


def _hip() -> dict[str, Any]:
    roots = [os.environ.get("ROCM_PATH"), "/opt/dtk", "/opt/rocm"]
    root = next((Path(entry) for entry in roots if entry and Path(entry).is_dir()), None)
    if root is None:
        return {"root": None, "version": None}
    file = root / ".info" / "version"
    return {"root": str(root), "version": file.read_text().strip() if file.is_file() else None}


def collect(profile: str | None) -> dict[str, Any]:
    """The whole report as JSON-ready data; ``problems`` is what ``--strict`` fails on."""
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(_guarded, functools.partial(_child, name)) for name in ("torch", "ffi", "libraries")]
        tools = {name: _guarded(functools.partial(_tool, name)) for name in TOOLS}
        torch, ffi, libraries = (answer.result() for answer in answers)
    if set(torch) == {"error"}:
        torch = {"importable": False, "version": distribution_version("torch"), "error": torch["error"]}
    if set(ffi) == {"error"}:
        ffi = {"importable": False, "version": distribution_version("apache-tvm-ffi"), "error": ffi["error"]}
    if isinstance(libraries, dict):
        reason = f"could not be asked: {libraries['error']}"
        libraries = [probe.fact(family, name, reason=reason) for family in families.installed() for name in probe.BACKENDS]
    unasked: dict[str, Any] = {"probed": False, "count": None, "names": [], "reason": "torch could not be imported"}
    devices = torch.get("musa_devices") or unasked
    report: dict[str, Any] = {
        "muspace": __version__,
        "python": _guarded(_python),
        "packages": _guarded(_packages),
        "torch": torch,
        "tvm_ffi": ffi,
        "cuda": _guarded(_nvidia_driver),
        "hip": _guarded(_hip),
        "tools": tools,
        "libraries": libraries,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("MUSPACE_", "MUSA_"))},
        "compatibility": _guarded(lambda: compatibility_report(profile or "core", devices=devices)),
    }
    report["problems"] = _guarded(lambda: problems(report, judge_profile=profile is not None))
    return report


def _version_tuple(version: str) -> tuple[int, ...]:
    digits = []
    for part in version.split("."):
        if not part.isdigit():
            break
        digits.append(int(part))
    return tuple(digits)


def problems(report: dict[str, Any], judge_profile: bool) -> list[str]:
    """What does not work although something on this machine needs it, one sentence each."""
    found: list[str] = []
    if not report["torch"].get("importable"):
        found.append(f"torch cannot be imported: {report['torch'].get('error')}")
    ffi = report["tvm_ffi"]
    if not ffi.get("importable"):
        found.append(f"apache-tvm-ffi cannot be imported: {ffi.get('error')}")
    elif not FFI_RANGE[0] <= _version_tuple(ffi["version"]) < FFI_RANGE[1]:
        found.append(f"apache-tvm-ffi {ffi['version']} is outside >=0.1.9,<0.2")
    if not families.installed():
        found.append(families.install_hint())
    needed = {"cpu": "always used"}
    if report["torch"].get("cuda_devices", {}).get("count"):
        backend = "hip" if report["torch"].get("built_for_hip") else "cuda"
        needed[backend] = f"torch sees {report['torch']['cuda_devices']['names'][0]}"
    if report["torch"].get("musa_devices", {}).get("count"):
        needed["musa"] = f"torch_musa sees {report['torch']['musa_devices']['names'][0]}"
    for library in report["libraries"]:
        if library["backend"] in needed and not library["loadable"]:
            why = needed[library["backend"]]
            found.append(f"lib{library['family']}_{library['backend']}.so is needed ({why}): {library['reason']}")
    if judge_profile and report["compatibility"].get("verdict"):
        found.append(report["compatibility"]["verdict"])
    return found


def _no(facts: dict[str, Any]) -> str:
    return f"no: {facts.get('error')}"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    torch, ffi, match = report["torch"], report["tvm_ffi"], report["compatibility"].get("match")
    built = [f"{name} {torch[f'built_for_{name}']}" for name in ("cuda", "hip") if torch.get(f"built_for_{name}")]
    devices = [*torch.get("cuda_devices", {}).get("names", []), *torch.get("musa_devices", {}).get("names", [])]
    python, hip = report["python"], report["hip"]
    stack = f"SDK {match['sdk']}, torch_musa {match['torch_musa']} (recorded, not validated)" if match else None
    return [
        ("muspace", report["packages"].get("muspace") or report["muspace"]),
        *((name, version) for name, version in report["packages"].items() if name.startswith("muspace-") and version),
        ("python", f"{python.get('version')} on {python.get('system')} {python.get('machine')}, {python.get('libc')}"),
        ("torch", f"{torch['version']}, built for {', '.join(built) or 'cpu'}" if torch.get("importable") else _no(torch)),
        ("devices", ", ".join(devices) or "cpu only"),
        ("tvm-ffi", ffi["version"] if ffi.get("importable") else _no(ffi)),
        ("nvidia driver", str(report["cuda"].get("driver") or "absent")),
        ("hip", f"{hip['root']} {hip['version'] or ''}".strip() if hip.get("root") else "absent"),
        ("musa sdk", str(report["compatibility"].get("present", {}).get("musa_sdk") or "absent")),
        ("musa stack", stack or "none of the recorded"),
        *((name, tool["version"] or tool["path"]) for name, tool in report["tools"].items() if tool.get("path")),
        *report["environment"].items(),
    ]


def _library(entry: dict[str, Any]) -> tuple[str, str, str]:
    name = f"lib{entry['family']}_{entry['backend']}.so"
    return name, "yes" if entry["loadable"] else "no", entry["abi_info"] or entry["reason"] or ""


def main(args: argparse.Namespace) -> int:
    if args.profile is not None and args.profile not in PROFILES:
        from mu_space.cli.main import UsageError

        raise UsageError(f"unknown profile {args.profile!r}, expected one of {', '.join(PROFILES)}")
    report = collect(args.profile)
    failed = bool(args.strict and report["problems"])
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        text.table("", ("what", "here"), _facts(report))
        if report["libraries"]:
            text.table("", ("library", "loads", "description, or why not"), [_library(entry) for entry in report["libraries"]])
    for problem in report["problems"]:
        print(f"mu-space env: {problem}", file=sys.stderr)
    return 1 if failed else 0
