"""Responses over HTTP that the server cuts off end with an error, not as if complete."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from sharp.serving.frontends.http import request_ids
from sharp.v1 import control_pb2
from tests.serving.conftest import wait_for
from tests.serving.grpc_client import Client
from tests.serving.running_server import serve_while

MESSAGE = "the server ended or the request was aborted before it was done; ask again"


def ask(started, stream, n=1):
    """Return the error that ends a long completion."""
    with (
        openai.OpenAI(base_url=f"http://{started.http_address}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError) as caught,
    ):
        for _ in client.completions.create(
            model="counting", prompt="a", max_tokens=120, temperature=0, n=n, stream=stream
        ):
            pass
    return caught.value


def check(error, stream):
    assert MESSAGE in str(error)
    assert error.type == "server_error"
    if not stream:
        assert (error.status_code, error.response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request(start_server, counting, steps, monkeypatch, caplog, stream):
    caplog.set_level("INFO", "sharp.requests")
    monkeypatch.setattr(request_ids, "new_request_id", lambda: "mine")
    started = start_server(counting)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, started, stream, 2)
        wait_for(lambda: len(steps) > 3)
        client = Client(started.grpc_address)
        client.control.Abort(control_pb2.AbortRequest(request_id="mine-0"))
        client.channel.close()
        check(asked.result(10), stream)
    wait_for(lambda: "outcome=cancelled" in caplog.text)  # cancelled, not failed


def test_what_takes_longer_than_a_server_waits(counting, server_settings, steps):
    def use(started, stop):
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, started, stream) for stream in (False, True)]
            wait_for(lambda: any(sequences == 2 for sequences, _ in steps))
            stop()
            return [response.result(10) for response in asked]

    whole, streamed = serve_while(counting, server_settings, use)
    check(whole, stream=False)
    check(streamed, stream=True)
