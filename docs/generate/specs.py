# SPDX-License-Identifier: Apache-2.0
"""Operator matrix, operator pages and tables of variables, all from the specs and the public objects."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from generate import docstring

BACKENDS = ("cpu", "cuda", "hip", "musa", "emu")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
#: What the keys of a dispatch report say; the build fails when this and the dataclass part ways.
REPORT_KEYS = {
    "operator": "name of the operator",
    "device": "device of the tensor that decides, `cuda:0`",
    "dtype": "its storage dtype, `bfloat16`",
    "requested_backend": "the `backend=` of the call",
    "selected_backend": "what ran: `cpu`, `cuda`, `hip`, `musa`, `emu`, `reference` or `meta`",
    "native_fallback": "`True` if the PyTorch reference ran because no native backend could",
    "route": "kernel of the forward, and with a gradient `<forward>+<backward>`",
    "reason": "why this backend: `requested`, `native backend of …`, or the sentence that refused the native one",
    "library": "file of the native library, or `None`",
    "versions": "torch, muspace-core, the operator wheel and apache-tvm-ffi",
}


def families(root: Path) -> list[str]:
    """Operator families of this checkout."""
    return sorted(folder.parent.name for folder in (root / "packages").glob("*/CMakeLists.txt"))


def specs(root: Path) -> list[Any]:
    """Every OpSpec of this checkout."""
    found = (importlib.import_module(f"muspace_{family}._spec").SPECS for family in families(root))
    return [spec for group in found for spec in group]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; cells may hold anything but line breaks."""
    head = list(header)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kind(status: Any) -> str:
    """Coloured word of a status."""
    name = status.kind if status else "absent"
    return f'<span class="kind kind-{name}">{name}</span>'


def dtypes(spec: Any, backend: str) -> str:
    return ", ".join(SHORT.get(name, name) for name in spec.dtypes.get(backend, ())) or "–"


def kinds(root: Path, folder: str = "") -> str:
    """Operators against backends; every cell is the word of the spec. `folder`: where the operator pages lie."""
    rows = [(f"[`{s.name}`]({folder}{s.name}.md)", *(kind(s.backends.get(b)) for b in BACKENDS)) for s in specs(root)]
    return table(("operator", *BACKENDS), rows)


def details(root: Path) -> str:
    """What else tells operators apart at a glance."""
    rows = [
        (
            f"`{spec.name}`",
            ", ".join(dict.fromkeys(SHORT.get(name, name) for names in spec.dtypes.values() for name in names)),
            "PyTorch reference" if spec.reference else "none",
            ", ".join(spec.models) or "–",
            f"`{spec.wheel}`",
        )
        for spec in specs(root)
    ]
    return table(("operator", "dtypes", "fallback", "used by", "wheel"), rows)


def status_notes(root: Path) -> str:
    """Where and how far each backend was taken, by operator."""
    rows = [
        (f"`{spec.name}`", backend, kind(spec.backends.get(backend)), getattr(spec.backends.get(backend), "note", ""))
        for spec in specs(root)
        for backend in BACKENDS
    ]
    return table(("operator", "backend", "shown", "where"), rows)


def variables(root: Path) -> str:
    """Variables that core reads, then the switches of the operators."""
    from muspace_core.environment import VARIABLES

    rows = [(f"`{variable.name}`", variable.effect) for variable in VARIABLES]
    rows += [(f"`{s.name}`", f"{spec.name}: {s.effect} (default `{s.default}`)") for spec in specs(root) for s in spec.switches]
    return table(("variable", "effect"), rows)


def report_keys(root: Path) -> str:
    """Keys of a dispatch report in their order."""
    from muspace_core.dispatch import DispatchReport

    names = [field.name for field in dataclasses.fields(DispatchReport)]
    if names != list(REPORT_KEYS):
        raise ValueError(f"REPORT_KEYS: expected the fields of DispatchReport, {names}, got {list(REPORT_KEYS)}")
    return table(("key", "meaning"), ((f"`{name}`", REPORT_KEYS[name]) for name in names))


