"""The commands that a user types, and what the server then shows."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

SCRIPTS = Path(sys.executable).parent
CHECKPOINT = Path(__file__).parents[3] / "models" / "checkpoints" / "text-ssa.safetensors"


@dataclass(frozen=True)
class Server:
    grpc: str
    http: str

    def samples(self) -> list[Sample]:
        """What Prometheus would read now."""
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
    """`sharp-serve` on free ports; it must stop cleanly."""
    command = [SCRIPTS / "sharp-serve", folder, "--grpc-port", "0", "--http-port", "0", *options]
    log = folder.parent / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        found = None
        while found is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            found = re.search(r"sharp-serve: ready grpc=(\S+) http=(\S+)", log.read_text())
        assert found, log.read_text()
        yield Server(grpc=found[1], http=found[2])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, log.read_text()
