"""`Health`: whether a request would be served now, found out on the way that requests take."""

import asyncio
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from sharp.serving.api.errors import EngineError, QueueFullError, SharpError, StalledError
from sharp.serving.api.events import Event, Failed, Finished
from sharp.serving.api.request import GenerateRequest, new_request_id
from sharp.serving.api.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sharp.serving.frontends.service import GenerationService

WAIT_SECONDS = 1.0  # of one question for the probe; one that takes longer goes on, and the next one asks for the same
STARVED_SECONDS = 10.0  # for a thread of a pool; a server that has none for so long is not ready
# Steps, one after the other, without a token: as many may be the fault of requests. Then a request of its own tells.
MOST_FAILED_STEPS = 3
THREADS, ENGINE = "a thread", "the engine"


class Health:
    """Sends a probe through the pools of threads and the engine's queue; lives in the event loop of its service.

    A caller waits for a moment only: what counts is how long the probe has been under way.
    """

    def __init__(self, service: "GenerationService", stall_seconds: float) -> None:
        self._service = service
        self._stall_seconds = stall_seconds
        self._probe: asyncio.Task[None] | None = None
        self._began = 0.0
        self._stage = THREADS

    async def check_live(self) -> None:
        """Check that only a restart would not help.

        Raises:
            EngineError: the engine has ended, or its steps fail one after the other, a probe's too.
            StalledError: the engine, or the threads before it, are stuck.
        """
        self._service.check_engine()
        await self._check(self._stall_seconds)

    async def check_ready(self) -> None:
        """Check that a request would be served.

        Raises:
            SharpError: as `check_live`, or the server ends, or its threads have been busy for `STARVED_SECONDS`.
        """
        self._service.check_serving()
        await self._check(min(STARVED_SECONDS, self._stall_seconds))

    async def live(self) -> bool:
        """`check_live` finds nothing."""
        try:
            await self.check_live()
        except SharpError:
            return False
        return True

    async def ready(self) -> bool:
        """`check_ready` finds nothing."""
        try:
            await self.check_ready()
        except SharpError:
            return False
        return True

    async def _check(self, starved_seconds: float) -> None:
        if self._probe is None or self._probe.done():
            self._began = time.monotonic()
            self._probe = asyncio.create_task(self._pass())
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ask for it
        probe = self._probe
        await asyncio.wait({probe}, timeout=WAIT_SECONDS)
        if probe.done():
            probe.result()
            return
        took = time.monotonic() - self._began
        if took > (starved_seconds if self._stage is THREADS else self._stall_seconds):
            raise StalledError(f"a request would have waited for {self._stage} for {took:.0f} s; ask another server")

    async def _pass(self) -> None:
        """The way of a request, with nothing to do."""
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
                return  # no verdict; others wait
            except SharpError as error:
                text = f"{failed} steps of the engine failed one after the other, and a probe's too: {error}"
                raise EngineError(text) from error

    def _generate(self) -> "Future[None]":
        """A token, from the model."""
        done: Future[None] = Future()
        params = SamplingParams(temperature=0, max_tokens=1)
        request = GenerateRequest((0,), params, request_id=new_request_id(), prompt_ids=(0,), max_new_tokens=1)

        def take(event: Event) -> None:
            if done.done():
                return
            if isinstance(event, Failed):
                done.set_exception(event.error)
            elif isinstance(event, Finished):
                done.set_result(None)

        self._service.engine.submit(request, take)
        return done


def _nothing() -> None:
    pass
