# SPDX-License-Identifier: Apache-2.0
"""Operators called through the umbrella: same backend, same bits, same report as through their wheel."""

from __future__ import annotations

import subprocess
import sys

import mu_space
import muspace_msda
import pytest
import torch
from mu_space import families, ops
from muspace_core.testing.compare import assert_bits_equal


@pytest.mark.parametrize("name", families.public_names())
def test_every_listed_name_resolves(name: str) -> None:
    """What ``dir(mu_space.ops)`` promises is there, and the same object in both places."""
    assert name in dir(ops) and getattr(mu_space, name) is getattr(ops, name)


def test_a_call_through_the_umbrella(backend: str, device: str) -> None:
    keywords = {"backend": "reference"} if backend == "reference" else {}
    value = torch.randn(1, 20, 2, 8, device=device, requires_grad=True)
    arguments = (
        value, [(4, 4), (2, 2)], None, torch.rand(1, 3, 2, 2, 4, 2, device=device), torch.rand(1, 3, 2, 2, 4, device=device),
    )  # fmt: skip
    output = mu_space.multi_scale_deformable_attn(*arguments, **keywords)
    report = mu_space.get_last_dispatch_report()
    assert report is not None
    assert (report.operator, report.selected_backend) == ("multi_scale_deformable_attn", backend)
    output.sum().backward()
    assert value.grad is not None
    assert_bits_equal(muspace_msda.multi_scale_deformable_attn(*arguments, **keywords), output)


def test_compiled_through_the_umbrella(backend: str, device: str) -> None:
    """The lazy look-up must not break a graph."""
    if backend == "reference":
        pytest.skip("the registered operator is native")
    torch._dynamo.reset()
    value, locations = torch.randn(1, 16, 2, 8, device=device), torch.rand(1, 3, 2, 1, 4, 2, device=device)
    weights = torch.rand(1, 3, 2, 1, 4, device=device)

    def layer(v: torch.Tensor) -> torch.Tensor:
        return ops.multi_scale_deformable_attn(v, [(4, 4)], None, locations, weights) + 1

    assert_bits_equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(value), layer(value))


def test_a_missing_wheel_is_named_in_a_fresh_process() -> None:
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'muspace_msda': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from mu_space import ops\n"
        "try: ops.multi_scale_deformable_attn\n"
        "except (ImportError, AttributeError) as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = done.stdout.strip()
    assert "muspace-msda" in text and "\n" not in text, text
