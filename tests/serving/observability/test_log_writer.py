"""A thread of its own writes the log, so that code that logs does not wait for a disk or a reader."""

import io
import logging
import os
from contextlib import suppress

import pytest

from sharp.serving.observability import log_writer
from sharp.serving.observability.log_writer import LogWriter
from tests.serving.conftest import wait_for


@pytest.fixture
def pipe():
    """Yield both ends of a pipe, the second as a text stream."""
    read, write = os.pipe()
    with open(write, "w") as stream:
        yield read, stream
        with suppress(OSError):
            os.close(read)


def record(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("sharp", logging.INFO, "file", 1, text, values, None)


def test_lines_that_nobody_reads_hold_nobody_up_and_are_counted(pipe, monkeypatch):
    monkeypatch.setattr(log_writer, "MOST_CHARACTERS", 500_000)
    read, stream = pipe
    writer = LogWriter(stream)
    for _ in range(100):
        writer.handle(record("a" * 9_999))
    received = b""
    while received.count(b"\n") < 50:
        received += os.read(read, 2**16)
    wait_for(lambda: not writer._characters)
    writer.handle(record("b"))
    writer.flush()
    assert os.read(read, 2**16).decode() == (
        "50 lines of the log are missing here: they could not be written in time\nb\n"
    )
    writer.close()


def test_lines_are_written_in_order_and_before_the_end_of_a_flush(pipe):
    read, stream = pipe
    writer = LogWriter(stream)
    for number in range(1000):
        writer.handle(record("%d", number))
    writer.flush()
    assert os.read(read, 2**16).decode().split() == [str(number) for number in range(1000)]
    writer.close()
    writer._thread.join(10)
    assert not writer._thread.is_alive()
    writer.handle(record("too late"))


def test_a_stream_in_memory_and_one_that_was_closed():
    stream = io.StringIO()
    writer = LogWriter(stream)
    writer.handle(record("a \ud800"))
    writer.flush()
    assert stream.getvalue() == "a \ud800\n"
    stream.close()
    writer.handle(record("b"))
    writer.flush()
    writer.close()


def test_a_disk_that_is_full_loses_lines_and_no_more(pipe):
    with open("/dev/full", "w") as full:
        writer = LogWriter(full)
        writer.handle(record("a"))
        writer.flush()
        writer.handle(record("b \ud800"))
        writer.flush()
        writer.close()
