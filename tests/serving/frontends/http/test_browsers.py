"""Pages of other sites, in a browser on the server's machine, can neither use the server nor read from it."""

import http.client
import json
import logging
from dataclasses import replace

import pytest

from sharp.serving.api_config import ApiConfig

BODY = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0})
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def address(start_server, counting):
    return start_server(counting).http_address


def ask(address, method="POST", path=PATH, host=None, **headers):
    """Return the status and the body of a response."""
    name, port = address.split(":")
    connection = http.client.HTTPConnection(name, int(port), timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for header, value in {"host": host or address, "content-length": str(len(BODY)), **headers}.items():
            connection.putheader(header.replace("_", "-"), value)
        connection.endheaders(BODY.encode())
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1.evil.example:8000", "http://", "http://["]
)
def test_a_page_of_another_site_generates_nothing(address, origin):
    """A page of another site cannot generate tokens.

    Once `fetch(..., {mode: "no-cors"})` of any page did.
    """
    for content in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        status, text = ask(address, origin=origin, content_type=content)
        assert (status, "--allowed-origins" in text) == (403, True)
    assert ask(address, "GET", "/live", origin=origin)[0] == 403
    assert ask(address, "GET", "/health", origin=origin)[0] == 200


def test_the_server_s_own_page_and_programs_are_admitted(address):
    assert ask(address, origin=f"http://{address}", content_type="application/json")[0] == 200
    # behind a proxy that ends TLS
    assert ask(address, origin=f"https://{address}", content_type="application/json")[0] == 200
    assert ask(address)[0] == 200
    assert ask(address, content_type="application/x-www-form-urlencoded")[0] == 200  # as curl -d sends it
    for content in ("text/plain", "multipart/form-data; boundary=a"):
        assert ask(address, content_type=content)[0] == 415
    own = {"origin": f"http://{address}", "content_type": "application/x-www-form-urlencoded"}
    assert ask(address, **own)[0] == 415


@pytest.mark.parametrize(
    ("host", "served"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "sharp")),
        *(
            (name, False)
            for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "[::1")
        ),
    ],
)
def test_a_name_that_somebody_makes_point_here_is_none_of_the_server_s(address, host, served):
    """A name that somebody points at this machine is refused as a host.

    For a browser, a page of that name would have the server's own origin, and could read /live and all else.
    """
    for path in ("/live", "/", "/metrics"):
        assert ask(address, "GET", path, host=host)[0] == (200 if served else 403)
    assert ask(address, "GET", "/health", host=host)[0] == 200
    if not served:
        assert "--allowed-hosts" in ask(address, host=host, origin=f"http://{host}")[1]


def test_the_names_of_the_server_are_a_setting(start_server, counting):
    started = start_server(counting, api=ApiConfig(allowed_hosts="api.example, other.example:443"))
    for host, status in (
        ("api.example", 200),
        ("api.example:8080", 200),
        ("other.example:443", 200),
        ("other.example", 403),
        ("localhost", 200),
    ):
        assert ask(started.http_address, host=host)[0] == status, host


def test_with_tokens_a_proxy_s_name_is_admitted(start_server, counting, server_settings):
    server = replace(server_settings.server, api_key="key")
    started = start_server(counting, server=server)
    assert ask(started.http_address, host="api.example", authorization="Bearer key")[0] == 200
    started = start_server(counting, server=server, api=ApiConfig(allowed_hosts="api.example"))
    assert ask(started.http_address, host="api.example", authorization="Bearer key")[0] == 200
    assert ask(started.http_address, host="evil.example", authorization="Bearer key")[0] == 403


def test_no_response_repeats_the_host(address):
    """No response repeats the host that the client wrote.

    Once a path with a slash too many was redirected to that host.
    """
    status, text = ask(address, "GET", "/version/", host="sharp")
    assert (status, "sharp/" in text) == (404, False)


def test_a_server_that_everybody_reaches_without_a_token_says_so(start_server, counting, server_settings, caplog):
    with caplog.at_level(logging.WARNING):
        start_server(counting)
        start_server(counting, server=replace(server_settings.server, host="0.0.0.0", api_key="key"))
        assert "as it asks for no token" not in caplog.text
        start_server(counting, server=replace(server_settings.server, host="0.0.0.0"))
    assert "whoever reaches 0.0.0.0 can use this server, as it asks for no token" in caplog.text
