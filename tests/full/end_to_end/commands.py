"""Run the commands that a user types, and read what the server then shows."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.serving.processes import server_process

SCRIPTS = Path(sys.executable).parent
CHECKPOINT = Path(__file__).parents[3] / "models" / "checkpoints" / "text-ssa.safetensors"


@dataclass(frozen=True)
class Server:
    grpc: str
    http: str

    def samples(self) -> list[Sample]:
        """Return the samples that Prometheus would read now."""
        with urllib.request.urlopen(f"http://{self.http}/metrics?attention=head", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            return [sample for family in families for sample in family.samples]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    program, *arguments = map(str, command)
    return subprocess.run(
        [SCRIPTS / program, *arguments], capture_output=True, text=True, timeout=800, check=False, cwd="/tmp"
    )


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[Server]:
    """Run `sharp-serve` on free ports; the server must end cleanly."""
    with server_process(folder, *options, command=(SCRIPTS / "sharp-serve",)) as running:
        try:
            yield Server(grpc=running.grpc, http=running.http)
        finally:
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(timeout=30) == 0, running.printed()
