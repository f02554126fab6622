# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool_sca keeps the operator contract: see muspace_core.testing.contract for the inherited tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from muspace_bevpool import flash_bevpool_sca
from muspace_bevpool._spec import FLASH_BEVPOOL_SCA
from muspace_core.testing.contract import Arguments, OpContract
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_sca_oracle")
inputs = load_sibling(__file__, "flash_bevpool_sca_inputs")


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, Any]]:
    given = [arguments[k] for k in ("image_feats", "projection_matrices", "sampling_offsets", "attention_weights")]
    result = oracle.backward(grad_output, *given, oracle.View.of(arguments))
    return result.output, {
        "image_feats": result.grad_feats,
        "sampling_offsets": result.grad_offsets,
        "attention_weights": result.grad_weights,
    }


class TestFlashBevpoolSca(OpContract):
    spec = FLASH_BEVPOOL_SCA
    operator = staticmethod(flash_bevpool_sca)
    oracle = staticmethod(_oracle)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("image_feats",)
    geometry = ("sampling_offsets", "attention_weights")
    by_keyword = inputs.BY_KEYWORD
    ordered_route = "ordered"
    forms = {  # noqa: RUF012 - data of the contract, like the tuples above
        "spatial_shapes tensor": lambda t: t | {"spatial_shapes": torch.tensor(t["spatial_shapes"])},
        "lists": lambda t: t | {k: list(t[k]) for k in ("spatial_shapes", "image_size", "roi_range", "grid_size", "z_anchors")},
        "4x4": lambda t: t | {"projection_matrices": torch.nn.functional.pad(t["projection_matrices"], (0, 0, 0, 1))},
    }


def test_the_cases_keep_clear_of_every_decision() -> None:
    """No pillar at the rim of an image, no sample on a cell boundary: fp32 decides as float64 does, in every dtype."""
    for case in inputs.CASES:
        arguments = case.build()
        projections, view = arguments["projection_matrices"], oracle.View.of(arguments)
        seen = oracle.hits(projections, view)
        assert (oracle.hits(projections, view, 1e-4) == oracle.hits(projections, view, -1e-4)).all()
        assert seen.any() != (case.name == "nothing_seen") and not seen.all(), case.name
        levels = oracle.levels_of(arguments["image_feats"], view)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            offsets = arguments["sampling_offsets"]
            if offsets is not None:
                offsets = torch.from_numpy(offsets).to(dtype).double().numpy()
            offsets = oracle.completed(arguments["image_feats"], offsets, arguments["attention_weights"], view)[1]
            near = oracle.near_cell_boundary(projections, offsets, levels, view, 3e-5)
            assert not near.any(), f"{case.name}, {dtype}: {int(near.sum())} samples on a cell boundary"
