# SPDX-License-Identifier: Apache-2.0
"""Every operator and operator module of the installed wheels: the very objects of ``muspace_<family>``, found lazily.

>>> from mu_space import ops
>>> "multi_scale_deformable_attn" in dir(ops)
True
"""

from __future__ import annotations

from typing import Any

from mu_space import families


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return families.star_names()
    if name.startswith("_"):
        raise AttributeError(f"module 'mu_space.ops' has no attribute {name!r}")
    found = globals()[name] = families.resolve(name, module="mu_space.ops")
    return found


def __dir__() -> list[str]:
    return families.public_names()
