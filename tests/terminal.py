"""What a command shows on a terminal, where it may print in colour and show how far it is."""

import os
import pty
import subprocess
from collections.abc import Sequence


def on_terminal(command: Sequence[str], **variables: str) -> tuple[int, str]:
    """The exit code of a command, and everything that it writes to the terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm", **variables}
    ) as process:
        os.close(theirs)
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:  # Linux's way to say that the other end is closed
            pass
        finally:
            os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")
