"""The watch over event loops reports callbacks that block a loop, and nothing else."""

import asyncio
import gc
import sys
import time
from pathlib import Path

import pytest

from tests.serving.loop_watch import MOST_SECONDS


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def read() -> None:
    Path("/dev/null").read_bytes()


def wait() -> None:
    time.sleep(0.001)


def collect() -> None:
    for _ in range(4):
        gc.collect()


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (lambda: compute(2 * MOST_SECONDS), "the event loop stood for 1"),
        (read, "open "),
        pytest.param(wait, "time.sleep", marks=pytest.mark.skipif(sys.version_info < (3, 13), reason="no audit event")),
        (lambda: compute(MOST_SECONDS / 5), None),
        (collect, None),
    ],
    ids=["computes", "reads", "waits", "is short", "collects"],
)
def test_a_callback(loop_watch, callback, found):
    async def run() -> None:
        loop_watch.add(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.to_thread(compute, 2 * MOST_SECONDS)  # another thread's time is not the loop's
        loop_watch.remove(asyncio.get_running_loop())

    asyncio.run(run())
    seen, loop_watch.found[:] = list(loop_watch.found), []
    assert len(seen) == (found is not None)
    assert not found or seen[0].startswith(found)
