"""The command `sharp health`: what a container's health check runs beside the server."""

import http.client
import ssl
from pathlib import Path

import click

from sharp.core.cli import SharpCommand
from sharp.serving.api.errors import InputError
from sharp.serving.config import ServerConfig
from sharp.serving.security.address import join
from sharp.serving.server.settings_sources import CONFIG_VARIABLE, read_settings

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - the address to ask


@click.command(cls=SharpCommand, epilog="See also: sharp docs deploy.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar=CONFIG_VARIABLE,
    help="Configuration file (TOML) that the server was started with.",
)
@click.option(
    "--timeout",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds to wait for the response.",
)
def health(config: Path | None, timeout: float) -> None:
    """Request /health from the server on this machine; the exit code is 0 if the server is ready, and 1 if not.

    Host, port and TLS are read from the environment and --config, as by the server. The certificate is not checked,
    because the server is on this machine. A server that needs client certificates cannot be checked.
    """
    server = read_settings({}, config).server
    if server.tls is not None and server.tls.client_ca is not None:
        raise InputError(
            "a server with --tls-client-ca accepts clients with a certificate only; use grpc.health.v1 with one"
        )
    response = _ask(server, timeout)
    click.echo(response)
    if not response.startswith("200 "):
        raise SystemExit(1)


def _ask(server: ServerConfig, timeout: float) -> str:
    """Ask the server's health path; return status and text of the response, or why there is none in `timeout` s."""
    host = EVERY_ADDRESS.get(server.host, server.host)
    connection = (
        http.client.HTTPConnection(host, server.http_port, timeout=timeout)
        if server.tls is None
        else http.client.HTTPSConnection(
            host,
            server.http_port,
            timeout=timeout,
            context=ssl._create_unverified_context(),  # noqa: S323 - the certificate has other names than this machine
        )
    )
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return f"{response.status} {response.read(4096).decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return f"{join(host, server.http_port)} does not respond: {error or type(error).__name__}"
    finally:
        connection.close()
