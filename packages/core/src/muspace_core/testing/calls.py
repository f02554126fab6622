# SPDX-License-Identifier: Apache-2.0
"""Arrays to tensors, a call on the backend under test, tensors back to exact arrays: for tests in and beside the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from muspace_core.spec import OpSpec


def on_backend(operator: Callable[..., Any]) -> Callable[..., Any]:
    """``call(backend, ...)`` of a public function on the backend under test (which ``auto`` selects, except the reference)."""

    def call(under_test: str, /, *arguments: Any, **keywords: Any) -> Any:
        if under_test == "reference":
            keywords.setdefault("backend", "reference")
        return operator(*arguments, **keywords)

    return call


def dtypes_on(spec: OpSpec, backend: str) -> tuple[str, ...]:
    """Storage dtypes the spec promises on a backend; the reference is held to what the cpu backend promises."""
    return tuple(spec.dtypes["cpu" if backend == "reference" else backend])


def as_tensors(
    arguments: Mapping[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32, /, **own: torch.dtype
) -> dict[str, Any]:
    """Arrays as tensors: an argument named in ``own`` in that dtype, other float64 arrays, which stand for real numbers, in
    ``dtype``, the rest in the type they have.  What is no array is passed on."""

    def tensor(name: str, array: np.ndarray) -> torch.Tensor:
        kind = own.get(name, dtype if array.dtype == np.float64 else None)
        # from_numpy of a copy: no test may reach another one's memory through a shared array.
        return torch.from_numpy(np.array(array)).to(dtype=kind, device=device)

    return {name: tensor(name, value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def represented(tensor: torch.Tensor) -> np.ndarray:
    """The exact values a tensor holds, as a float64 (or integer) array: what an oracle must be asked about."""
    held = tensor.detach().cpu()
    return held.double().numpy() if held.is_floating_point() else held.numpy()


def upstream_gradient(output: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Seeded noise of the shape, dtype and device of an output."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(output.shape))).to(output)
