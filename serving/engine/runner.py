"""`StepRunner`: steps on the backend, and the next one behind the one that runs."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from sharp.plugins.sampling import MOST_THREADS
from sharp.serving.backends import Backend, SamplingBackend
from sharp.serving.config import EngineConfig
from sharp.serving.engine.step import Step
from sharp.serving.machine import available_cpus


class StepRunner:
    """Runs one step after the other. It holds two at most: `current`, and one that may follow it.

    With a thread the backend computes in it while the engine's thread plans and commits. As soon as `current` is
    computed, that thread samples its tokens, puts them into the step that follows and starts that one; only then does
    the engine commit `current`. Sampling needs what the step before has done to the sequences, so `current` is always
    the oldest step that is not committed; if it is still another one, sampling waits for the engine to `take` that.

    A GPU always has a thread: ONNX Runtime keeps handles, and the CUDA graphs that it has captured, for each thread
    that calls it.

    Both threads look at sequences, so whoever does holds `lock`. The engine lets go of it where it waits.
    """

    def __init__(self, backend: Backend, *, ahead: bool) -> None:
        """With `ahead` a step may follow; otherwise one is planned when the one before it is committed."""
        self.lock = threading.Lock()
        self.current: Step | None = None
        self._following: Step | None = None
        self._backend = backend
        self._sampling = backend if isinstance(backend, SamplingBackend) else None
        self._ahead = ahead
        self._threaded = ahead or backend.device != "cpu"
        # Beside a GPU processors are idle; on a CPU they are the model's.
        self._sampling_threads = 1 if backend.device == "cpu" else min(MOST_THREADS, available_cpus())
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # of the thread
        self._signals: SimpleQueue[None] = SimpleQueue()  # wake the engine
        self._interrupted = False
        self._thread: threading.Thread | None = None
        # The thread knows its calls only, so that an engine that nobody has any more takes it with it.
        weakref.finalize(self, self._calls.put, None)

    @property
    def steps(self) -> list[Step]:
        """Those that are not taken yet, in order."""
        return [step for step in (self.current, self._following) if step is not None]

    @property
    def may_follow(self) -> bool:
        """Whether a step may be planned behind `current`."""
        return self._ahead and self.current is not None and self._following is None and not self.current.has_draft

    def call(self, function: Callable[[], None]) -> None:
        """Call a function of the backend, such as `allocate_cache`, where the steps are computed too."""
        if not self._threaded:
            function()
            return
        done: Future[None] = Future()

        def call() -> None:
            try:
                function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._put(call)
        done.result()

    def start(self, step: Step) -> None:
        """Compute a step; nothing else is to be done."""
        if self._sampling is not None:
            step.prepare_sampling()
        step.reserve()
        self.current = step
        self._start(step)

    def follow(self, step: Step) -> None:
        """Compute a step as soon as the tokens of `current` are known."""
        step.reserve()
        self._following = step

    def withdraw(self) -> None:
        """Forget the step that follows, unless it runs."""
        if self._following is not None and not self._following.started:
            self._following.release()
            self._following = None

    def take(self) -> Step | None:
        """Wait for `current`; it is the engine's then, to commit, and the one that follows is computed meanwhile.

        None: `interrupt` was called before it was there.
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
        """Let `take` return, to be called again. Any thread may call this."""
        self._interrupted = True
        self._wake()

    def close(self) -> None:
        """Wait until nothing is computed."""
        while any(step.started and not step.computed for step in self.steps):
            self._wait()

    def _wait(self) -> None:
        """Wait for a signal, without the lock."""
        self.lock.release()
        try:
            self._signals.get()
        finally:
            self.lock.acquire()

    def _wake(self) -> None:
        if self._signals.empty():  # one is enough: who is woken looks at everything
            self._signals.put(None)

    def _start(self, step: Step) -> None:
        step.started = True
        if self._threaded:
            self._put(partial(self._compute, step))

    def _put(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._calls,), name="steps", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _compute(self, step: Step) -> None:
        """In the thread: compute steps as long as one follows."""
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
        """The step that can be started now that `current` is sampled."""
        following, current = self._following, self.current
        if following is None or current is None or following.started:
            return None
        with suppress(Exception):  # say MemoryError: it is planned anew when `current` is committed
            if following.take_tokens(current):
                if self._sampling is not None:
                    following.prepare_sampling()
                return following
        return None


def asynchronous(config: EngineConfig, backend: Backend) -> bool:
    """Whether steps are scheduled asynchronously."""
    if config.async_scheduling == "auto":
        return backend.device != "cpu"
    return config.async_scheduling == "on"


def _work(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # or it would keep the engine
