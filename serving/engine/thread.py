"""`EngineThread`: the engine in a thread of its own, behind a queue."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sharp.serving.api.errors import DeviceLostError, EngineError, NotFoundError, SharpError
from sharp.serving.api.events import Accepted, Event, Failed, Finished
from sharp.serving.api.request import Request
from sharp.serving.engine.report import EngineReport

logger = logging.getLogger(__name__)

# Takes the events of one request, in the engine's thread: it must return at once.
Sink = Callable[[Event], None]


class StepEngine(Protocol):
    """What the thread runs: `Engine`, or an encoder's. Only the thread uses it."""

    @property
    def failed_steps(self) -> int:
        """How many steps have failed, one after the other."""

    @property
    def interrupted(self) -> bool:
        """Whether the last call of `step` returned before its step was there, as `interrupt` was called."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""

    def add(self, request: Any) -> Accepted:
        """Queue a request."""

    def abort(self, request_id: str) -> list[Event]:
        """End a request; no event means that there is no such request."""

    def step(self) -> list[Event]:
        """Compute one step."""

    def interrupt(self) -> None:
        """Let a call of `step` that only waits return. Any thread may call this."""

    def close(self) -> None:
        """Wait until nothing is computed."""

    def report(self) -> EngineReport:
        """What happened since the last report."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless all that it holds agrees."""


@dataclass(frozen=True)
class _Submit:
    request: Request
    sink: Sink


@dataclass(frozen=True)
class _Ping:
    done: "Future[None]" = field(default_factory=Future, kw_only=True)

    def resolve(self, error: SharpError | None = None) -> None:
        """Set the result, unless the caller has given up."""
        if not self.done.set_running_or_notify_cancel():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


@dataclass(frozen=True)
class _Abort(_Ping):
    request_id: str
    sink: Sink | None


class EngineThread:
    """Runs an engine; the frontends give it requests and get events, and never touch its state."""

    def __init__(self, engine: StepEngine, observe: Callable[[EngineReport], None]) -> None:
        """`observe` gets a report after every step and every change, in the engine's thread."""
        self._engine = engine
        self._observe = observe
        self._commands: queue.SimpleQueue[_Submit | _Ping | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        # Done when the engine has ended: after stop(), or by a defect of its own.
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs now; requests that are left fail."""
        self._commands.put(None)
        self._engine.interrupt()
        self._thread.join()

    @property
    def seconds_in_step(self) -> float:
        """How long the step that runs now has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Its sink gets Accepted, Deltas and Finished, or Failed."""
        self._put(_Submit(request, sink))

    def abort(self, request_id: str, sink: Sink | None = None) -> "Future[None]":
        """End a request; the result is NotFoundError when it does not run.

        With `sink`, only the request that was submitted with it: a refused duplicate must not end the other one.
        """
        command = _Abort(request_id, sink)
        self._put(command)
        return command.done

    def ping(self) -> "Future[None]":
        """Done when the engine takes it from its queue."""
        command = _Ping()
        self._put(command)
        return command.done

    @property
    def failed_steps(self) -> int:
        """See `Engine`."""
        return self._engine.failed_steps

    def _put(self, command: _Submit | _Ping) -> None:
        self._commands.put(command)
        self._engine.interrupt()  # a request may join the step that is planned meanwhile
        if self.ended.done():  # nobody reads the queue any more
            self._reject_rest()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step_began = self._step_began or time.monotonic()
                working = self._engine.has_work
                events = self._engine.step() if working else []
                if not (working and self._engine.interrupted):
                    self._step_began = None
                # First: who has the last token of a completion finds all of it in the metrics.
                self._observe(self._engine.report())
                self._deliver(events)
                if not self._engine.has_work:
                    self._engine.check_integrity()  # nobody waits now
        except DeviceLostError as error:
            logger.critical("the engine ends: %s", error)
        except BaseException:  # a panic of Rust is no Exception, and nobody may wait for ever
            logger.exception("the engine ended")
        self._close()

    def _take_commands(self) -> bool:
        """Carry out what the queue holds, after waiting for something to do; False is the end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Submit):
                self._submit(command)
            elif isinstance(command, _Abort):
                self._abort(command)
                if not self._engine.has_work:
                    return True  # idle again: report it before waiting
            else:
                command.resolve()

    def _submit(self, command: _Submit) -> None:
        request_id = command.request.request_id
        try:
            accepted = self._engine.add(command.request)
        except SharpError as error:  # the id runs already, or the queue is full
            command.sink(Failed(request_id, error))
            return
        except Exception as error:  # say a guide that cannot be copied; nothing of the request is in the engine then
            logger.exception("request %s failed", request_id)
            command.sink(Failed(request_id, EngineError(f"the request failed: {str(error) or type(error).__name__}")))
            return
        self._sinks[request_id] = command.sink
        self._deliver([accepted])

    def _abort(self, command: _Abort) -> None:
        sink = self._sinks.get(command.request_id)
        if sink is None or command.sink not in (None, sink):
            command.resolve(NotFoundError(f"request_id {command.request_id!r} is not running"))
            return
        self._deliver(self._engine.abort(command.request_id))
        command.resolve()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            sink = self._sinks[event.request_id]
            if isinstance(event, Failed) or (isinstance(event, Finished) and event.last):
                del self._sinks[event.request_id]
            sink(event)

    def _close(self) -> None:
        """Tell everyone who still waits that nothing more will come."""
        for request_id, sink in self._sinks.items():
            sink(Failed(request_id, EngineError("the engine has stopped")))
        self._sinks.clear()
        self.ended.set_result(None)
        self._reject_rest()
        self._engine.close()

    def _reject_rest(self) -> None:
        error = EngineError("the engine has stopped")
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Submit):
                command.sink(Failed(command.request.request_id, error))
            elif command is not None:
                command.resolve(error)
