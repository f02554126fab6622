# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool keeps the operator contract: see muspace_core.testing.contract for the inherited tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from muspace_bevpool import flash_bevpool
from muspace_bevpool._spec import FLASH_BEVPOOL
from muspace_core.testing.contract import Arguments, OpContract
from muspace_core.testing.plugin import load_sibling

oracle = load_sibling(__file__, "flash_bevpool_oracle")
inputs = load_sibling(__file__, "flash_bevpool_inputs")


def _oracle(arguments: Arguments, grad_output: np.ndarray, double: bool) -> tuple[np.ndarray, dict[str, Any]]:
    feats, depth, projections = (arguments[k] for k in ("image_feats", "depth_params", "projection_matrices"))
    output, grad_feats, grad_depth = oracle.backward(grad_output, feats, depth, projections, oracle.View.of(arguments))
    return output, {"image_feats": grad_feats, "depth_params": grad_depth}


def _sizes(tensors: Arguments) -> torch.Tensor:
    """(h, w) of every image, as upstream passes it."""
    batch, cameras, h, w, _ = tensors["image_feats"].shape
    return torch.tensor([h, w], device=tensors["image_feats"].device).expand(batch, cameras, 2).contiguous()


class TestFlashBevpool(OpContract):
    spec = FLASH_BEVPOOL
    operator = staticmethod(flash_bevpool)
    oracle = staticmethod(_oracle)
    cases = inputs.CASES
    empty_cases = inputs.EMPTY
    error_cases = inputs.ERRORS
    storage = ("image_feats",)
    geometry = ("depth_params",)
    ordered_route = "ordered"
    forms = {  # noqa: RUF012 - data of the contract, like the tuples above
        "feature_size": lambda t: t | {"feature_size": _sizes(t)},
        "feature_size list": lambda t: t | {"feature_size": _sizes(t).tolist()},
        "4x4": lambda t: t | {"projection_matrices": torch.nn.functional.pad(t["projection_matrices"], (0, 0, 0, 1))},
    }

    def repeats_its_bits(self, name: str, backend: str) -> bool:
        """Both gradients are scattered, so neither repeats off the cpu without the deterministic switch."""
        return backend == "cpu"


def test_the_cases_keep_clear_of_every_decision() -> None:
    """No sample so close to a border or to the threshold that fp32 might decide otherwise, in no dtype of the depths."""
    for case in inputs.CASES:
        arguments = case.build()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            depth = torch.from_numpy(arguments["depth_params"]).to(dtype).double().numpy()
            close = oracle.close_calls(depth, arguments["projection_matrices"], oracle.View.of(arguments))
            assert close == 0, f"{case.name}, {dtype}: {close} samples could go either way"
        counted = oracle.counted(arguments["depth_params"], arguments["projection_matrices"], oracle.View.of(arguments))
        assert counted.any() != (case.name == "nothing_seen"), case.name
        assert counted.all() == case.name.startswith("one_"), case.name
