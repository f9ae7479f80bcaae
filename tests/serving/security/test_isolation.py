"""Tokens are clients: each has its own prefix cache and its own share, on both ports."""

import json
import urllib.request
from dataclasses import replace

import pytest

from sharp import Client, SamplingParams
from sharp.serving.engine.engine import Engine
from sharp.serving.security.caller import host_of_peer, share_of, token_name

PROMPT = "abcdefghijkl"
PARAMS = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def start(start_server, counting, server_settings, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("one\ntwo\n")
    tokens.chmod(0o600)

    def started(**server):
        return start_server(counting, server=replace(server_settings.server, token_file=tokens, **server))

    return started


def over_http(started, token):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{started.http_address}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"]


def over_grpc(started, token):
    with Client(started.grpc_address, token=token) as client:
        return client.generate(PROMPT, PARAMS).usage.cached_tokens


@pytest.mark.parametrize(("first", "second"), [(over_http, over_grpc), (over_grpc, over_http)])
def test_what_another_token_sent_cannot_be_told(start, first, second):
    """A client cannot tell what another token sent.

    Once `cached_tokens`, and the time, showed that somebody else had sent the same prompt.
    """
    started = start()
    assert [first(started, "one"), second(started, "two"), second(started, "one")] == [0, 0, 8]


def test_tokens_of_one_organisation_may_share_the_prefix_cache(start):
    started = start(prefix_isolation="none")
    assert [over_http(started, "one"), over_http(started, "two")] == [0, 8]


def test_a_client_is_its_token_or_its_network(start, monkeypatch):
    seen, add = [], Engine.add

    def noted(engine, request):
        seen.append(request.client)
        return add(engine, request)

    monkeypatch.setattr(Engine, "add", noted)
    started = start()
    over_http(started, "one"), over_grpc(started, "one"), over_http(started, "two")
    assert seen[0] == seen[1] == f"token {token_name(b'one')}"
    assert seen[2] == f"token {token_name(b'two')}"
    assert "one" not in seen[0].split()[1]
    assert share_of("", "10.0.0.1") == "address 10.0.0.1"
    assert share_of("", "2001:db8::1") == share_of("", "2001:db8::2") != share_of("", "2001:db8:0:1::1")
    assert share_of("", "::ffff:10.0.0.1") == "address 10.0.0.1"
    peers = {"ipv4:10.0.0.1:99": "10.0.0.1", "ipv6:%5B2001:db8::1%5D:99": "2001:db8::1", "unix:/a": ""}
    assert {peer: host_of_peer(peer) for peer in peers} == peers
