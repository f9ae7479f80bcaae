"""`Health`: whether a request would be served now, tested by a probe that goes the way of requests."""

import asyncio
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sharp.serving.api.errors import EngineError, QueueFullError, SharpError, StalledError
from sharp.serving.api.events import Event, Failed, Finished

if TYPE_CHECKING:
    from sharp.serving.frontends.service import GenerationService

WAIT_SECONDS = 1.0  # how long a caller waits for the probe; a slower probe goes on, and later callers wait for it, too
STARVED_SECONDS = 10.0  # a server whose probe waits longer for a thread of a pool is not ready
# After this number of failed steps in a row, the probe generates a token itself, because the requests may have caused
# the failures.
MOST_FAILED_STEPS = 3
THREADS, ENGINE = "a thread", "the engine"


class Health:
    """A probe through the pools of threads and the engine's queue; lives in the event loop of its service.

    A caller waits for at most `WAIT_SECONDS`. The verdict depends on how long the probe has been under way.
    """

    def __init__(self, service: "GenerationService", stall_seconds: float) -> None:
        self._service = service
        self._stall_seconds = stall_seconds
        self._probe: asyncio.Task[None] | None = None
        self._began = 0.0
        self._stage = THREADS

    async def check_live(self) -> None:
        """Check that the server needs no restart.

        Raises:
            EngineError: the engine has ended, or its last steps and the probe's own request failed.
            StalledError: the engine or a pool of threads is stuck.
        """
        self._service.check_engine()
        await self._check(self._stall_seconds)

    async def check_ready(self) -> None:
        """Check that a request would be served.

        Raises:
            SharpError: as `check_live`, or the server is ending, or its threads were busy for `STARVED_SECONDS`.
        """
        self._service.check_serving()
        await self._check(min(STARVED_SECONDS, self._stall_seconds))

    async def live(self) -> bool:
        """Return whether `check_live` finds no error."""
        try:
            await self.check_live()
        except SharpError:
            return False
        return True

    async def ready(self) -> bool:
        """Return whether `check_ready` finds no error."""
        try:
            await self.check_ready()
        except SharpError:
            return False
        return True

    async def _check(self, starved_seconds: float) -> None:
        """Send a probe through the engine, or wait for the one under way, for up to `WAIT_SECONDS`.

        `starved_seconds` is the limit of waiting for a thread.

        Raises:
            StalledError: the probe is older than its limit.
        """
        if self._probe is None or self._probe.done():
            self._began = time.monotonic()
            self._probe = asyncio.create_task(self._pass())
            # If no caller asks for the exception, asyncio would log that it was never retrieved.
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        probe = self._probe
        await asyncio.wait({probe}, timeout=WAIT_SECONDS)
        if probe.done():
            probe.result()
            return
        took = time.monotonic() - self._began
        if took > (starved_seconds if self._stage is THREADS else self._stall_seconds):
            raise StalledError(f"a request would have waited for {self._stage} for {took:.0f} s; ask another server")

    async def _pass(self) -> None:
        """Go through the pools and the engine as a request does, with nothing to compute.

        Raises:
            EngineError: the engine has ended, or its last steps and the probe's own request failed.
        """
        self._stage = THREADS
        for pool in (self._service.parsing, self._service.preparing):
            await pool.run(_nothing, always=True)
        self._stage = ENGINE
        engine = self._service.engine
        await asyncio.wrap_future(engine.ping())
        if (failed := engine.failed_steps) >= MOST_FAILED_STEPS:
            try:
                await asyncio.wrap_future(self._generate())
            except QueueFullError:
                return  # a full queue says nothing about the steps
            except SharpError as error:
                text = f"{failed} steps of the engine failed one after the other, and a probe's too: {error}"
                raise EngineError(text) from error

    def _generate(self) -> "Future[None]":
        """Submit the model's probe request of one token; return a future that is done when it has finished.

        If the request fails, the future raises its error.
        """
        done: Future[None] = Future()

        def take(event: Event) -> None:
            """Complete the probe when its request has finished or failed."""
            if done.done():
                return
            if isinstance(event, Failed):
                done.set_exception(event.error)
            elif isinstance(event, Finished):
                done.set_result(None)

        self._service.engine.submit(self._service.model.probe(), take)
        return done


def _nothing() -> None:
    pass
