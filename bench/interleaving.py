"""A pause before each subject of a benchmark in which several are interleaved in one process."""

import time

# ONNX Runtime's threads spin for about 0.1 s after their last work, and would take the next subject's cores.
SPIN_SECONDS = 0.3


def pause() -> None:
    """Wait 0.3 s, until the threads of the previous subject sleep."""
    time.sleep(SPIN_SECONDS)
