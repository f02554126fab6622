# SPDX-License-Identifier: Apache-2.0
"""The two backward routes of an operator that scatters: the default one and the ordered, bit-reproducible one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from muspace_core import get_last_dispatch_report
from muspace_core.testing.compare import assert_bits_equal, assert_close

#: Output, gradients.
Run = tuple[torch.Tensor, Sequence[torch.Tensor]]


def assert_routes_agree(
    forward: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]],
    upstream: Callable[[torch.Tensor], torch.Tensor],
    backend: str,
) -> list[Run]:
    """Both routes give the same sums, and the ordered one the same bits twice; returns its two runs behind the default one.

    ``forward()`` makes new leaves and returns the output with them; ``upstream(output)`` is the gradient that comes in.
    """
    runs: list[Run] = []
    routes = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        output, leaves = forward()
        report = get_last_dispatch_report()
        torch.use_deterministic_algorithms(False)
        routes.append(report.route.partition("+")[2] if report else "")
        # The route was fixed when the forward ran; the switch may be off again by now.
        runs.append((output.detach(), torch.autograd.grad(output, leaves, upstream(output))))
    for default, ordered, again in zip(*(gradients for _, gradients in runs), strict=True):
        assert_close(ordered, default, 1e-5)
        assert_bits_equal(again, ordered)
    if backend not in ("cpu", "reference"):
        assert routes[0] != "ordered" and routes[1:] == ["ordered", "ordered"], routes
    return runs
