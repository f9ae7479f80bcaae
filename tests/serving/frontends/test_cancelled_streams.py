"""Streams that clients cancel leave no memory behind.

A handler that swallows its cancellation would keep its call, also in gRPC.
"""

import os
from pathlib import Path

import grpc
import pytest

from tests.serving.conftest import wait_for
from tests.serving.grpc_client import Client

TOGETHER = 20
ROUNDS = 15
PADDING = "x" * 2**18  # in every request; 300 requests that are kept would take some 235 MB
MOST_GROWTH = 150 * 2**20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_the_memory_of_cancelled_streams_comes_back(start_server, counting, steps, caplog):
    caplog.set_level("INFO", "sharp.requests")
    client = Client(start_server(counting).grpc_address)

    def cancel_some():
        ended = caplog.text.count("outcome=cancelled")
        streams = [client.stream(stopping={"max_tokens": 120, "stop": [PADDING]}) for _ in range(TOGETHER)]
        for stream in streams:
            next(stream)
            stream.cancel()
            assert stream.code() == grpc.StatusCode.CANCELLED
        wait_for(lambda: caplog.text.count("outcome=cancelled") == ended + TOGETHER)

    for _ in range(3):  # warm up, so that memory that is allocated once does not count
        cancel_some()
    before = resident_bytes()
    for _ in range(ROUNDS):
        cancel_some()
    assert resident_bytes() - before < MOST_GROWTH
    client.channel.close()
