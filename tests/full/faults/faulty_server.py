"""A server whose engine fails on request as on a broken machine: the program that the tests of faults start.

The content of the file FAULT_FILE says which fault happens, and how many steps later: "NaN 3". The signal SIGUSR1 puts
the clock an hour forward, and SIGUSR2 two hours back.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sharp.core.cli import serve_main
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.engine import guide_trial
from sharp.serving.text import template_process

FAULT_FILE = Path(os.environ["FAULT_FILE"])
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.002"))  # without it requests end before a fault finds them
WORKER_SECONDS = 1.0  # the server waits a second more for a stopped worker


def main() -> None:
    """Serve."""
    clock, real = [0.0], time.time

    def put(number: int, _frame: Any) -> None:
        clock[0] += 3600.0 if number == signal.SIGUSR1 else -7200.0

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, put)
    time.time = lambda: real() + clock[0]
    guide_trial.WALL_SECONDS = template_process.WALL_SECONDS = WORKER_SECONDS
    works, waiting = OnnxRuntimeBackend.step, [("", 0)]

    def step(backend: OnnxRuntimeBackend, batch: Any) -> Any:
        time.sleep(STEP_SECONDS)
        if FAULT_FILE.exists():
            name, steps = FAULT_FILE.read_text().rsplit(maxsplit=1)
            FAULT_FILE.unlink()
            waiting[0] = (name, int(steps))
        name, steps = waiting[0]
        waiting[0] = ("", 0) if steps == 0 else (name, steps - 1)
        return works(backend, batch) if not name or steps else act(name, works(backend, batch))

    OnnxRuntimeBackend.step = step  # type: ignore[method-assign]
    sys.argv[0] = "sharp-serve"
    serve_main()


def act(name: str, output: Any) -> Any:
    """Return or raise the outcome that the fault gives to a step."""
    if name == "raises":
        raise RuntimeError("a kernel failed")
    if name == "no memory":
        raise MemoryError
    if name in ("hangs", "pauses"):
        time.sleep(600.0 if name == "hangs" else 1.5)
        return output
    return replace(output, logits=np.full_like(output.logits, np.nan))


if __name__ == "__main__":
    main()
