"""Headers of very many empty tensors: `sharp-export` refuses them in one sentence, without much memory."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TENSORS = 400_000
MOST_KIB = 10**9 // 1024
EXPORT = Path(sys.executable).with_name("sharp-export")
# An extra process runs the command, because a direct child of the tests counts their memory as its own peak.
MEASURED = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(ended.returncode)
"""


def safetensors() -> bytes:
    """Return a safetensors file of empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(TENSORS)}).encode()
    return struct.pack("<Q", len(header)) + header


def gguf() -> bytes:
    """Return a GGUF file of empty tensors."""
    names = (f"t{number}".encode() for number in range(TENSORS))
    entries = (struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0) for name in names)
    return b"GGUF" + struct.pack("<IQQ", 3, TENSORS, 0) + b"".join(entries)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("content", [safetensors, gguf], ids=lambda content: content.__name__)
def test_400_000_empty_tensors_are_refused_in_one_sentence_within_1_gb(content, tmp_path):
    file = tmp_path / f"tiny.{content.__name__}"
    file.write_bytes(content())
    command = [sys.executable, "-c", MEASURED, EXPORT, file, "--norm", "ssa", "-o", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert int(result.stdout) < MOST_KIB
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert "the limit is" in last
    assert not (tmp_path / "out").exists()
