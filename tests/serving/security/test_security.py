"""TLS, client certificates and bearer tokens on both ports, with files that change while the server runs."""

import asyncio
import datetime
import json
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from sharp import AsyncClient, Client, ClientTls, SamplingParams
from sharp.core.file_watch import INTERVAL_SECONDS
from sharp.serving.api.errors import InputError, QueueFullError, SharpError, UnauthenticatedError
from sharp.serving.config import TlsConfig
from sharp.serving.frontends.grpc.limits import OpenCalls
from sharp.serving.frontends.http.authentication import TokenMiddleware
from sharp.serving.observability.metrics import Metrics
from sharp.serving.security.open_access import GRPC_OPEN, HTTP_OPEN, METRICS_OF_A_NETWORK, METRICS_THREADS
from sharp.serving.security.tls import Tls
from sharp.serving.security.tokens import Tokens
from tests.serving.conftest import wait_for
from tests.serving.grpc_client import status

PARAMS = SamplingParams(temperature=0, max_tokens=3)


class Authority:
    """A certificate authority, and the files of certificates that it issues."""

    def __init__(self, folder):
        self.folder = folder
        self.ca = trustme.CA()
        self.file = self.write("ca.pem", self.ca.cert_pem.bytes())

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content)
        return path

    def issue(self, name):
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        cert = self.write(f"{name}.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return cert, self.write(f"{name}.key", issued.private_key_pem.bytes())


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def served(start_server, counting, server_settings):
    def start(**server):
        return start_server(counting, server=replace(server_settings.server, **server))

    return start


@pytest.fixture(scope="module")
def encrypted(served, authority):
    return served(tls=TlsConfig(*authority.issue("server")))


def get(address, path, *, context=None, token=None, body=None, scheme="https"):
    request = urllib.request.Request(f"{scheme}://{address}{path}", body)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, context=context, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def certificate(address, ca):
    """Return the certificate that the HTTP port shows."""
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca))


def test_both_ports_are_encrypted(encrypted, authority):
    with Client(encrypted.grpc_address, tls=ClientTls(authority.file)) as client:
        assert client.generate("a", PARAMS).text == "bcd"
    context = ssl.create_default_context(cafile=authority.file)
    assert get(encrypted.http_address, "/health", context=context)[0] == 200


def test_a_client_without_tls_or_with_another_authority_gets_one_sentence(encrypted, tmp_path):
    sentences = {None: "it speaks TLS and the client does not", Authority(tmp_path).file: "certificate is not trusted"}
    for ca, sentence in sentences.items():
        tls = None if ca is None else ClientTls(ca)
        with (
            Client(encrypted.grpc_address, tls=tls, attempts=1) as client,
            pytest.raises(SharpError, match=sentence),
        ):
            client.generate("a", PARAMS)


def test_client_certificates(served, authority, tmp_path):
    started = served(tls=TlsConfig(*authority.issue("mutual"), client_ca=authority.file))
    known = ClientTls(authority.file, *authority.issue("client"))
    with Client(started.grpc_address, tls=known) as client:
        assert client.generate("a", PARAMS).text == "bcd"
    stranger = Authority(tmp_path)
    for tls in (ClientTls(authority.file), ClientTls(authority.file, *stranger.issue("stranger"))):
        with Client(started.grpc_address, tls=tls, attempts=1) as client, pytest.raises(SharpError):
            client.generate("a", PARAMS)
    context = ssl.create_default_context(cafile=authority.file)
    with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
        get(started.http_address, "/health", context=context)
    context.load_cert_chain(known.cert, known.key)
    assert get(started.http_address, "/health", context=context)[0] == 200


def test_a_renewed_certificate_is_taken_without_a_restart(served, authority, caplog):
    cert, key = authority.issue("renewed")
    started = served(tls=TlsConfig(cert, key))
    first = certificate(started.http_address, authority.file)
    key.write_text("half written")
    with caplog.at_level(logging.WARNING):
        wait_for(lambda: "new connections still get the old certificate" in caplog.text)
    assert certificate(started.http_address, authority.file) == first
    authority.issue("renewed")
    wait_for(lambda: certificate(started.http_address, authority.file) != first)
    second = certificate(started.http_address, authority.file)
    assert second != first
    assert second == cert.read_text().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    assert certificate(started.grpc_address, authority.file) == second


@pytest.mark.parametrize("broken", ["missing", "no-pem", "other-key", "encrypted"])
def test_tls_files_that_cannot_be_used(authority, tmp_path, broken):
    cert, key = authority.issue("broken")
    if broken == "missing":
        key = tmp_path / "none.key"
    elif broken == "no-pem":
        cert.write_text("no certificate")
    elif broken == "other-key":
        key = authority.issue("another")[1]
    else:
        from cryptography.hazmat.primitives import serialization as forms

        loaded = forms.load_pem_private_key(key.read_bytes(), None)
        sealed = forms.BestAvailableEncryption(b"secret")
        key.write_bytes(loaded.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.TraditionalOpenSSL, sealed))
    with pytest.raises(InputError, match="does not exist" if broken == "missing" else "cannot be used"):
        Tls(TlsConfig(cert, key))


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text("# of the team\n\nfirst-token\nsecond-token\n")
    return path


