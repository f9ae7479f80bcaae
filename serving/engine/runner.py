"""`StepRunner`: runs steps on the backend, each next step right behind the running one."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from sharp.core.machine import available_cpus
from sharp.plugins.cpu.sampling import MOST_THREADS
from sharp.serving.backends import DecoderBackend, SamplingBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.step import Step


class StepRunner:
    """A queue that runs the engine's steps on the backend, one after the other.

    It holds at most two steps: `current`, and one planned behind it (`follow`).

    With a thread, the backend computes there while the engine's thread plans and commits. When `current` is computed,
    the backend's thread samples its tokens, puts them into the following step and starts that step. Only then does the
    engine commit `current`. Sampling depends on how the previous step changed the sequences, so `current` is always the
    oldest uncommitted step. If the backend finishes a later step first, its sampling waits until the engine has called
    `take` for `current`.

    A GPU always has a thread, because ONNX Runtime keeps handles and captured CUDA graphs for each calling thread.

    Both threads read and change sequences, so each holds `lock` while it does. The engine releases the lock while it
    waits.
    """

    def __init__(self, backend: DecoderBackend, *, ahead: bool) -> None:
        """Allow a second step behind `current` if `ahead`; otherwise plan a step only after the commit of the last."""
        self.lock = threading.Lock()
        self.current: Step | None = None
        self._following: Step | None = None
        self._backend = backend
        self._sampling = backend if isinstance(backend, SamplingBackend) else None
        self._ahead = ahead
        self._threaded = ahead or backend.device != "cpu"
        # With a GPU, the CPU's cores are free to sample; on a CPU the model needs them.
        self._sampling_threads = 1 if backend.device == "cpu" else min(MOST_THREADS, available_cpus())
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # calls for the thread to make
        self._signals: SimpleQueue[None] = SimpleQueue()  # wake the engine
        self._interrupted = False
        self._thread: threading.Thread | None = None
        # The thread holds no reference to the runner, so it ends when the runner is garbage-collected.
        weakref.finalize(self, self._calls.put, None)

    @property
    def steps(self) -> list[Step]:
        """The steps that are not taken yet, in order."""
        return [step for step in (self.current, self._following) if step is not None]

    @property
    def may_follow(self) -> bool:
        """Whether a step may be planned behind `current`."""
        return self._ahead and self.current is not None and self._following is None and not self.current.has_draft

    def call(self, function: Callable[[], None]) -> None:
        """Call a function of the backend, such as `allocate_cache`, in the thread that computes the steps.

        The method waits for the function, and raises its exception.
        """
        if not self._threaded:
            function()
            return
        done: Future[None] = Future()

        def call() -> None:
            """Run the function and set its result or error."""
            try:
                function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._put(call)
        done.result()

    def start(self, step: Step) -> None:
        """Hand a step to the backend and return, without waiting for the result.

        The backend's thread computes the step; without a thread, the call of `take` does. The step becomes `current`.
        No other step may be in progress.
        """
        if self._sampling is not None:
            step.prepare_sampling()
        step.reserve()
        self.current = step
        self._start(step)

    def follow(self, step: Step) -> None:
        """Queue a step behind `current`, and return; it starts when the tokens of `current` are sampled.

        `may_follow` must be true.
        """
        step.reserve()
        self._following = step

    def withdraw(self) -> None:
        """Drop the step queued by `follow`, unless the backend has started it, and undo its `reserve`."""
        if self._following is not None and not self._following.started:
            self._following.release()
            self._following = None

    def take(self) -> Step | None:
        """Wait until `current` is computed and sampled, and return it for the engine to commit.

        The following step, if there is one and `current` does not change its plan, becomes `current`; it is computed
        while the engine commits the returned step. The result is None if `interrupt` was called before `current` was
        computed; then call `take` again.
        """
        step = self.current
        assert step is not None
        while not step.computed:
            if not self._threaded:
                step.compute(self._backend, self._sampling)
            else:
                self._wait()
                if self._interrupted and not step.computed:
                    self._interrupted = False
                    return None
        if not step.done:
            step.sample(self._sampling_threads)
        if (following := self._next()) is not None:
            self._start(following)
        self.withdraw()
        self.current, self._following = self._following, None
        step.release()
        return step

    def interrupt(self) -> None:
        """Make `take` return None early; it must be called again. Any thread may call this."""
        self._interrupted = True
        self._wake()

    def close(self) -> None:
        """Wait until no step is being computed."""
        while any(step.started and not step.computed for step in self.steps):
            self._wait()

    def _wait(self) -> None:
        """Wait for a signal, with the lock released."""
        self.lock.release()
        try:
            self._signals.get()
        finally:
            self.lock.acquire()

    def _wake(self) -> None:
        """Wake the thread that waits for steps."""
        if self._signals.empty():  # one signal is enough, because the woken thread checks everything
            self._signals.put(None)

    def _start(self, step: Step) -> None:
        """Mark the step as started, and compute it in the thread if there is one."""
        step.started = True
        if self._threaded:
            self._put(partial(self._compute, step))

    def _put(self, call: Callable[[], None]) -> None:
        """Queue a call for the thread of steps, which is started with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._calls,), name="steps", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _compute(self, step: Step) -> None:
        """Compute `step`, then every step that follows. Runs in the backend's thread."""
        following: Step | None = step
        while following is not None:
            step = following
            step.compute(self._backend, self._sampling)
            with self.lock:
                following = None
                if step is self.current and not step.done:
                    step.sample(self._sampling_threads)
                    following = self._next()
                    if following is not None:
                        following.started = True
            self._wake()

    def _next(self) -> Step | None:
        """Return the following step if it can start now that `current` is sampled, else None."""
        following, current = self._following, self.current
        if following is None or current is None or following.started:
            return None
        # After an error, such as MemoryError, the step is planned again when `current` is committed.
        with suppress(Exception):
            if following.take_tokens(current):
                if self._sampling is not None:
                    following.prepare_sampling()
                return following
        return None


def asynchronous(config: EngineConfig, backend: DecoderBackend) -> bool:
    """Whether the engine plans a step while another runs: the setting `async_scheduling`, by default on a GPU."""
    if config.async_scheduling == "auto":
        return backend.device != "cpu"
    return config.async_scheduling == "on"


def _work(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    """Run the calls of a queue until None; the function of the thread of steps."""
    while (call := calls.get()) is not None:
        call()
        del call  # the local variable would keep the engine alive
