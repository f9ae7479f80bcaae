"""Computes attention rows of a model folder: the program of `sharp.serving.engine.attention_process`.

The first line on stdin names the folder; every other one is a row, and its reply a line on stdout. The server's threads
come first. Memory is limited, and where the system has none left, it ends this process first; in a container whose
processes are ended together the limit is what protects the server.
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

from sharp.plugins.manifest import MANIFEST_FILE, Manifest
from sharp.serving.api.errors import SharpError
from sharp.serving.backends.attention_rows import MOST_BYTES, AttentionReader, copied_bytes

NICENESS = 10
ALONE_SECONDS = 150  # more than the server waits for a row: then it is not there any more
BASE_BYTES = 2**31  # of memory beside queries, caches and copies of weights


def main() -> None:
    """Reply until stdin ends, which it does with the server."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole group; the server ends this process
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
            reply = {"error": str(error)}
        except Exception as error:  # ONNX Runtime has no common exception
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            reply = {"error": f"the model cannot compute it: {reason.replace(settings['folder'], 'the model')}"}
        signal.alarm(0)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _open(folder: str, manifest: str, threads: int) -> AttentionReader:
    if (Path(folder) / MANIFEST_FILE).read_text(encoding="utf-8") != manifest:
        raise SharpError("the model's folder has changed since the server loaded it; start the server again")
    read = Manifest.model_validate_json(manifest)
    most = MOST_BYTES + BASE_BYTES + copied_bytes(Path(folder), read)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    return AttentionReader(Path(folder), read, threads)


def _reply(reader: AttentionReader, requested: dict[str, Any]) -> dict[str, Any]:
    row = reader.row(**requested)
    numbers = {**asdict(row), "weights": row.weights.tolist()}
    finite = all(map(math.isfinite, (*numbers["weights"], row.entropy, row.sink_mass)))
    return {"row": numbers} if finite else {"error": "the weights are not finite: the model's numbers are NaN or Inf"}


if __name__ == "__main__":
    main()
