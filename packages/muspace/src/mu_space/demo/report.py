# SPDX-License-Identifier: Apache-2.0
"""What the demo tells: a table for people, a dictionary for machines, and files that are either whole or absent."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from . import agreement, view_transform
from .frame import Frame
from .pipeline import Result

SCHEMA = "muspace-demo/1"


def columns(result: Result) -> list[str]:
    """Heads of the table; the sizes are in the words of the view transform."""
    return ["call", "backend", "route", view_transform.module(result.view_transform).SIZE, "ms", "deviation"]


def rows(result: Result) -> list[list[str]]:
    """One row of `columns` for each operator call."""
    out = []
    for call in result.calls:
        d = call.as_dict()
        backend = d["backend"] + (" (fallback)" if d["fallback"] else "")
        out.append([call.name, backend, d["route"], call.size, f"{call.ms:.1f}", f"{call.deviation:.1e}"])
    return out


def sentences(result: Result) -> list[str]:
    """What the numbers mean, a sentence each."""
    first, checked = result.ground.call, sum(call.checked for call in result.calls)
    what = "queries" if result.baseline is None else "cells"
    out = [
        f"deviation: largest difference from the reference on {checked} {what}, relative to the peak (limit {first.limit:.0e});"
        f" ms: median call on {first.dispatch['device']}"
    ]
    c, a = result.comparison, result.agreement
    if a is not None:
        out.append(
            f"road against that of attention, within {agreement.RADIUS:g} m of its LiDAR returns ({a.share:.0%} of the cells):"
            f" PSNR {a.psnr:.1f} dB, mean absolute difference {a.mean_absolute_difference:.3f} of full scale"
        )
    if c is not None:
        out.append(
            f"against the known ground, where it is visible ({c.share:.0%} of the cells): PSNR {c.psnr:.1f} dB"
            f" ({c.psnr_near:.1f} dB within 12 m), mean absolute error {c.mean_absolute_error:.3f} of full scale"
        )
    for call in result.calls:
        if call.dispatch["native_fallback"]:
            out.append(f"no native backend ran: {call.dispatch['reason']}")
            break
    return out


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def as_dict(frame: Frame, result: Result, files: dict[str, str]) -> dict[str, Any]:
    """The report as plain data: of the road-plane call at the top, every call of the view transform under `calls`.

    Keys: schema, source, cameras, view_transform, grid, device, backend, route, library, ms, deviation (largest of the
    calls), psnr, psnr_near, mean_absolute_error, visible_share (null for a recorded frame), agreement (with the picture of
    the default view transform: psnr, mean_absolute_difference, cells, share, call; null for that one), calls, seconds, files.
    """
    calls = [call.as_dict() for call in result.calls]
    c, grid = result.comparison, result.ground.grid
    return {
        "schema": SCHEMA,
        "source": frame.source,
        "cameras": [camera.name for camera in frame.cameras],
        "view_transform": result.view_transform,
        "grid": {"x": list(grid.x_range), "y": list(grid.y_range), "cell": grid.cell},
        **{key: calls[0][key] for key in ("device", "backend", "route", "library", "fallback", "ms")},
        "deviation": max(call["deviation"] for call in calls),
        "psnr": _number(c.psnr if c else None),
        "psnr_near": _number(c.psnr_near if c else None),
        "mean_absolute_error": _number(c.mean_absolute_error if c else None),
        "visible_share": _number(c.share if c else None),
        "agreement": _agreement(result),
        "calls": calls,
        "seconds": {name: round(value, 4) for name, value in result.seconds.items()},
        "files": files,
    }


def _agreement(result: Result) -> dict[str, Any] | None:
    a, baseline = result.agreement, result.baseline
    if a is None or baseline is None:
        return None
    return {
        "psnr": _number(a.psnr),
        "mean_absolute_difference": _number(a.mean_absolute_difference),
        "cells": a.cells,
        "share": a.share,
        "call": baseline.call.as_dict(),
    }


def write_all(folder: Path, contents: dict[str, bytes]) -> dict[str, str]:
    """Write the files; each appears whole or not at all. Returns their paths by name.

    All of them are first written beside their place under another name, then renamed, so that a full disk leaves the
    folder as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting: list[tuple[Path, Path]] = []
    try:
        for name, data in contents.items():
            temporary = folder / f".{name}.{os.getpid()}.part"
            waiting.append((temporary, folder / name))
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        for temporary, final in waiting:
            temporary.replace(final)
    finally:
        for temporary, _ in waiting:
            temporary.unlink(missing_ok=True)
    return {name: str(folder / name) for name in contents}
