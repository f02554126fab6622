# SPDX-License-Identifier: Apache-2.0
"""Operator matrix, operator pages and tables of variables, all from the specs and the public objects."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from generate import docstring
from generate.docstring import escaped

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
            escaped(", ".join(spec.models)) or "–",
            f"`{spec.wheel}`",
        )
        for spec in specs(root)
    ]
    return table(("operator", "dtypes", "fallback", "used by", "wheel"), rows)


def status_notes(root: Path) -> str:
    """Where and how far each backend was taken, by operator."""
    rows = [
        (f"`{spec.name}`", backend, kind(spec.backends.get(backend)), _note(spec, backend))
        for spec in specs(root)
        for backend in BACKENDS
    ]
    return table(("operator", "backend", "shown", "where"), rows)


def variables(root: Path) -> str:
    """Variables that core reads, then the switches of the operators."""
    from muspace_core.environment import VARIABLES

    rows = [(f"`{variable.name}`", escaped(variable.effect)) for variable in VARIABLES]
    rows += [
        (f"`{s.name}`", f"`{spec.name}`: {escaped(s.effect)} (default `{s.default}`)")
        for spec in specs(root)
        for s in spec.switches
    ]
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
        f"{escaped(spec.summary[0].upper() + spec.summary[1:])}.",
        f"`mu_space.ops.{spec.name}`, the same object as `{spec.package}.{spec.name}`.",
        "## Backends",
        table(("backend", "shown", "dtypes", "where"), status),
        "## Call",
        f"```python\n{docstring.signature(operator, spec.name)}\n```",
        docstring.to_markdown(operator),
        "## Routes",
        f"Forward: {', '.join(f'`{route}`' for route in spec.forward_routes)}.",
        f"Backward: {', '.join(f'`{route}`' for route in spec.backward_routes)}." if spec.backward_routes else "",
        f"Determinism: {escaped(spec.determinism)}.",
        "## Tolerances",
        "Largest deviation from a higher-precision reference that the tests accept, relative to the reference's peak.",
        tolerances(spec),
        "## Under torch.compile and torch.export",
        f"Registered as `torch.ops.{spec.package}.{spec.name}`{gradient}, with fake kernels. In the profiler the call is "
        f"`{spec.qualified_name}`.",
        f"```text\n{spec.name}{_broken(spec.schema)}\n```",
        _switches(spec),
        *_helpers(spec),
        *_relatives(spec, "modules", "Layers"),
        *_relatives(spec, "compat", "Upstream names"),
        "## Lineage",
        f"{escaped(spec.lineage) or 'Own design'}. See [provenance](../provenance.md).",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _broken(schema: str) -> str:
    """A schema with one argument a line."""
    arguments, _, result = schema[1:].rpartition(") -> ")
    return "(\n    " + arguments.replace(", ", ",\n    ") + f",\n) -> {result}"


def _note(spec: Any, backend: str) -> str:
    return escaped(getattr(spec.backends.get(backend), "note", "")) or "–"


def _switches(spec: Any) -> str:
    if not spec.switches:
        return ""
    rows = ((f"`{s.name}`", f"`{s.default}`", escaped(s.effect)) for s in spec.switches)
    return "## Switches\n\n" + table(("variable", "default", "effect"), rows)


def _helpers(spec: Any) -> list[str]:
    """Functions of the wheel named after the operator (its plan, its ranks) and the classes that they return."""
    package = importlib.import_module(spec.package)
    public = {name: getattr(package, name) for name in package.__all__}
    operators = _operators(spec)
    functions = {
        name: item
        for name, item in public.items()
        if inspect.isfunction(item) and name not in operators and _owner(name, operators) == spec.name
    }
    returned = {inspect.signature(item).return_annotation for item in functions.values()}
    classes = {name: item for name, item in public.items() if inspect.isclass(item) and name in returned}
    out = ["## Helpers"] if functions else []
    for name, item in functions.items():
        call = f"```python\n{docstring.signature(item, name)}\n```"
        out += [f"### {name}", f"`{spec.package}.{name}`", call, docstring.to_markdown(item, 4)]
    for name, item in classes.items():
        out += [f"### {name}", f"`{spec.package}.{name}`", docstring.to_markdown(item, 4)]
    return out


def _relatives(spec: Any, module: str, title: str) -> list[str]:
    """Names of a module of the wheel that belong to the operator; a stand-in for an extension module is a line of functions."""
    try:
        found = importlib.import_module(f"{spec.package}.{module}")
    except ModuleNotFoundError:
        return []
    operators = _operators(spec)
    documented, lines = [], []
    for name, item in _public(found):
        path = f"{found.__name__}.{name}"
        if item is operators.get(name):
            if name == spec.name:
                lines.append(f"`{path}` is this operator itself.")
            continue
        origin = _origin(found, name.rpartition(".")[2], item)
        if origin is None or spec.name not in _callees(origin, name, operators):
            continue
        if isinstance(item, SimpleNamespace):
            functions = ", ".join(f"`{function}`" for function in vars(item))
            lines.append(f"`{path}`, in place of the extension module of that name: {functions}.")
        else:
            documented += [f"### {item.__name__}", f"`{path}`", docstring.to_markdown(item, 4)]
    return [f"## {title}", *lines, *documented] if lines or documented else []


def _operators(spec: Any) -> dict[str, Any]:
    """Operators of the wheel by name."""
    package = importlib.import_module(spec.package)
    return {other.name: getattr(package, other.name) for other in package.SPECS}


def _owner(name: str, operators: Iterable[str]) -> str | None:
    """The operator after which a function is named; the longest of ``bev_pool`` and ``bev_pool_v2``."""
    return max((operator for operator in operators if name.startswith(f"{operator}_")), key=len, default=None)


def _parts(module: ModuleType) -> list[ModuleType]:
    """The modules of a package, or the module itself."""
    paths = getattr(module, "__path__", None)
    if paths is None:
        return [module]
    return [importlib.import_module(f"{module.__name__}.{part.name}") for part in pkgutil.iter_modules(paths)]


def _public(module: ModuleType) -> list[tuple[str, Any]]:
    """(name under the module, object), those that only one of its parts exports as ``part.name``."""
    found = {name: getattr(module, name) for name in module.__all__}
    for part in _parts(module):
        for name in getattr(part, "__all__", ()):
            if found.get(name) is not getattr(part, name):
                found[f"{part.__name__.rpartition('.')[2]}.{name}"] = getattr(part, name)
    return list(found.items())


def _origin(module: ModuleType, name: str, item: Any) -> ModuleType | None:
    """The part of a module that defines an object, None for one that comes from elsewhere."""
    home = getattr(item, "__module__", None)
    owns = [part for part in _parts(module) if vars(part).get(name) is item and home in (None, part.__name__)]
    return owns[0] if owns else None


def _callees(origin: ModuleType, name: str, operators: dict[str, Any]) -> list[str]:
    """The operators that a module uses; of several those whose name the object's contains, if there are any."""
    used = [operator for operator, function in operators.items() if any(item is function for item in vars(origin).values())]
    plain = name.replace("_", "").lower()
    return [operator for operator in used if operator.replace("_", "") in plain] or used
