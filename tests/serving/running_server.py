"""A server that runs while a client uses it, for tests of how a server ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sharp.serving.config import Settings
from sharp.serving.server.server import Started, run_server

Result = TypeVar("Result")


def serve_while(folder: Path, settings: Settings, use: Callable[[Started, Callable[[], None]], Result]) -> Result:
    """Return the result of `use(started, stop)`, run in a thread beside the server; `stop` acts as SIGTERM."""

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_start(started: Started) -> None:
            used.append(pool.submit(use, started, lambda: loop.call_soon_threadsafe(stop.set)))

        await run_server(folder, settings, on_start, stop)

    used: list = []
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(serve())
        return used[0].result(10)
