# SPDX-License-Identifier: Apache-2.0
"""flash_bevpool_sca equals what it fuses: project the pillars, sample with multi_scale_deformable_attn, average the cameras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from muspace_core.testing.calls import as_tensors, upstream_gradient
from muspace_core.testing.compare import assert_close
from muspace_core.testing.plugin import load_sibling

inputs = load_sibling(__file__, "flash_bevpool_sca_inputs")
rigs = load_sibling(__file__, "flash_bevpool_inputs")
calls = load_sibling(__file__, "flash_calls")
muspace_msda = pytest.importorskip("muspace_msda", reason="muspace_msda is not installed: nothing to compose with")

#: The chain's own backward, which is multi_scale_deformable_attn's, takes this much in the emulation.
pytestmark = pytest.mark.emu_budget(2_000_000)

LEAVES = ("image_feats", "sampling_offsets", "attention_weights")


def points_in_images(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised places [B,N,Q,A,2] of the anchors and which camera sees which pillar [B,N,Q], item by item."""
    x_count, y_count = arguments["grid_size"][:2]
    x_min, x_max, y_min, y_max = arguments["roi_range"][:4]
    projections = arguments["projection_matrices"].double()
    place = {"dtype": torch.float64, "device": projections.device}
    x = x_min + (torch.arange(x_count, **place) + 0.5) * (x_max - x_min) / x_count
    y = y_min + (torch.arange(y_count, **place) + 0.5) * (y_max - y_min) / y_count
    z = torch.tensor(arguments["z_anchors"], **place)
    y, x, z = torch.meshgrid(y, x, z, indexing="ij")
    corners = torch.stack([x, y, z, torch.ones_like(x)], -1).flatten(0, 1)  # [Q, A, 4]
    seen = torch.einsum("bnij,qaj->bnqai", projections[:, :, :3], corners)
    depth = seen[..., 2]
    h, w = arguments["image_size"]
    at = seen[..., :2] / depth.clamp(min=arguments["eps"])[..., None] / torch.tensor([w, h], **place)
    visible = (depth > arguments["eps"]) & (at > 0).all(-1) & (at < 1).all(-1)
    return at, visible.any(-1)


def composed(arguments: dict[str, Any], sampler: Any) -> torch.Tensor:
    """The unfused chain, every camera dense; a pillar that a camera does not see is left out of that camera's sum."""
    feats, offsets, weights = (arguments[k] for k in LEAVES)
    batch, cameras, _, channels = feats.shape
    queries, points = offsets.shape[1], offsets.shape[4]
    at, hit = points_in_images(arguments)
    sizes = torch.tensor(arguments["spatial_shapes"], device=feats.device)
    at = at.to(offsets.dtype)[:, :, :, torch.arange(points) % at.shape[3]]
    normalised = offsets / sizes.flip(-1)[:, None].to(offsets.dtype)
    locations = at[:, :, :, None, None] + normalised[:, None]  # [B, N, Q, heads, L, PA, 2]
    value = feats.reshape(batch * cameras, -1, offsets.shape[2], channels // offsets.shape[2])
    shares = weights[:, None].expand(batch, cameras, *weights.shape[1:]).flatten(0, 1)
    each = sampler(value, sizes, None, locations.flatten(0, 1), shares).view(batch, cameras, queries, channels)
    total = torch.where(hit[..., None], each, 0).sum(1)
    return total / hit.sum(1).clamp(min=1)[..., None] if arguments["average"] == "hit_cameras" else total


def _tensors(arguments: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, Any]:
    made = as_tensors(arguments, device, dtype)
    for name in LEAVES:
        made[name].requires_grad_()
    return made


def _compare(backend: str, arguments: dict[str, Any], dtype: torch.dtype, device: str, output: float, gradient: float) -> None:
    left, right = (_tensors(arguments, dtype, device) for _ in range(2))
    fused = calls.sca(backend, left)
    # Where only this family's library was built, under a sanitizer for instance, the chain is composed of plain PyTorch.
    there = backend != "reference" and muspace_msda.why_not(backend) is None
    requested = "auto" if there else "reference"
    chain = composed(right, lambda *a: muspace_msda.multi_scale_deformable_attn(*a, backend=requested))
    assert_close(fused, chain, output, "output")
    upstream = upstream_gradient(fused)
    found = torch.autograd.grad(fused, [left[k] for k in LEAVES], upstream)
    wanted = torch.autograd.grad(chain, [right[k] for k in LEAVES], upstream)
    for name, of_fused, of_chain in zip(LEAVES, found, wanted, strict=True):
        assert_close(of_fused, of_chain, gradient, f"gradient of {name}")


NAMES = ("tiny", "h8_d4", "h3_d5", "pyramid", "three_points", "not_averaged", "four_cameras", "far_offsets", "nothing_seen")


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_composition(name: str, backend: str, device: str) -> None:
    arguments = next(c for c in inputs.CASES if c.name == name).build()
    _compare(backend, arguments, torch.float32, device, 4e-6, 2e-5)


@pytest.mark.backends("cpu", "reference")
@pytest.mark.parametrize("name", [*NAMES, "ring"])
def test_equals_the_composition_in_float64(name: str, backend: str) -> None:
    arguments = next(c for c in inputs.CASES if c.name == name).build()
    _compare(backend, arguments, torch.float64, "cpu", 1e-12, 1e-11)


def test_bevformer_heights_are_not_cell_centres(backend: str, device: str) -> None:
    """linspace from half a metre to half a metre below the top: handed over, they are used as they are."""
    heights = tuple(np.linspace(0.5, 8 - 0.5, 4) - 4)
    arguments = inputs.attend("bevformer", heads=2, channels=16, levels=((8, 12), (4, 6)), z_anchors=heights)
    _compare(backend, arguments, torch.float32, device, 4e-6, 2e-5)


def test_every_item_has_its_own_mask(backend: str, device: str) -> None:
    """Two calibrations that see different pillars: with item 0's mask for both, the second item would be wrong."""
    arguments = inputs.attend("masks", batch=2, cameras=3, grid=(5, 5))
    for n in range(3):  # the second car looks the other way
        arguments["projection_matrices"][1, n] = rigs.camera(2.9 + 0.9 * n, (0.4, -0.3, 0.2))
    given = _tensors(arguments, torch.float32, device)
    _, hit = points_in_images(given)
    assert (hit[0] != hit[1]).float().mean() > 0.1, "the two items see the same, so the test would show nothing"
    together = calls.sca(backend, given)
    for b in range(2):
        alone = calls.sca(backend, given | {name: given[name][b : b + 1] for name in calls.SCA_TENSORS})
        assert_close(together[b : b + 1], alone, 1e-6)
        unseen = ~hit[b].any(0)
        assert unseen.any() and (together[b][unseen] == 0).all() and (together[b][~unseen] != 0).any(-1).all()
    _compare(backend, arguments, torch.float32, device, 4e-6, 2e-5)
