# SPDX-License-Identifier: Apache-2.0
"""Which operator wheels exist, which are installed, and which of them owns a public name.

A wheel announces itself through the entry-point group ``muspace.families`` (``msda = "muspace_msda"``).  In a source tree
that is merely on ``PYTHONPATH`` there are no entry points; the known packages are then looked up by import name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

ENTRY_POINT_GROUP: Final = "muspace.families"


class Names(NamedTuple):
    """Public names of a wheel."""

    operators: tuple[str, ...]
    #: Modules, plans and their builders.
    others: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.operators + self.others


#: The wheels of this release, so that a missing one can be named without importing anything.
KNOWN: Final[dict[str, Names]] = {
    "bevpool": Names(
        (
            "bev_pool",
            "bev_pool_v2",
            "voxel_pooling_train",
            "voxel_pooling_inference",
            "voxel_pool_depth",
            "flash_bevpool",
            "flash_bevpool_sca",
        ),
        (
            "PoolPlan",
            "bev_pool_plan",
            "bev_pool_v2_plan",
            "bev_pool_v2_ranks",
            "voxel_pool_depth_plan",
            "voxel_pooling_inference_plan",
            "voxel_pooling_train_plan",
        ),
    ),
    "msda": Names(("multi_scale_deformable_attn", "deformable_aggregation"), ("MultiScaleDeformableAttention",)),
}
#: Names that every wheel has of its own and that therefore mean nothing without it.
PER_WHEEL: Final = ("SPECS", "why_not")


@functools.cache
def installed() -> dict[str, str]:
    """Family → import name of every operator package that can be found; nothing is imported."""
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    for family in KNOWN:
        found.setdefault(family, f"muspace_{family}")
    return {family: package for family, package in sorted(found.items()) if _exists(package)}


def _exists(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def install_hint() -> str:
    """One sentence for a machine without any operator wheel."""
    return f"no operator wheel is installed; run: pip install {' '.join(f'muspace-{family}' for family in KNOWN)}"


@contextlib.contextmanager
def torch_needed(what: str, extra: str | None = None) -> Iterator[None]:
    """Turns the failed import of torch, on which no wheel depends, or of a package of ``extra`` into one ``ImportError``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "torch":
            remedy = "install the build of your accelerator's vendor, or pip install torch"
        elif extra is not None:
            remedy = f"pip install 'muspace[{extra}]'"
        else:
            raise
        raise ImportError(f"{what} needs {error.name}, which is not installed: {remedy}") from None


def _import_name(family: str) -> str:
    name = installed().get(family)
    if name is None:
        raise ImportError(f"the wheel muspace-{family} is not installed; run: pip install muspace-{family}")
    return name


def package(family: str) -> ModuleType:
    """The imported package of a family; a missing wheel, or torch, is an ``ImportError`` that names it."""
    name = _import_name(family)
    with torch_needed(name):
        return importlib.import_module(name)


def specs(family: str) -> tuple[Any, ...]:
    """``OpSpec`` of every operator of an installed family; its package is not imported for that, so torch is not needed."""
    name = _import_name(family)
    if name not in sys.modules:
        found = importlib.util.find_spec(name)
        folders = found.submodule_search_locations if found is not None else None
        spec = importlib.machinery.PathFinder.find_spec(f"{name}._spec", folders) if folders else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return tuple(module.SPECS)
    package(family)
    return tuple(importlib.import_module(f"{name}._spec").SPECS)


def owner(name: str) -> str | None:
    """Family that exports ``name``: from the table of known names, else by asking the installed packages."""
    for family, names in KNOWN.items():
        if name in names.all:
            return family
    for family in installed():
        if name in exports(family):
            return family
    return None


def exports(family: str) -> tuple[str, ...]:
    """Operators, modules and references of an installed family: what ``mu_space.ops`` offers of it."""
    operators = [spec.name for spec in specs(family)]
    names = dict.fromkeys([*operators, *getattr(package(family), "__all__", ())])
    return tuple(name for name in names if name not in PER_WHEEL)


def public_names() -> list[str]:
    """Names that ``mu_space.ops`` answers to: the known ones and, without importing them, no others."""
    return sorted(name for names in KNOWN.values() for name in names.all)


def star_names() -> list[str]:
    """What ``from mu_space.ops import *`` gives: the names of the installed wheels, the known ones without importing them."""
    return sorted({name for family in installed() for name in (KNOWN[family].all if family in KNOWN else exports(family))})


def resolve(name: str, module: str) -> Any:
    """The object behind ``<module>.<name>``; ``AttributeError`` for a name that no muSPACE wheel has."""
    family = owner(name)
    if family is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; `mu-space ops` lists the operators")
    return getattr(package(family), name)
