# SPDX-License-Identifier: Apache-2.0
"""How far a property test searches.  Imports hypothesis."""

from __future__ import annotations

import os

from hypothesis import settings


def budget(examples: int, emulated: int) -> settings:
    """That many drawn calls, or ``emulated`` of them where each costs an emulated launch.

    Derandomised, so that a commit fails for what it changed; MUSPACE_TEST_RANDOM=1 searches further.
    """
    return settings(
        deadline=None,
        derandomize=not os.environ.get("MUSPACE_TEST_RANDOM"),
        max_examples=emulated if os.environ.get("MUSPACE_FORCE_BACKEND") == "emu" else examples,
        print_blob=True,
    )
