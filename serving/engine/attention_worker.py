"""Computes attention rows of a model folder: the program of `sharp.serving.engine.attention_process`.

The first line on stdin names the folder; every other one is a row, and its reply a line on stdout. The server's threads
come first, and where memory ends the kernel ends this process and not the server.
"""

import json
import math
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sharp.plugins.manifest import MANIFEST_FILE, Manifest
from sharp.serving.api.errors import SharpError
from sharp.serving.backends.attention_rows import AttentionReader

NICENESS = 19


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
        try:
            if reader is None:
                reader = _open(**settings)
            reply = _reply(reader, json.loads(line))
        except SharpError as error:
            reply = {"error": str(error)}
        except Exception as error:  # ONNX Runtime has no common exception
            reply = {"error": f"the model cannot compute it: {str(error).strip().splitlines()[0][:300]}"}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def _open(folder: str, manifest: str, threads: int) -> AttentionReader:
    if (Path(folder) / MANIFEST_FILE).read_text(encoding="utf-8") != manifest:
        raise SharpError(f"{folder} has changed since the server loaded it; start the server again")
    return AttentionReader(Path(folder), Manifest.model_validate_json(manifest), threads)


def _reply(reader: AttentionReader, requested: dict[str, Any]) -> dict[str, Any]:
    row = reader.row(**requested)
    numbers = {**asdict(row), "weights": row.weights.tolist()}
    finite = all(map(math.isfinite, (*numbers["weights"], row.entropy, row.sink_mass)))
    return {"row": numbers} if finite else {"error": "the weights are not finite: the model's numbers are NaN or Inf"}


if __name__ == "__main__":
    main()
