# SPDX-License-Identifier: Apache-2.0
"""Result rows as cells of a table; a row that failed its gate shows its deviation and no speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from muspace_core.bench.case import SHORT_DTYPES

COLUMNS: Final = (
    "operator", "case", "dtype", "pass", "route", "deviation", "wall µs", "graph µs", "baseline", "peer µs", "goal", "met",
    "DRAM floor", "cache floor", "peak MiB",
)  # fmt: skip
OVERHEAD_COLUMNS: Final = (
    "operator", "device", "backend", "shape", "without grad µs", "with grad µs", "fwd+bwd µs", "torch.empty µs", "x.add_ µs",
    "budget",
)  # fmt: skip
#: End of a column's name → what the column means.
LEGEND: Final = {
    "deviation": "deviation: largest over the reference's peak (limit).",
    "baseline": "baseline: how many times faster than plain PyTorch in this run.",
    "floor": "floors: µs and our best time over it; reuse in L1 or sums in registers can go below the cache floor.",
    "peak MiB": "peak: most device memory that one call holds beyond its inputs.",
}
OVERHEAD_LEGEND: Final = (
    "host µs of one call on tiny inputs, less that of the torch.empty of its result. fwd+bwd: forward and backward together. "
    "budget: most µs without/with grad on an idle cpu core, and whether both are met; on a device compare with x.add_, the "
    "host time of one small in-place addition."
)
#: Pass of a case → its word in tables and options.
PASS_WORDS: Final = {"fwd": "fwd", "bwd": "bwd", "bwd_ordered": "ordered"}


def us(value: float | None) -> str:
    """Three significant digits, thousands unbroken."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _deviation(row: dict[str, Any]) -> str:
    if row["error"]:
        return row["error"]
    if not row["deviations"]:
        return "-"
    name = max(row["deviations"], key=lambda key: row["deviations"][key] / row["limits"][key])
    text = f"{name} {row['deviations'][name]:.1e} ({row['limits'][name]:.0e})"
    if not row["correct"] and row["deviations"][name] <= row["limits"][name]:
        return f"FAILED not reproducible, {text}"
    return text if row["correct"] else f"FAILED {text}"


def _floor(floor: float | None, over: float | None) -> str:
    if floor is None:
        return "-"
    return us(floor) + (f" ×{over:.2f}" if over is not None else "")


def _goal(row: dict[str, Any]) -> str:
    time = us(row["goal_us"]) if row["goal_us"] is not None else ""
    if row["goal_speedup"] is None or (time and row["goal_met_by"] != "baseline"):
        return time or "-"
    return f"×{row['goal_speedup']:.3g}" + (f" (estimate {time})" if time else "")


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else us(value / 2**20)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table."""
    baseline = f"×{row['speedup']:.1f} ({us(row['baseline_us'])})" if row["speedup"] is not None else "-"
    peer = f"{us(row['peer_us'])} {row['peer'] or ''}".strip()
    met = {True: "yes", False: "no", None: "-"}[row["goal_met"]]
    peak = _mebibytes(row["peak_bytes"])
    if row.get("baseline_peak_bytes") is not None:
        peak += f" (baseline {_mebibytes(row['baseline_peak_bytes'])})"
    return (
        row["operator"],
        row["case"],
        SHORT_DTYPES.get(row["dtype"], row["dtype"]),
        PASS_WORDS[row["pass"]],
        f"{row['backend'] or row['requested_backend']} {row['route'] or ''}".strip(),
        _deviation(row),
        us(row["wall_us"]),
        us(row["graph_us"]),
        baseline,
        peer,
        _goal(row),
        met,
        _floor(row["dram_floor_us"], row["over_dram_floor"]),
        _floor(row["cache_floor_us"], row["over_cache_floor"]),
        peak,
    )


def legend(columns: Sequence[str]) -> str:
    """The sentences about these columns."""
    return " ".join(text for name, text in LEGEND.items() if any(column.endswith(name) for column in columns))


def overhead_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the overhead table."""
    limits = "/".join(f"{limit:g}" for limit in row["budget_us"].values())
    verdict = {True: f"{limits} met", False: f"{limits} exceeded", None: "see x.add_"}[row["within_budget"]]
    return (
        row["operator"],
        row["device"],
        row["backend"],
        row["shape"],
        *(us(row[name]) for name in ("without_grad_us", "with_grad_us", "forward_backward_us", "empty_us", "add_us")),
        verdict,
    )


def title(document: dict[str, Any]) -> str:
    """Device, threads, torch and measured bandwidth in one line."""
    facts, ceilings = document["machine"], document["ceilings"]
    threads = f", {facts['threads']} threads" if facts["device_type"] == "cpu" else ""
    copy = f", copy {ceilings['copy_bytes_per_s'] / 1e9:.0f} GB/s" if ceilings else ""
    return f"{facts['device']}{threads}, torch {facts['torch']}{copy}"


def columns_in_use(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """Columns that say something in at least one row; the operator only where there is more than one."""
    used = [i for i in range(len(COLUMNS)) if any(row[i] != "-" for row in rows)]
    return used if len({row[0] for row in rows}) > 1 else used[1:]
