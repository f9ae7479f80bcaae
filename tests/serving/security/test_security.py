"""TLS, client certificates and bearer tokens, on both ports, with files that change while the server runs."""

import asyncio
import datetime
import json
import logging
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import replace

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
from sharp.serving.api.errors import InputError, SharpError, UnauthenticatedError
from sharp.serving.config import TlsConfig
from sharp.serving.frontends.http.authentication import TokenMiddleware
from sharp.serving.security.tls import Tls
from sharp.serving.security.tokens import Tokens

PARAMS = SamplingParams(temperature=0, max_tokens=3)


class Authority:
    """A certificate authority, and files of what it issues."""

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
    """The certificate that the HTTP port shows."""
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca))


def test_both_ports_are_encrypted(encrypted, authority):
    with Client(encrypted.grpc_address, tls=ClientTls(authority.file)) as client:
        assert client.generate("a", PARAMS).text == "bcd"
    context = ssl.create_default_context(cafile=authority.file)
    assert get(encrypted.http_address, "/health", context=context)[0] == 200


def test_a_client_without_tls_or_with_another_authority_gets_one_sentence(encrypted, tmp_path):
    for tls in (None, ClientTls(Authority(tmp_path).file)):
        with Client(encrypted.grpc_address, tls=tls, attempts=1) as client, pytest.raises(SharpError) as refused:
            client.generate("a", PARAMS)
        assert "does not respond (" in str(refused.value)


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
        assert certificate(started.http_address, authority.file) == first
    assert "new connections still get the old certificate" in caplog.text
    authority.issue("renewed")
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
    """Ray Serve leaves the prefix of an application in the path and says it as `root_path`."""

    async def model(_request):
        return JSONResponse({})

    app = Starlette(
        routes=[Route("/v1/models", model), Route("/health", model)],
        middleware=[Middleware(TokenMiddleware, tokens=Tokens(token_file))],
    )
    for prefix in ("", "/sharp", "/v1", "/v"):
        client = TestClient(app, root_path=prefix)
        assert client.get(f"{prefix}/v1/models").status_code == 401
        assert client.get("/v1/models").status_code == (404 if prefix == "/v1" else 401)
        assert client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer first-token"}).status_code == 200
        assert client.get(f"{prefix}/health").status_code == 200


def test_health_and_metrics_need_no_token(guarded):
    with grpc.insecure_channel(guarded.grpc_address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    for path in ("/health", "/metrics"):
        assert get(guarded.http_address, path, scheme="http")[0] == 200


def test_reflection_needs_a_token_and_says_so(guarded):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(guarded.grpc_address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_tokens_change_without_a_restart(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("old")
    tokens = Tokens(path)
    tokens.check("bearer old")
    path.write_text("")
    tokens.check("Bearer old")  # nobody is locked out by a file that is being written
    path.write_text("new\n")
    os.utime(path, ns=(1, 1))
    tokens.check("Bearer new")
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
    """Every client refused the server, which said nothing."""
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
