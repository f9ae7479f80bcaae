"""The commands that talk to a server say what listens at an address that is not theirs.

The servers are those of grpcio and of Python's standard library, so that nothing here depends on our own server.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import trustme
from click.testing import CliRunner

from sharp import AsyncClient, Client, ClientTls
from sharp.core import failed_connection
from sharp.core.cli import main
from sharp.core.errors import SharpError
from sharp.core.failed_connection import explain, grpc_endpoint, http_endpoint

GRPC_HINT = "give the address that sharp-serve prints behind grpc=, as 127.0.0.1:50051"
URL_HINT = "give the URL of an HTTP server, as http://127.0.0.1:8000, which sharp-serve prints behind http="


@dataclass(frozen=True)
class Servers:
    """The ports of servers on 127.0.0.1 by what they speak, and the file of the authority of their certificates."""

    ports: dict[str, int]
    ca: Path


class NotFound(BaseHTTPRequestHandler):
    """Responds to everything with status 404."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_arguments: object) -> None:
        """Print nothing."""


@contextmanager
def http_server(context: ssl.SSLContext | None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotFound)
    server.handle_error = lambda *_arguments: None  # a client of gRPC resets its connection
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_server(credentials: grpc.ServerCredentials | None) -> Iterator[int]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        address = "127.0.0.1:0"
        port = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


