"""`AttentionProcess`: computes the attention weights of single tokens beside the engine, in its own process."""

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from sharp.core.manifest import MANIFEST_FILE, Manifest
from sharp.serving.api.errors import EngineError, TimeLimitError, UnavailableError
from sharp.serving.backends.attention_rows import most_tokens as most_tokens
from sharp.serving.worker_process import RETRY_SECONDS, WorkerLostError, WorkerProcess

SECONDS = 120.0  # for one row, including the start of the process and the computation of the sequence
IDLE_SECONDS = 60.0  # the process ends, and frees its memory, after being idle for this long
PROGRAM = Path(__file__).with_name("attention_worker.py")


@dataclass(frozen=True)
class TokenWeights:
    """The weights that one query gives to the keys that it sees, from position `first` on.

    `entropy` is the entropy of the weights in nats, `sink_mass` the share of an attention sink.
    """

    first: int
    weights: list[float]
    entropy: float
    sink_mass: float


class AttentionProcess:
    """A process that computes rows of attention weights, one at a time. Any thread may call `row` and `close`."""

    def __init__(self, folder: Path, threads: int, *, copy: bool = True, verify: bool = True) -> None:
        """Prepare to read `folder`, which must not change from now on. The process starts with the first row.

        The process copies the weights into memory if the server does (`copy`), and then compares the copies with their
        checksums (`verify`). If the server maps the weights, it watches their files.
        """
        manifest = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        settings = {"folder": str(folder.resolve()), "manifest": manifest, "threads": threads}
        self._settings = json.dumps({**settings, "copy": copy, "verify": verify})
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._idle: threading.Timer | None = None

    def row(self, tokens: list[int], layer: int, head: int, position: int) -> TokenWeights:
        """Return the weights with which a head, at token `position`, attends to the tokens up to there.

        Layers, query heads and positions are counted from 0. The caller has checked that they exist.

        Raises:
            EngineError: the model cannot compute the weights.
            TimeLimitError: the computation takes longer than `SECONDS`.
            UnavailableError: the process was killed, perhaps for lack of memory, or the server ends.
        """
        message = json.dumps({"tokens": tokens, "layer": layer, "head": head, "position": position}).encode()
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            process, first = self._running()
            try:
                reply = process.exchange(first + message, SECONDS)
            except TimeoutError as error:
                raise TimeLimitError(
                    f"the attention of {len(tokens)} tokens takes longer than {SECONDS:g} s; look at fewer"
                ) from error
            except WorkerLostError as error:
                raise _killed() from error
            self._idle = threading.Timer(IDLE_SECONDS, self._end_idle)
            self._idle.daemon = True
            self._idle.start()
        if "error" in reply:
            raise EngineError(reply["error"])
        return TokenWeights(**reply["row"])

    def _running(self) -> tuple[WorkerProcess, bytes]:
        """Return the process, started if necessary, and the bytes to send before the next message."""
        if self._closed:
            raise _killed()
        if self._process is not None and self._process.runs:
            return self._process, b""
        if self._process is not None:
            self._process.close()
        self._process = WorkerProcess(PROGRAM)
        return self._process, self._settings.encode() + b"\n"

    def _end(self) -> None:
        """End the worker process, if it runs."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _end_idle(self) -> None:
        """End the process after the idle time, unless another row was computed since the timer started."""
        with self._lock:
            if threading.current_thread() is self._idle:  # otherwise another row came meanwhile
                self._end()

    def close(self) -> None:
        """End the process. Callers that wait for a row get an error."""
        self._closed = True
        while not self._lock.acquire(timeout=0.05):  # the holder of the lock may still be starting the process
            process = self._process
            if process is not None:
                process.kill()
        try:
            if self._idle is not None:
                self._idle.cancel()
            self._end()
        finally:
            self._lock.release()


def why_not(manifest: Manifest, device: str, *, kernels: bool) -> str | None:
    """Return the reason, as a sentence, why rows of a served model cannot be computed, or None if they can."""
    what = "The attention on single tokens is computed on the CPU by Sharp's kernels"
    if manifest.kind != "decoder":
        return f"{what}, of a decoder."
    if device != "cpu":
        return f"{what}, and this model runs on a GPU: sharp inspect shows it for a text."
    if not kernels:
        return f"{what}, and this model runs without them."
    if manifest.norm.heads or manifest.cache.heads:
        return f"{what}, of models with one norm: this one has several in a layer."
    return None


def _killed() -> UnavailableError:
    """Return the error for a process that was killed, with the time after which to try again."""
    text = (
        f"the process that computes attention was ended, perhaps for want of memory; try again in {RETRY_SECONDS:g} s"
    )
    return UnavailableError(text, RETRY_SECONDS)