def routes(root: Path) -> str:
    """Routes by operator."""
    rows = [
        (f"`{spec.name}`", ", ".join(f"`{r}`" for r in spec.forward_routes), ", ".join(f"`{r}`" for r in spec.backward_routes))
        for spec in specs(root)
    ]
    return table(("operator", "forward", "backward"), rows)


def tolerances(spec: Any) -> str:
    rows = [(SHORT.get(name, name), f"{t.output:g}", f"{t.grad:g}") for name, t in spec.tolerances.items()]
    return table(("storage", "output", "gradients"), rows)


def operator_page(spec: Any) -> str:
    """The whole page of one operator."""
    package = importlib.import_module(spec.package)
    operator = getattr(package, spec.name)
    status = [(backend, kind(spec.backends.get(backend)), dtypes(spec, backend), _note(spec, backend)) for backend in BACKENDS]
    gradient = " and its backward" if spec.backward_schema else ""
    parts = [
        f"# {spec.name}",
        f"{spec.summary[0].upper()}{spec.summary[1:]}.",
        f"`mu_space.ops.{spec.name}`, the same object as `{spec.package}.{spec.name}`.",
        "## Backends",
        table(("backend", "shown", "dtypes", "where"), status),
        "## Call",
        f"```python\n{docstring.signature(operator, spec.name)}\n```",
        docstring.to_markdown(operator),
        "## Routes",
        f"Forward: {', '.join(f'`{route}`' for route in spec.forward_routes)}.",
        f"Backward: {', '.join(f'`{route}`' for route in spec.backward_routes)}." if spec.backward_routes else "",
        f"Determinism: {spec.determinism}.",
        "## Tolerances",
        "Largest deviation from a higher-precision reference that the tests accept, relative to the reference's peak.",
        tolerances(spec),
        "## Under torch.compile and torch.export",
        f"Registered as `torch.ops.{spec.package}.{spec.name}`{gradient}, with fake kernels. In the profiler the call is "
        f"`{spec.qualified_name}`.",
        f"```text\n{spec.name}{_broken(spec.schema)}\n```",
        _switches(spec),
        *_relatives(spec),
        "## Lineage",
        f"{spec.lineage or 'Own design'}. See [provenance](../provenance.md).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _broken(schema: str) -> str:
    """A schema with one argument a line."""
    arguments, _, result = schema[1:].rpartition(") -> ")
    return "(\n    " + arguments.replace(", ", ",\n    ") + f",\n) -> {result}"


def _note(spec: Any, backend: str) -> str:
    return getattr(spec.backends.get(backend), "note", "") or "–"


def _switches(spec: Any) -> str:
    if not spec.switches:
        return ""
    rows = ((f"`{s.name}`", f"`{s.default}`", s.effect) for s in spec.switches)
    return "## Switches\n\n" + table(("variable", "default", "effect"), rows)


def _relatives(spec: Any) -> list[str]:
    """Layers and upstream names of the same wheel; a stand-in for a compiled extension module is a line of its functions."""
    out: list[str] = []
    for module, title in (("modules", "Layers of this wheel"), ("compat", "Upstream names in this wheel")):
        try:
            found = importlib.import_module(f"{spec.package}.{module}")
        except ModuleNotFoundError:
            continue
        public = {name: getattr(found, name) for name in found.__all__}
        extensions = {name: item for name, item in public.items() if isinstance(item, SimpleNamespace)}
        items = [item for name, item in public.items() if name not in extensions and _within(item.__module__, found.__name__)]
        out += [f"## {title}"] if items or extensions else []
        for item in items:
            out += [f"### {item.__name__}", f"`{found.__name__}.{item.__name__}`", docstring.to_markdown(item, 4)]
        for name, extension in extensions.items():
            functions = ", ".join(f"`{function}`" for function in vars(extension))
            out.append(f"`{found.__name__}.{name}`, in place of the extension module of that name: {functions}.")
    return out


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
