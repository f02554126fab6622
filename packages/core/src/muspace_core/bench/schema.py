# SPDX-License-Identifier: Apache-2.0
"""The result format, as a JSON schema, and a checker for the part of JSON Schema that it uses.

``benchmarks/schema.json`` is this schema written out (``python benchmarks/run.py --write-schema``); tests compare the two and
hold the checker against ``jsonschema``, which is not needed to run a benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

VERSION: Final = 1

_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TIME: Final = {"type": ["number", "null"], "exclusiveMinimum": 0}
_RATIO: Final = {"type": ["number", "null"], "minimum": 0}
_MAYBE_STRING: Final = {"type": ["string", "null"]}
_MAYBE_BOOL: Final = {"type": ["boolean", "null"]}
_MAYBE_COUNT: Final = {"type": ["integer", "null"], "minimum": 0}
_NULL: Final = {"type": "null"}
_NUMBER: Final = {"type": "number"}
_NUMBERS: Final = {"type": "object", "additionalProperties": _NUMBER}


def _closed(properties: Mapping[str, Any], later: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """An object of these properties; those named ``later`` came after the first results, which lack them."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": sorted(set(properties) - set(later)),
        "additionalProperties": False,
        **more,
    }


_TIMING: Final = _closed(
    {"median_us": _TIME, "best_us": _TIME, "worst_us": _TIME, "batches": _COUNT, "calls": _COUNT}, type=["object", "null"]
)
_WORK: Final = _closed(
    {
        **dict.fromkeys(("read_bytes", "written_bytes", "compulsory_bytes", "flops", "gathered_bytes"), _COUNT),
        **dict.fromkeys(("scattered_adds", "launches", "syncs"), _COUNT),
        "flop_kind": _STRING,
    },
    type=["object", "null"],
)
_ROW: Final = _closed(
    {
        **dict.fromkeys(("family", "operator", "case", "shape", "source", "requested_backend"), _STRING),
        "dtype": {"enum": ["float32", "bfloat16", "float16", "float64"]},
        "pass": {"enum": ["fwd", "bwd", "bwd_ordered"]},
        **dict.fromkeys(("backend", "route", "error", "graph_error", "baseline", "peer"), _MAYBE_STRING),
        "correct": {"type": "boolean"},
        "deviations": _NUMBERS,
        "limits": _NUMBERS,
        "undecided_share": _RATIO,
        **dict.fromkeys(("reproducible", "goal_met"), _MAYBE_BOOL),
        **dict.fromkeys(("wall_us", "graph_us", "baseline_us", "peer_us", "goal_us"), _TIME),
        **dict.fromkeys(("dram_floor_us", "cache_floor_us"), _RATIO),
        **dict.fromkeys(("over_dram_floor", "over_cache_floor", "speedup", "goal_speedup"), _RATIO),
        "goal_met_by": {"enum": ["graph", "wall", "baseline", None]},
        **dict.fromkeys(("peak_bytes", "baseline_peak_bytes", "input_sets", "working_set_bytes"), _MAYBE_COUNT),
        "timing": _closed({"wall": _TIMING, "graph": _TIMING}, type=["object", "null"]),
        "work": _WORK,
    },
    later=("baseline_peak_bytes",),
    # No speed without a passed gate.
    **{
        "if": {"properties": {"correct": {"const": False}}},
        "then": {"properties": dict.fromkeys(("wall_us", "graph_us", "timing", "speedup"), _NULL)},
    },
)
_OVERHEAD: Final = _closed(
    {
        **dict.fromkeys(("family", "operator", "shape", "device", "backend"), _STRING),
        **dict.fromkeys(("empty_us", "without_grad_us", "with_grad_us", "forward_backward_us", "add_us"), _NUMBER),
        "budget_us": _NUMBERS,
        "within_budget": {"type": ["boolean", "null"]},
    }
)
_MACHINE: Final = _closed(
    {
        **dict.fromkeys(("system", "cpu", "python", "torch", "device_type", "device"), _STRING),
        **dict.fromkeys(("cuda", "hip", "torch_musa", "tvm_ffi"), _MAYBE_STRING),
        **dict.fromkeys(("cores", "threads", "device_memory_bytes", "l2_bytes"), _MAYBE_COUNT),
    }
)
_CEILINGS: Final = _closed(
    {
        "copy_bytes_per_s": {"type": "number", "exclusiveMinimum": 0},
        "flops_per_s": _NUMBERS,
        "cache": _closed(
            {
                **dict.fromkeys(("gather_bytes_per_s", "adds_per_s", "launch_us", "sync_us"), _NUMBER),
                "source": _STRING,
            },
            type=["object", "null"],
        ),
    },
    type=["object", "null"],
)
SCHEMA: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "muSPACE benchmark result",
    **_closed(
        {
            "schema": {"const": VERSION},
            "date": {"type": "string"},
            "versions": {"type": "object", "additionalProperties": _STRING},
            "machine": _MACHINE,
            "ceilings": _CEILINGS,
            "method": _STRING,
            "rows": {"type": "array", "items": _ROW},
            "overhead": {"type": "array", "items": _OVERHEAD},
        }
    ),
}

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def _has_type(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _scalar_faults(value: Any, schema: Mapping[str, Any], where: str) -> list[str]:
    if "const" in schema and value != schema["const"]:
        return [f"{where}: expected {schema['const']!r}, got {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: expected one of {schema['enum']}, got {value!r}"]
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_has_type(value, name) for name in names):
            return [f"{where}: expected {' or '.join(names)}, got {type(value).__name__}"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            return [f"{where}: expected at least {schema['minimum']}, got {value}"]
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            return [f"{where}: expected more than {schema['exclusiveMinimum']}, got {value}"]
    return []


def faults(value: Any, schema: Mapping[str, Any] = SCHEMA, where: str = "result") -> list[str]:
    """Every place where ``value`` breaks ``schema``, one sentence each."""
    found = _scalar_faults(value, schema, where)
    if found:
        return found
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, entry in value.items():
            if name in properties:
                found += faults(entry, properties[name], f"{where}.{name}")
            elif extra is False:
                found.append(f"{where}: {name} is not expected")
            elif isinstance(extra, Mapping):
                found += faults(entry, extra, f"{where}.{name}")
        if "if" in schema and not faults(value, schema["if"], where):
            found += faults(value, schema["then"], where)
    if isinstance(value, list) and "items" in schema:
        for index, entry in enumerate(value):
            found += faults(entry, schema["items"], f"{where}[{index}]")
    return found


def validate(document: Any) -> None:
    """Raises ``ValueError`` with the first few faults of a result document."""
    found = faults(document)
    if found:
        raise ValueError("; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else ""))
