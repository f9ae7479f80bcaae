"""Headers of very many empty tensors: `sharp-export` refuses them in one sentence, without taking memory for each."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TENSORS = 400_000
MOST_KIB = 10**9 // 1024
EXPORT = Path(sys.executable).with_name("sharp-export")


def safetensors() -> bytes:
    """A file of empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(TENSORS)}).encode()
    return struct.pack("<Q", len(header)) + header


def gguf() -> bytes:
    """The same as GGUF."""
    names = (f"t{number}".encode() for number in range(TENSORS))
    entries = (struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0) for name in names)
    return b"GGUF" + struct.pack("<IQQ", 3, TENSORS, 0) + b"".join(entries)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("content", [safetensors, gguf], ids=lambda content: content.__name__)
def test_400_000_empty_tensors_are_refused_in_one_sentence_within_1_gb(content, tmp_path):
    file, errors = tmp_path / f"tiny.{content.__name__}", tmp_path / "errors"
    file.write_bytes(content())
    with errors.open("wb") as written:
        process = subprocess.Popen(
            [EXPORT, file, "--norm", "ssa", "-o", tmp_path / "out"], stdout=written, stderr=written
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2
    assert usage.ru_maxrss < MOST_KIB
    last = errors.read_text().strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert "the limit is" in last
    assert not (tmp_path / "out").exists()
