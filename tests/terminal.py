"""Run a command on a pseudo-terminal, where it may print colours and progress."""

import os
import pty
import subprocess
from collections.abc import Sequence


def on_terminal(command: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run a command on a terminal; return its exit code and everything that it wrote."""
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
        except OSError:  # Linux reports that the other end is closed
            pass
        except BaseException:  # such as the end of a test's time
            process.kill()
            raise
        finally:
            os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")
