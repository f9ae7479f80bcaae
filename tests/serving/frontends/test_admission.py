"""Threads for work that would block the event loop are bounded, and do not keep a process alive."""

import asyncio
import subprocess
import sys
import threading

import pytest

from sharp.serving.api.errors import QueueFullError
from sharp.serving.frontends.admission import Pool

STUCK = """
import asyncio, threading
from sharp.serving.frontends.admission import Pool

async def main():
    asyncio.ensure_future(Pool("stuck", 1, 1).run(threading.Event().wait))
    await asyncio.sleep(0.1)

asyncio.run(main())
print("over")
"""


def test_more_than_may_wait_is_refused_and_a_probe_is_not():
    async def run():
        pool, free = Pool("prepared", 2, 3), threading.Event()
        jobs = [asyncio.ensure_future(pool.run(free.wait)) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="3 requests wait to be prepared already; try again in 1 s"):
            await pool.run(free.wait)
        probe = asyncio.ensure_future(pool.run(lambda: "probe", always=True))
        free.set()
        assert await asyncio.gather(*jobs, probe) == [True] * 5 + ["probe"]
        assert await pool.run(lambda: 1) == 1
        pool.close()

    asyncio.run(run())


def test_clients_are_served_in_rotation_and_a_full_queue_is_shared():
    """Once a client that sent many requests made all others wait behind them, or get 429."""

    async def run():
        pool, free, done = Pool("parsed", 1, 4), threading.Event(), []

        def job(name):
            return lambda: done.append(name)

        running = asyncio.ensure_future(pool.run(free.wait, "greedy"))
        await asyncio.sleep(0.05)
        greedy = [asyncio.ensure_future(pool.run(job(f"greedy {number}"), "greedy")) for number in range(4)]
        await asyncio.sleep(0)
        honest = asyncio.ensure_future(pool.run(job("honest"), "honest"))
        other = asyncio.ensure_future(pool.run(job("other"), "other"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await pool.run(job("more"), "honest")
        for refused in greedy[2:]:
            with pytest.raises(QueueFullError, match="4 requests wait to be parsed already"):
                await refused
        free.set()
        await asyncio.gather(running, *greedy[:2], honest, other)
        assert done == ["greedy 0", "honest", "other", "greedy 1"]
        assert await pool.run(lambda: 1, "honest") == 1
        pool.close()

    asyncio.run(run())


def test_errors_come_back_also_those_that_are_no_exceptions():
    async def run():
        pool = Pool("prepared", 1, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            await pool.run(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await pool.run(lambda: next(iter(())))
        pool.close()

    asyncio.run(run())


def test_what_nobody_waits_for_any_more_is_not_done():
    async def run():
        pool, free, done = Pool("prepared", 1, 9), threading.Event(), []
        first = asyncio.ensure_future(pool.run(free.wait))
        given_up = asyncio.ensure_future(pool.run(lambda: done.append("given up")))
        await asyncio.sleep(0)
        given_up.cancel()
        free.set()
        await first
        await pool.run(lambda: done.append("last"))
        assert done == ["last"]
        pool.close()

    asyncio.run(run())


def test_a_thread_that_is_stuck_does_not_keep_the_process():
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "over\n")
