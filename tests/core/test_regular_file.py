"""Files are read up to a limit; devices and pipes, which may be endless or silent, are refused."""

import os
from pathlib import Path

import pytest

from sharp.core.errors import InputError
from sharp.core.regular_file import read_regular_file


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_regular_file(path, 3) == b"abc"
    with pytest.raises(InputError, match="has more than 2 bytes, the limit"):
        read_regular_file(path, 2)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(InputError, match="is no regular file"):
            read_regular_file(path, 10)
    with pytest.raises(OSError, match="directory"):
        read_regular_file(tmp_path, 10)
