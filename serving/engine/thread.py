"""`EngineThread`: runs the engine in its own thread, behind a queue of commands."""

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

# A sink receives the events of one request. The engine's thread calls it, so it must return at once.
Sink = Callable[[Event], None]


class StepEngine(Protocol):
    """The interface of an engine that `EngineThread` runs. Only the thread calls it."""

    @property
    def failed_steps(self) -> int:
        """The number of consecutive steps that failed."""

    @property
    def interrupted(self) -> bool:
        """Whether the last call of `step` returned without a result, because `interrupt` was called."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do something."""

    def add(self, request: Any) -> Accepted:
        """Queue a request.

        Raises:
            AlreadyExistsError: a request with the same id is unfinished.
            QueueFullError: too much waits already.
        """

    def abort(self, request_id: str) -> list[Event]:
        """End a request and return its last events. The list is empty if there is no such request."""

    def step(self) -> list[Event]:
        """Compute one step and return the events of its requests. Called only if `has_work`.

        Raises:
            DeviceLostError: the GPU is lost, so no further step can be computed.
        """

    def interrupt(self) -> None:
        """Make a call of `step` that only waits return early. Any thread may call this."""

    def close(self) -> None:
        """Wait until nothing is being computed."""

    def report(self) -> EngineReport:
        """Return what happened since the last report, and start a new one."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the engine's state is consistent."""


@dataclass(frozen=True)
class _Submit:
    request: Request
    sink: Sink


@dataclass(frozen=True)
class _Ping:
    done: "Future[None]" = field(default_factory=Future, kw_only=True)

    def resolve(self, error: SharpError | None = None) -> None:
        """Complete `done` with None or the exception `error`; do nothing if the caller has cancelled it."""
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
    """A thread that runs an engine. Frontends submit requests and get events, and never touch its state."""

    def __init__(self, engine: StepEngine, observe: Callable[[EngineReport], None]) -> None:
        """Call `observe` with a report after every step and every change, in the engine's thread."""
        self._engine = engine
        self._observe = observe
        self._commands: queue.SimpleQueue[_Submit | _Ping | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        # This future is done when the engine has ended, after stop() or because of an error.
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs now, and wait for that. Unfinished requests fail with `EngineError`.

        The thread must have been started.
        """
        self._commands.put(None)
        self._engine.interrupt()
        self._thread.join()

    @property
    def seconds_in_step(self) -> float:
        """The duration of the step that runs now, in seconds; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Its sink receives Accepted, further events and the last Finished, or Failed.

        The sink is called in the engine's thread, or here with Failed if the engine has ended, and must return at once.
        """
        self._put(_Submit(request, sink))

    def abort(self, request_id: str, sink: Sink | None = None) -> "Future[None]":
        """End a request, whose sink then receives its last events.

        The future raises NotFoundError if the request is not running, and EngineError if the engine has ended. If
        `sink` is given, end only the request that was submitted with this sink: the end of a refused duplicate must not
        end the running request of the same id.
        """
        command = _Abort(request_id, sink)
        self._put(command)
        return command.done

    def ping(self) -> "Future[None]":
        """Return a future that is done when the engine's thread takes the ping from its queue.

        The future raises EngineError if the engine has ended.
        """
        command = _Ping()
        self._put(command)
        return command.done

    @property
    def failed_steps(self) -> int:
        """The number of consecutive steps that failed."""
        return self._engine.failed_steps

    def _put(self, command: _Submit | _Ping) -> None:
        """Queue a command for the thread. If the thread has ended, reject all queued commands."""
        self._commands.put(command)
        self._engine.interrupt()  # a new request may then join the step that is being planned
        if self.ended.done():  # the thread no longer reads the queue
            self._reject_rest()

    def _run(self) -> None:
        """Run steps and commands until the thread is told to end; the function of the thread."""
        try:
            while self._take_commands():
                self._step_began = self._step_began or time.monotonic()
                working = self._engine.has_work
                events = self._engine.step() if working else []
                if not (working and self._engine.interrupted):
                    self._step_began = None
                # Report before delivering, so that a client with the last token of a completion finds the completion in
                # the metrics.
                self._observe(self._engine.report())
                self._deliver(events)
                if not self._engine.has_work:
                    self._engine.check_integrity()  # the engine is idle, so the check delays no request
        except DeviceLostError as error:
            logger.critical("the engine ends: %s", error)
        except BaseException:  # a panic of Rust is not an Exception, and no client may wait forever
            logger.exception("the engine ended")
        self._close()

    def _take_commands(self) -> bool:
        """Execute the queued commands, after waiting for the first if the engine is idle. Return False to end."""
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
                    return True  # the engine is idle again, which is reported before waiting
            else:
                command.resolve()

    def _submit(self, command: _Submit) -> None:
        """Add a request to the engine and deliver its acceptance, or its failure, to its sink."""
        request_id = command.request.request_id
        try:
            accepted = self._engine.add(command.request)
        except SharpError as error:  # the id is in use, or the queue is full
            command.sink(Failed(request_id, error))
            return
        # For example, the guide cannot be copied. The engine then holds nothing of the request.
        except Exception as error:
            logger.exception("request %s failed", request_id)
            command.sink(Failed(request_id, EngineError(f"the request failed: {str(error) or type(error).__name__}")))
            return
        self._sinks[request_id] = command.sink
        self._deliver([accepted])

    def _abort(self, command: _Abort) -> None:
        """End a request and deliver its last events. The command resolves to NotFoundError if it does not run."""
        sink = self._sinks.get(command.request_id)
        if sink is None or command.sink not in (None, sink):
            command.resolve(NotFoundError(f"request_id {command.request_id!r} is not running"))
            return
        self._deliver(self._engine.abort(command.request_id))
        command.resolve()

    def _deliver(self, events: list[Event]) -> None:
        """Pass each event to the function that takes the request's events; forget the function after the last event."""
        for event in events:
            sink = self._sinks[event.request_id]
            if isinstance(event, Failed) or (isinstance(event, Finished) and event.last):
                del self._sinks[event.request_id]
            sink(event)

    def _close(self) -> None:
        """Fail all unfinished requests and queued commands, and close the engine."""
        for request_id, sink in self._sinks.items():
            sink(Failed(request_id, EngineError("the engine has stopped")))
        self._sinks.clear()
        self.ended.set_result(None)
        self._reject_rest()
        self._engine.close()

    def _reject_rest(self) -> None:
        """Fail all queued commands, because the engine has stopped."""
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