@pytest.fixture(scope="module")
def guarded(served, token_file):
    return served(token_file=token_file)


def test_only_who_has_a_token_may_ask(guarded):
    for token in ("first-token", "second-token"):
        with Client(guarded.grpc_address, token=token) as client:
            assert client.generate("a", PARAMS).text == "bcd"
            assert client.tokenize("ab") == (97, 98)
    for token in (None, "first", "first-token-", "# of the team", ""):
        with Client(guarded.grpc_address, token=token) as client:
            for ask in (lambda: client.generate("a"), client.load, lambda: client.tokenize("a")):
                with pytest.raises(UnauthenticatedError):
                    ask()


def test_tokens_on_the_http_port(guarded):
    body = json.dumps({"model": "counting", "prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
    status, response = get(guarded.http_address, "/v1/completions", body=body, token="second-token", scheme="http")
    assert (status, json.loads(response)["choices"][0]["text"]) == (200, "bcd")
    for token in (None, "third-token"):
        status, response = get(guarded.http_address, "/v1/completions", body=body, token=token, scheme="http")
        assert (status, json.loads(response)["error"]["code"]) == (401, "invalid_api_key")
        assert get(guarded.http_address, "/v1/models", token=token, scheme="http")[0] == 401
        assert get(guarded.http_address, "/tokenize", body=body, token=token, scheme="http")[0] == 401


def test_a_prefix_before_the_paths_opens_nothing(token_file):
    """A prefix before the paths exempts no path from tokens.

    Ray Serve leaves the prefix of an application in the path, and passes it as `root_path`.
    """

    async def model(_request):
        return JSONResponse({})

    app = Starlette(
        routes=[Route("/v1/models", model), Route("/health", model)],
        middleware=[Middleware(TokenMiddleware, tokens=Tokens(token_file))],
    )
    for prefix in ("", "/sharp", "/v1", "/v"):
        client = TestClient(app, root_path=prefix)
        assert client.get(f"{prefix}/v1/models").status_code == 401
        assert client.get("/v1/models").status_code == 401
        assert client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer first-token"}).status_code == 200
        assert client.get(f"{prefix}/health").status_code == 200


def test_health_and_metrics_need_no_token(guarded):
    with grpc.insecure_channel(guarded.grpc_address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    for path in ("/health", "/metrics"):
        assert get(guarded.http_address, path, scheme="http")[0] == 200


def test_the_log_says_where_a_wrong_token_came_from(guarded, caplog):
    with caplog.at_level(logging.INFO, "sharp.requests"):
        assert get(guarded.http_address, "/v1/models", token="wrong", scheme="http")[0] == 401
        with Client(guarded.grpc_address, token="wrong") as client, pytest.raises(UnauthenticatedError):
            client.load()
    lines = [record for record in caplog.records if "not one that this server knows" in record.getMessage()]
    assert [(line.protocol, line.client) for line in lines] == [("http", "127.0.0.1"), ("grpc", "127.0.0.1")]
    assert "wrong" not in caplog.text


def test_all_but_the_list_of_exemptions_needs_a_token(guarded):
    """All paths but the listed exemptions need a token.

    A list of protected paths would miss new paths, so the list has the exemptions.
    """
    found = json.loads(get(guarded.http_address, "/openapi.json", scheme="http")[1])["paths"]
    paths = {*found, "/live", "/attention", "/v2", "/v2/repository/index", "/none", "/metrics/", "/health/more"}
    for path in paths - {exemption.path for exemption in HTTP_OPEN}:
        assert get(guarded.http_address, path, scheme="http")[0] == 401, path
    assert {exemption.path for exemption in HTTP_OPEN} >= {"/health", "/metrics", "/"}
    assert all(exemption.reason and exemption.limit for exemption in (*HTTP_OPEN, *GRPC_OPEN))


def test_health_watches_of_one_client_end_their_own(guarded, monkeypatch):
    """Health watches of one client end older watches of the same client.

    Health is open without a token and once counted as no call, so watches could hold a gigabyte.
    """
    calls, other = OpenCalls(4), []

    async def hold(host, seconds):
        try:
            async with calls.hold(host):
                await asyncio.sleep(seconds)
        except QueueFullError:
            return f"{host} gave way"
        return f"{host} complete"

    async def run():
        probe = asyncio.create_task(hold("10.0.0.2", 0.05))
        await asyncio.sleep(0)
        greedy = [asyncio.create_task(hold("10.0.0.1", 0.1)) for _ in range(50)]
        other.append(await probe)
        return [await task for task in greedy]

    ended = asyncio.run(run())
    assert ended == ["10.0.0.1 gave way"] * 47 + ["10.0.0.1 complete"] * 3
    assert other == ["10.0.0.2 complete"]


def test_the_server_bounds_health_watches(start_server, counting, monkeypatch):
    monkeypatch.setattr("sharp.serving.frontends.grpc.limits.MOST_HEALTH_CALLS", 8)
    started = start_server(counting)
    with ThreadPoolExecutor(40) as pool, ExitStack() as stack:
        stubs = []
        for _ in range(2):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(started.grpc_address, options))
            stubs.append(health_pb2_grpc.HealthStub(channel))
        watches = [stubs[number % 2].Watch(health_pb2.HealthCheckRequest(), timeout=10) for number in range(40)]
        ended = [pool.submit(status, lambda watch=watch: list(watch)) for watch in watches]
        wait_for(lambda: sum(call.done() for call in ended) == 32)
        assert {call.result()[0] for call in ended if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        response = stubs[0].Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()


def test_requests_for_metrics_of_one_client_are_bounded(start_server, counting, monkeypatch):
    started = start_server(counting)
    begun, released = threading.Semaphore(0), threading.Event()
    text = Metrics.text

    def slow(*arguments, **more):
        begun.release()
        released.wait(10)
        return text(*arguments, **more)

    monkeypatch.setattr(Metrics, "text", slow)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(get, started.http_address, "/metrics", scheme="http") for _ in range(8)]
        for _ in range(METRICS_THREADS):
            begun.acquire(timeout=10)
        wait_for(lambda: sum(request.done() for request in asked) == 8 - METRICS_OF_A_NETWORK)
        assert get(started.http_address, "/health", scheme="http")[0] == 200
        released.set()
        assert sorted(request.result()[0] for request in asked) == [200] * METRICS_OF_A_NETWORK + [429] * 4


def test_reflection_needs_a_token_and_says_so(guarded):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(guarded.grpc_address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def knows(tokens, token):
    try:
        tokens.check(f"Bearer {token}")
    except UnauthenticatedError:
        return False
    return True


def test_a_token_file_that_does_not_respond_stops_nothing(served, tmp_path, caplog):
    """A token file that does not respond stops nothing.

    Once a request with any token opened a FIFO in the event loop, and waited there for a writer forever.
    """
    path = tmp_path / "tokens"
    path.write_text("a-token")
    started = served(token_file=path)
    path.unlink()
    os.mkfifo(path)
    wait_for(lambda: "the old ones still count" in caplog.text)
    assert get(started.http_address, "/v1/models", token="a-token", scheme="http")[0] == 200
    assert get(started.http_address, "/health/live", scheme="http")[0] == 200
    with pytest.raises(InputError, match="cannot be read"):
        Tokens(path)


def test_a_token_file_of_which_no_end_comes_is_refused(tmp_path):
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        file.truncate(2**40)
    for endless in (path, Path("/dev/zero")):
        with pytest.raises(InputError, match="cannot be read"):
            Tokens(endless)


def test_a_token_file_that_all_users_can_read_is_warned_of(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text("a-token")
    for mode, warned in ((0o640, False), (0o644, True)):
        path.chmod(mode)
        caplog.clear()
        Tokens(path)
        assert ("every user of this machine can read" in caplog.text) == warned


def test_tokens_change_without_a_restart(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("old")
    tokens = Tokens(path)
    tokens.check("bearer old")
    path.write_text("")
    time.sleep(2 * INTERVAL_SECONDS)
    tokens.check("Bearer old")  # a file that is being written locks nobody out
    path.write_text("new\n")
    os.utime(path, ns=(1, 1))
    wait_for(lambda: knows(tokens, "new"))
    with pytest.raises(UnauthenticatedError, match="not one that this server knows"):
        tokens.check("Bearer old")
    for value in ("Basic new", "new", "Bearer"):
        with pytest.raises(UnauthenticatedError):
            tokens.check(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no token"), ("# none\n", "holds no token"), ("two words", "token 1"), ("gültig", "token 1")],
)
def test_token_files_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        Tokens(path)
    with pytest.raises(InputError, match="cannot be read"):
        Tokens(tmp_path / "none")


def test_the_asynchronous_client_takes_both(served, authority, token_file):
    started = served(tls=TlsConfig(*authority.issue("both")), token_file=token_file)

    async def ask():
        tls = ClientTls(authority.file)
        async with AsyncClient(started.grpc_address, tls=tls, token="first-token") as client:
            return await client.generate("a", PARAMS)

    assert asyncio.run(ask()).text == "bcd"


def test_a_certificate_that_has_expired_is_warned_of_at_start(authority, caplog):
    """The server warns at start of a certificate that has expired.

    Once every client refused the server, and the server said nothing.
    """
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    problems = {
        "has expired": (now - 3 * day, now - day),
        "is not valid yet": (now + day, now + 3 * day),
        "": (now - day, now + day),
    }
    for problem, (first, last) in problems.items():
        issued = authority.ca.issue_cert("127.0.0.1", not_before=first, not_after=last)
        cert = authority.write("dated.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        caplog.clear()
        Tls(TlsConfig(cert, authority.write("dated.key", issued.private_key_pem.bytes())))
        warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert warned == ([f"TLS: the certificate {cert} {problem}; clients will refuse it"] if problem else [])
