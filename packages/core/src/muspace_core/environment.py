# SPDX-License-Identifier: Apache-2.0
"""The ``MUSPACE_*`` variables that core reads, in one place.

They are read at every call, so that a test or a notebook can change them.  ``os.environ.get`` costs 0.6 µs (it encodes the
name and decodes the value); the mapping's own table of bytes costs a tenth of that, and every operator call asks six times.
"""

from __future__ import annotations

import os
from typing import Final

_TABLE = getattr(os.environ, "_data", None)
_BYTES: Final = isinstance(_TABLE, dict) and os.name == "posix"


class Variable:
    """One environment variable: ``value()`` is its text or ``""``, ``enabled()`` is true unless it is empty or ``0``."""

    __slots__ = ("_key", "effect", "name")

    def __init__(self, name: str, effect: str) -> None:
        self.name = name
        self.effect = effect
        self._key = name.encode()

    def value(self) -> str:
        if _BYTES:
            raw = _TABLE.get(self._key)  # type: ignore[union-attr]
            return os.fsdecode(raw) if raw else ""
        return os.environ.get(self.name, "")

    def enabled(self) -> bool:
        if _BYTES and self._key not in _TABLE:  # type: ignore[operator]
            return False
        return self.value() not in ("", "0")

    def raw(self) -> object:
        """The value in whatever form is cheapest to get; good for comparison only."""
        return _TABLE.get(self._key) if _BYTES else os.environ.get(self.name)  # type: ignore[union-attr]


DISPATCH_LOG = Variable("MUSPACE_DISPATCH_LOG", "1 prints one dispatch report per call to stderr")
STRICT = Variable("MUSPACE_STRICT_PATCH", "1 turns every fallback to the reference into an error")
CHECK = Variable("MUSPACE_CHECK", "1 validates the contents of device tensors: one small copy and one sync a call")
FORCE_BACKEND = Variable("MUSPACE_FORCE_BACKEND", "backend to use wherever a call says backend='auto' (for tests: emu)")
LIBRARY_PATH = Variable("MUSPACE_LIBRARY_PATH", "folders searched for lib<family>_<backend>.so instead of the installed ones")
NUM_THREADS = Variable("MUSPACE_NUM_THREADS", "threads of the cpu backend; default torch.get_num_threads()")

VARIABLES: Final = (DISPATCH_LOG, STRICT, CHECK, FORCE_BACKEND, LIBRARY_PATH, NUM_THREADS)


def dispatch_state() -> tuple[object, object, object]:
    """What a remembered dispatch decision depends on; equal states mean equal decisions."""
    if _BYTES:  # three look-ups without three calls: every operator call asks
        get = _TABLE.get  # type: ignore[union-attr]
        return (get(FORCE_BACKEND._key), get(LIBRARY_PATH._key), get(STRICT._key))
    return (FORCE_BACKEND.raw(), LIBRARY_PATH.raw(), STRICT.raw())
