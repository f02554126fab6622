# SPDX-License-Identifier: Apache-2.0
"""Work done in a forked child or in threads, so that a crash or a deadlock there fails a test and does not end the run."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Sequence


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


def in_threads(works: Sequence[Callable[[], None]], timeout: float = 120) -> None:
    """Does all of it at once, each in a thread of its own; raises what the first one to fail raised."""
    failures: list[BaseException] = []
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            gate.wait(timeout=60)
            work()
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout)
        assert not thread.is_alive(), "deadlock"
    if failures:
        raise failures[0]
