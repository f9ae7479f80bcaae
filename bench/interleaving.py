"""A pause before each subject, where several are interleaved in one process."""

import time

# ONNX Runtime's threads look for work for about 0.1 s after their last, and would take the next subject's cores.
SPIN_SECONDS = 0.3


def pause() -> None:
    """Wait until threads of the subject before sleep."""
    time.sleep(SPIN_SECONDS)
