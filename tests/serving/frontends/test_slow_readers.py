"""For clients that stop reading but keep their connection, the server holds a bounded number of bytes and seconds."""

import json
import re
import socket
import ssl
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
import trustme

from sharp.kserve import grpc_service_pb2 as kserve
from sharp.kserve import grpc_service_pb2_grpc
from sharp.serving.config import TlsConfig
from sharp.serving.frontends.grpc import inference
from sharp.serving.frontends.grpc import status as grpc_status
from sharp.serving.frontends.http import compact_json, openai_response, sending
from sharp.serving.frontends.http import protocol as http_protocol
from sharp.serving.frontends.kserve.text_inference import OutputTensors
from sharp.v1 import control_pb2, inference_pb2
from tests.serving.conftest import idle, wait_for
from tests.serving.grpc_client import Client, status

PADDING = "x" * 2**20  # added to every token, so that a few tokens fill the buffers of sockets and gRPC
STOPPED = "outcome=error .*the request was stopped"


@pytest.fixture
def start(start_server, counting, server_settings, steps, monkeypatch, caplog):
    caplog.set_level("INFO", "sharp.requests")
    for module in (http_protocol, grpc_status):
        monkeypatch.setattr(module, "UNREAD_SECONDS", 0.5)
    config = replace(server_settings.server, max_unread_messages=4)
    return lambda tls=None: start_server(counting, server=replace(config, tls=tls))


def check_ended(steps, caplog, outcome):
    """Assert that the request was stopped early, that nothing runs, and that its handler wrote a line of the log."""
    wait_for(lambda: "outcome=" in caplog.text)
    assert re.search(outcome, caplog.text)
    assert idle(steps)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture
def encrypted(tmp_path):
    """Return the server's certificate and key, and a client's context that trusts them."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return TlsConfig(tmp_path / "cert.pem", tmp_path / "key.pem"), context


@pytest.mark.parametrize(("stream", "tls"), [(True, False), (False, False), (True, True), (False, True)])
def test_over_http_the_connection_is_cut(start, encrypted, steps, monkeypatch, caplog, stream, tls):
    written, whole = compact_json.compact_json, compact_json.BODY_LEVELS

    def padded(value, levels=whole):
        return written(value, levels) + {0: PADDING, whole: PADDING * 16}.get(levels, "")

    for module in (sending, openai_response):
        monkeypatch.setattr(module, "compact_json", padded)
    body = {"model": "counting", "prompt": "a", "max_tokens": 120 if stream else 4, "temperature": 0, "stream": stream}
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(text)}\r\n\r\n"
    config, context = encrypted
    started = start(config if tls else None)
    host, port = started.http_address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        client = context.wrap_socket(plain, server_hostname=host) if tls else plain
        client.sendall((head + text).encode())
        check_ended(steps, caplog, STOPPED if stream else "outcome=length")
        assert len(steps) < 30  # of 120 steps
        received = b""
        with suppress(ssl.SSLEOFError):  # the connection is cut, not closed
            while part := client.recv(2**20):
                received = received[-10:] + part
        assert b"[DONE]" not in received


def stream_of_sharp(started):
    client = Client(started.grpc_address)
    return client.channel, client.stream(max_tokens=120)


def stream_of_kserve(started):
    channel = grpc.insecure_channel(started.grpc_address)
    request = kserve.ModelInferRequest(
        model_name="counting",
        inputs=[
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"a"]}},
            {"name": "stream", "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}},
        ],
        parameters={"temperature": {"double_param": 0}, "max_tokens": {"int64_param": 120}},
    )
    stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
    return channel, stub.ModelStreamInfer(iter([request]), timeout=20)


@pytest.mark.parametrize("ask", [stream_of_sharp, stream_of_kserve])
def test_over_grpc_the_handler_ends_and_the_status_comes_after_what_was_sent(start, steps, monkeypatch, caplog, ask):
    def padded(_delta):
        return inference_pb2.GenerateResponse(delta=inference_pb2.TokenDelta(text=PADDING))

    monkeypatch.setattr(inference, "delta_message", padded)
    monkeypatch.setattr(OutputTensors, "tensors", lambda *_: {"text_output": PADDING})
    started = start()
    channel, stream = ask(started)
    next(stream)
    check_ended(steps, caplog, STOPPED)
    assert len(steps) < 30  # of 120 steps
    assert status(lambda: list(stream)) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the client read nothing for 0.5 s; the request was stopped",
    )
    client = Client(started.grpc_address)
    assert client.control.GetLoad(control_pb2.GetLoadRequest()) == control_pb2.GetLoadResponse()  # no block is held
    client.channel.close()
    channel.close()
