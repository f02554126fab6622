# SPDX-License-Identifier: Apache-2.0
"""The MUSA software stacks that muSPACE is meant for, as data, and what of them is present on this machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True)
class Stack:
    """One matched set of versions; torch and torch_musa carry the same number."""

    sdk: str
    torch: str
    torch_musa: str
    #: ``recorded``: taken from the vendor's matrix and never validated by this project on hardware.
    evidence: str = "recorded"


PROFILES: Final[dict[str, tuple[Stack, ...]]] = {
    "core": (
        Stack(sdk="4.3.8", torch="2.7.1", torch_musa="2.7.1"),
        Stack(sdk="5.2.0", torch="2.9.1", torch_musa="2.9.1"),
        Stack(sdk="5.2.0", torch="2.11.0", torch_musa="2.11.0"),
    ),
}
DISTRIBUTIONS: Final = ("torch", "torch_musa", "apache-tvm-ffi")


def distribution_version(name: str) -> str | None:
    """Version from the installed metadata, or ``None``; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def musa_sdk() -> tuple[str | None, str]:
    """Version of the MUSA toolkit and where it was read, or ``None`` and where it was looked for."""
    roots = [os.environ.get("MUSA_HOME"), os.environ.get("MUSA_INSTALL_PATH"), "/usr/local/musa"]
    files = [Path(root) / "version.json" for root in dict.fromkeys(roots) if root]
    for file in files:
        try:
            return str(json.loads(file.read_text())["musa_toolkits"]["version"]), str(file)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None, ", ".join(map(str, files))


def musa_devices() -> dict[str, Any]:
    """Devices that torch_musa sees: ``probed`` tells whether it could be asked, ``reason`` why not."""
    if distribution_version("torch_musa") is None:
        return {"probed": False, "count": None, "names": [], "reason": "torch_musa is not installed"}
    try:
        importlib.import_module("torch_musa")
        musa = importlib.import_module("torch").musa
        count = int(musa.device_count())
        return {"probed": True, "count": count, "names": [musa.get_device_name(i) for i in range(count)], "reason": None}
    except Exception as error:  # a vendor stack fails in its own ways; the text is the finding
        return {"probed": False, "count": None, "names": [], "reason": f"{type(error).__name__}: {error}"}


def _release(version: str | None) -> str | None:
    return version.split("+", 1)[0] if version else None


def _verdict(stacks: tuple[Stack, ...], match: Stack | None, present: dict[str, Any], devices: dict[str, Any]) -> str | None:
    """Why this machine is not a supported stack with a device, in one sentence, or ``None``."""
    wanted = " or ".join(f"SDK {s.sdk} with torch and torch_musa {s.torch}" for s in stacks)
    if match is None:
        have = ", ".join(f"{name} {present[name] or 'absent'}" for name in ("musa_sdk", "torch", "torch_musa"))
        return f"not a supported MUSA stack: expected {wanted}; got {have}"
    if not devices["count"]:
        why = devices["reason"] or "0 found"
        return f"SDK {match.sdk} with torch_musa {match.torch_musa} is present, but no MUSA device: {why}"
    return None


def compatibility_report(profile: str = "core", *, devices: dict[str, Any] | None = None) -> dict[str, Any]:
    """Supported MUSA stacks of a profile and how this machine compares, as JSON-ready data.

    Args:
        profile: name of a set of stacks; ``core`` is what the operators need.
        devices: result of :func:`musa_devices` obtained elsewhere (the command line asks in a child process).

    Returns:
        ``profile``, ``supported`` (the stacks, each with its evidence), ``present`` (versions found in installed metadata
        and in the SDK's version file), ``probed`` (the devices, if torch_musa could be asked), ``match`` (the stack that
        is here, or ``None``), ``validated`` (always false so far: no stack has been run by this project on MUSA
        hardware) and ``verdict`` (one sentence, or ``None`` when a supported stack with a device is here).

    Raises:
        ValueError: the profile is unknown.

    >>> compatibility_report("core")["supported"][0]["sdk"]
    '4.3.8'
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: expected one of {', '.join(PROFILES)}; got {profile!r}")
    stacks = PROFILES[profile]
    sdk, source = musa_sdk()
    present: dict[str, Any] = {"musa_sdk": sdk, **{name: distribution_version(name) for name in DISTRIBUTIONS}}
    here = tuple(_release(present[name]) for name in ("musa_sdk", "torch", "torch_musa"))
    match = next((stack for stack in stacks if (stack.sdk, stack.torch, stack.torch_musa) == here), None)
    devices = musa_devices() if devices is None else devices
    return {
        "profile": profile,
        "supported": [asdict(stack) for stack in stacks],
        "present": {**present, "musa_sdk_source": source},
        "probed": {"musa_devices": devices},
        "match": asdict(match) if match else None,
        "validated": False,
        "verdict": _verdict(stacks, match, present, devices),
    }
