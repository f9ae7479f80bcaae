"""`sharp health` says whether the server on this machine serves."""

import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import trustme
from click.testing import CliRunner

from sharp.serving.config import TlsConfig
from sharp.serving.server.health_check import health


def ask(*options, **variables):
    environment = {f"SHARP_{name.upper()}": str(value) for name, value in variables.items()}
    return CliRunner().invoke(health, options, env=environment)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    issued = trustme.CA().issue_cert("sharp")
    folder = tmp_path_factory.mktemp("tls")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return TlsConfig(folder / "cert.pem", folder / "key.pem")


def port_of(started):
    return started.http_address.rpartition(":")[2]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_that_serves(start_server, counting, host):
    result = ask(http_port=port_of(start_server(counting)), host=host)
    assert (result.exit_code, result.output) == (0, '200 {"status":"ok"}\n')


def test_the_file_of_the_server_counts(start_server, counting, tmp_path):
    (tmp_path / "sharp.toml").write_text(f"http_port = {port_of(start_server(counting))}\n")
    assert ask("--config", str(tmp_path / "sharp.toml")).exit_code == 0


def test_a_server_with_tls(start_server, counting, server_settings, certificate):
    started = start_server(counting, server=replace(server_settings.server, tls=certificate))
    port = port_of(started)
    assert ask(http_port=port, tls_cert=certificate.cert, tls_key=certificate.key).exit_code == 0
    assert ask(http_port=port).exit_code == 1


def test_a_server_that_does_not_serve():
    class Draining(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"status":"unavailable"}')

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Draining)
    threading.Thread(target=server.handle_request, daemon=True).start()
    result = ask(http_port=server.server_port)
    server.server_close()
    assert (result.exit_code, result.output) == (1, '503 {"status":"unavailable"}\n')


def test_no_server_and_one_that_says_nothing():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        result = ask(http_port=port)
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert f"127.0.0.1:{port} does not respond" in result.output
        silent.listen()
        assert "timed out" in ask("--timeout", "0.2", http_port=port).output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"http_port": "http"}, "http_port is 'http'; it must be a whole number (variable SHARP_HTTP_PORT)"),
        ({"tls_cert": "a", "tls_key": "b", "tls_client_ca": "c"}, "accepts clients with a certificate only"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(variables, message):
    result = ask(**variables)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
