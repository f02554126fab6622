# SPDX-License-Identifier: Apache-2.0
"""The autograd class by which FlashBEV's own code calls flash_bevpool: depth parameters come first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from muspace_bevpool import compat, flash_bevpool
from muspace_core import get_last_dispatch_report
from muspace_core.testing.calls import as_tensors
from muspace_core.testing.compare import assert_bits_equal
from muspace_core.testing.plugin import load_sibling

inputs = load_sibling(__file__, "flash_bevpool_inputs")
pytestmark = pytest.mark.backends("cpu", "emu", "cuda", "hip", "musa")


def _function() -> Any:
    """The family's classes whose name says FlashBEV; there is one."""
    found = [v for k, v in vars(compat).items() if "flashbev" in k.lower().replace("_", "") and hasattr(v, "apply")]
    assert len({id(f) for f in found}) == 1, found
    return found[0]


def _given(device: str, **sizes: Any) -> dict[str, Any]:
    made = as_tensors(inputs.lift("compat", **sizes), device)
    h, w = made["image_feats"].shape[2:4]
    made["feature_size"] = torch.tensor([h, w], dtype=torch.int32, device=device).expand(*made["image_feats"].shape[:2], 2)
    return made


@pytest.mark.parametrize("distribution", [0, 1])
def test_depth_parameters_come_first(distribution: int, backend: str, device: str) -> None:
    given = _given(device, batch=2, distribution=distribution, threshold=0.01)
    wanted = flash_bevpool(*given.values())
    feats, depth, *rest = given.values()
    assert_bits_equal(_function().apply(depth, feats, *rest), wanted)
    live = feats.clone().requires_grad_(), depth.clone().requires_grad_()
    _function().apply(live[1], live[0], *rest).sum().backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() and (t.grad != 0).any() for t in live)
    report = get_last_dispatch_report()
    assert report is not None and report.selected_backend == backend and report.operator == "flash_bevpool"
