# SPDX-License-Identifier: Apache-2.0
"""Work done in a forked child, so that a crash or a deadlock ends the child and not the test run."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable


def in_child(work: Callable[[], bytes], timeout: float = 60) -> bytes:
    """Bytes that ``work`` returns in a forked child; kills the child and fails if it takes longer than ``timeout`` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(work())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    chunks = []
    with os.fdopen(reading, "rb") as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], timeout)
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"the forked child did not answer within {timeout} s")
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise AssertionError(f"the forked child was ended by signal {os.WTERMSIG(status)}")
    assert status == 0, f"the forked child ended with status {status}"
    return b"".join(chunks)
