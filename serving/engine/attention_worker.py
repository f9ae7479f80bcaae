"""Computes attention rows of a model folder, as the program of `sharp.serving.engine.attention_process`.

The first line on stdin names the folder. Every other line requests a row, and the reply is a line on stdout. The
process has low priority, because the server's threads come first. Its memory is limited, and the kernel ends it first
when the system runs out of memory. In a container whose processes are killed together, only the limit protects the
server.
"""

import json
import math
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sharp.core.manifest import MANIFEST_FILE, Manifest
from sharp.serving.api.errors import SharpError
from sharp.serving.backends.attention_rows import MOST_BYTES, AttentionReader, copied_bytes
from sharp.serving.backends.weights import COPIES, model_files

NICENESS = 10
ALONE_SECONDS = 150  # more than the server waits for a row, so the server is gone by then
BASE_BYTES = 2**31  # memory for everything but queries, caches and copies of weights


def main() -> None:
    """Reply to requests until stdin ends, which happens when the server ends."""
    # SIGINT and SIGTERM reach the whole process group, but the server ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    settings = json.loads(sys.stdin.buffer.readline())
    reader: AttentionReader | None = None
    for line in sys.stdin.buffer:
        signal.alarm(ALONE_SECONDS)
        try:
            if reader is None:
                reader = _open(**settings)
            reply = _reply(reader, json.loads(line))
        except SharpError as error:
            reply = {"error": str(error).replace(settings["folder"], "the model")}
        except Exception as error:  # ONNX Runtime has no common exception
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            reply = {"error": f"the model cannot compute it: {reason.replace(settings['folder'], 'the model')}"}
        signal.alarm(0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _open(folder: str, manifest: str, threads: int, copy: bool, verify: bool) -> AttentionReader:
    """Open the model of a folder for reading attention, within limits of memory.

    `manifest` is the server's manifest as JSON, which the folder must still have. `copy` and `verify` are those of
    `AttentionReader`. `threads` is the number of ONNX Runtime's threads.

    Raises:
        SharpError: the folder has changed.
    """
    path = Path(folder)
    if (path / MANIFEST_FILE).read_text(encoding="utf-8") != manifest:
        raise SharpError("the model's folder has changed since the server loaded it; start the server again")
    read = Manifest.model_validate_json(manifest)
    most = MOST_BYTES + BASE_BYTES + copied_bytes(path, read)
    if copy:
        most += COPIES * sum((path / name).stat().st_size for name in model_files(path, read))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    return AttentionReader(path, read, threads, copy=copy, verify=verify)


def _reply(reader: AttentionReader, requested: dict[str, Any]) -> dict[str, Any]:
    """Return the requested row of attention as JSON values, or an `error` if its weights are NaN or infinite."""
    row = reader.row(**requested)
    numbers = {**asdict(row), "weights": row.weights.tolist()}
    finite = all(map(math.isfinite, (*numbers["weights"], row.entropy, row.sink_mass)))
    return {"row": numbers} if finite else {"error": "the weights are not finite: the model's numbers are NaN or Inf"}


if __name__ == "__main__":
    main()
