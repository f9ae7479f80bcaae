"""A server in a process of its own."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 60
PORTS = ("--grpc-port", "0", "--http-port", "0")  # the system chooses free ports
SERVE = (sys.executable, "-c", "from sharp.core.cli import serve_main; serve_main()")


@dataclass(frozen=True)
class ServerProcess:
    """A running server: its process, its addresses, and the file that gets all its output."""

    process: "subprocess.Popen[bytes]"
    grpc: str
    http: str
    log: Path

    def printed(self) -> str:
        """Return both output streams until now."""
        return self.log.read_text(encoding="utf-8")


@contextmanager
def server_process(
    folder: Path,
    *options: object,
    command: tuple[object, ...] = SERVE,
    environment: Mapping[str, str] | None = None,
    stderr: int = subprocess.STDOUT,
) -> Iterator[ServerProcess]:
    """Run `command` on a model folder, on free ports of 127.0.0.1, and yield once it serves.

    A process that still runs at the end is killed. `stderr` may be the descriptor of another file than the log.
    """
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log"
        ports = ("--host", "127.0.0.1", *PORTS)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*map(str, (*command, folder, *ports, *options))],
                stdout=output,
                stderr=stderr,
                env=None if environment is None else dict(environment),
            )
        try:
            deadline, found = time.monotonic() + READY_SECONDS, None
            while found is None and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                found = re.search(r"sharp-serve: ready grpc=(\S+) http=(\S+)", log.read_text(encoding="utf-8"))
            assert found, log.read_text(encoding="utf-8")
            yield ServerProcess(process, found[1], found[2], log)
        finally:
            process.kill()
            process.wait()