@contextmanager
def silent_server() -> Iterator[int]:
    """A server that accepts connections and closes them, as what speaks another protocol may."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    listening.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("authority")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    key, chain = issued.private_key_pem.bytes(), b"".join(part.bytes() for part in issued.cert_chain_pems)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    encrypted = grpc.ssl_server_credentials([(key, chain)])
    mutual = grpc.ssl_server_credentials([(key, chain)], authority.cert_pem.bytes(), require_client_auth=True)
    with ExitStack() as stack:
        yield Servers(
            {
                "http": stack.enter_context(http_server(None)),
                "https": stack.enter_context(http_server(context)),
                "grpc": stack.enter_context(grpc_server(None)),
                "grpcs": stack.enter_context(grpc_server(encrypted)),
                "mutual": stack.enter_context(grpc_server(mutual)),
                "silent": stack.enter_context(silent_server()),
                "nothing": stack.enter_context(free_port()),
            },
            folder / "ca.pem",
        )


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as bound:  # without listen, so that connections are refused and nobody else takes the port
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def refused(*arguments: str) -> str:
    """Run `sharp` in this process and return its one sentence."""
    result = CliRunner().invoke(main, arguments, prog_name="sharp")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("Error: ").strip()


OTHER_GRPC = f"this is the port of an HTTP server, and this command speaks gRPC; {GRPC_HINT}"
OTHER_HTTP = f"this is the port of a gRPC server, and this command speaks HTTP; {URL_HINT}"
NOTHING = "nothing listens on this port; start a server with sharp-serve, which prints its addresses"
SPEAKS_TLS = "it speaks TLS and the client does not; "
SPEAKS_NO_TLS = "it speaks no TLS and the client does; "


@pytest.mark.parametrize(
    ("server", "options", "sentence"),
    [
        ("http", (), OTHER_GRPC),
        ("https", (), OTHER_GRPC),
        ("https", ("--tls",), OTHER_GRPC),
        ("grpcs", (), SPEAKS_TLS + "use TLS (--tls, or --tls-ca FILE with the certificate of its authority)"),
        ("grpc", ("--tls",), SPEAKS_NO_TLS + "leave out --tls, --tls-ca, --tls-cert and --tls-key"),
        ("grpcs", ("--tls",), "; name the file of its authority with --tls-ca FILE"),
        (
            "mutual",
            ("--tls-ca", "CA"),
            "accepts only clients with a certificate of its authority; give one with --tls-cert",
        ),
        ("silent", (), "what listens on this port speaks neither gRPC nor HTTP ("),
        ("nothing", (), NOTHING),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_what_a_client_of_grpc_finds_instead_of_its_server(servers, command, server, options, sentence):
    address = f"127.0.0.1:{servers.ports[server]}"
    options = tuple(str(servers.ca) if option == "CA" else option for option in options)
    own = ("generate", address, "a") if command == "generate" else ("bench", "serve", address, "--requests", "1")
    said = refused(*own, "--attempts", "1", *options)
    assert said.startswith(f"the server at {address} does not respond: ")
    assert sentence in said


@pytest.mark.parametrize(
    ("server", "scheme", "sentence"),
    [
        ("grpc", "http", OTHER_HTTP),
        ("grpcs", "http", OTHER_HTTP),
        ("grpcs", "https", OTHER_HTTP),
        ("https", "http", SPEAKS_TLS + "begin the URL with https://"),
        ("http", "https", SPEAKS_NO_TLS + "begin the URL with http://"),
        ("https", "https", "; name the file of its authority with the variable SSL_CERT_FILE"),
        ("silent", "http", "what listens on this port speaks neither gRPC nor HTTP ("),
        ("nothing", "http", NOTHING),
    ],
)
@pytest.mark.parametrize("command", ["compare", "evaluate"])
def test_what_a_client_of_http_finds_instead_of_its_server(servers, tmp_path, command, server, scheme, sentence):
    url = f"{scheme}://127.0.0.1:{servers.ports[server]}"
    own = ("compare", str(tmp_path), "--with", url) if command == "compare" else ("evaluate", url)
    said = refused(*own)
    assert said.startswith(f"the server at {url} does not respond: ")
    assert sentence in said


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("http://127.0.0.1:8000", f"is a URL, and this command speaks gRPC; {GRPC_HINT}"),
        ("grpc://127.0.0.1:50051", f"is a URL, and this command speaks gRPC; {GRPC_HINT}"),
        ("localhost", "'localhost' is not the address of a server, host:port"),
        (":50051", "':50051' is not the address of a server, host:port"),
        ("::1:50051", "'::1:50051' is not the address of a server, host:port"),
        ("127.0.0.1:99999", "has the port 99999; it must be from 1 to 65535"),
        ("127.0.0.1:0", "has the port 0; it must be from 1 to 65535"),
        ("none.invalid:50051", "no machine has the name none.invalid; check its spelling"),
        ("model.gguf", "is a model, and this command talks to a server; start one with sharp-serve model.gguf"),
        ("folder", "is a model, and this command talks to a server; start one with sharp-serve folder"),
    ],
)
def test_what_is_no_address_of_grpc(address, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert sentence in refused("bench", "serve", address, "--requests", "1")
    if address not in ("folder", "localhost", "model.gguf"):  # which may be models
        assert sentence in refused("generate", address, "a", "--attempts", "1")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "127.0.0.1:8000",
            "there is no file or folder 127.0.0.1:8000; for a server give its URL, http://127.0.0.1:8000",
        ),
        ("grpc://127.0.0.1:50051", f"is no URL of an HTTP server; {URL_HINT}"),
        ("http://", f"http:// is no URL of an HTTP server; {URL_HINT}"),
        ("http://127.0.0.1:99999", "is no URL (Port out of range 0-65535)"),
        ("http://[::1:8000", "is no URL (Invalid IPv6 URL)"),
        ("http://none.invalid", "no machine has the name none.invalid; check its spelling"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "evaluate"])
def test_what_is_no_url(command, source, sentence, tmp_path):
    assert sentence in refused(
        *(("compare", str(tmp_path), "--with") if command == "compare" else ("evaluate",)), source
    )


def test_addresses_of_other_resolvers_of_grpc_are_left_to_it():
    for address in ("dns:///sharp-headless:50051", "unix:/run/sharp", "ipv4:127.0.0.1:1,127.0.0.1:2"):
        assert grpc_endpoint(address) is None
    found = grpc_endpoint("[::1]:50051")
    assert (found.host, found.port) == ("::1", 50051)


def test_an_address_of_another_machine_is_told_apart_from_one_that_nobody_has(monkeypatch):
    """Simulate the network, because the tests reach no other machine."""
    endpoint = grpc_endpoint("192.0.2.1:50051")
    for error, sentence in (
        (ConnectionRefusedError(), "only if it is started with --host, as --host 0.0.0.0"),
        (TimeoutError(), "192.0.2.1 sends nothing for 2 s; check the address, and firewalls between"),
        (
            OSError(101, "Network is unreachable"),
            "Network is unreachable; check the address and this machine's network",
        ),
    ):

        def fail(*_arguments, error=error, **_options):
            raise error

        monkeypatch.setattr(failed_connection.socket, "create_connection", fail)
        assert sentence in explain(endpoint)


def test_a_proxy_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    said = explain(http_endpoint("http://127.0.0.1:8000"), "HTTP Error 503")
    assert (
        "calls go through the proxy http://proxy.invalid:3128 of the environment (HTTP Error 503); add 127.0.0.1"
        in said
    )
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "proxy" not in explain(http_endpoint("http://127.0.0.1:1"))


def test_clients_in_python_say_the_same_and_block_no_event_loop(servers):
    address = f"127.0.0.1:{servers.ports['http']}"
    with Client(address, attempts=1) as client, pytest.raises(SharpError, match="this is the port of an HTTP server"):
        client.generate("a")

    async def ask() -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.005)

        beating = asyncio.create_task(beat())
        silent = f"127.0.0.1:{servers.ports['grpcs']}"
        async with AsyncClient(silent, attempts=1, tls=ClientTls()) as client:
            with pytest.raises(SharpError, match="its certificate is not trusted"):
                await client.generate("a")
        beating.cancel()
        return beats

    assert asyncio.run(ask()) > 2


def test_a_name_that_the_certificate_does_not_have(servers):
    said = refused(
        *("generate", f"localhost:{servers.ports['grpcs']}", "a", "--attempts", "1", "--tls-ca", str(servers.ca))
    )
    assert "its certificate is not trusted (Hostname mismatch, certificate is not valid for 'localhost')" in said
