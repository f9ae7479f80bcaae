"""The command `sharp health`: what a container's health check runs beside the server."""

import http.client
import ssl
from pathlib import Path

import click

from sharp.plugins.cli import SharpCommand
from sharp.serving.api.errors import InputError
from sharp.serving.config import ServerConfig
from sharp.serving.security.address import join
from sharp.serving.server.settings_sources import CONFIG_VARIABLE, read_settings

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - one that is bound there can be asked here


@click.command(cls=SharpCommand, epilog="See also: docs/deploy.md.")
@click.option("--config", type=click.Path(path_type=Path), envvar=CONFIG_VARIABLE, help="TOML file of the server.")
@click.option("--timeout", default=5.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds to wait.")
def health(config: Path | None, timeout: float) -> None:
    """Ask the server on this machine for its /health: exit code 0 if it serves, 1 if not.

    Host, port and TLS are those that the environment and --config give a server here. The certificate is not checked,
    as the server is on this machine; one that asks for client certificates cannot be asked.
    """
    server = read_settings({}, config).server
    if server.tls is not None and server.tls.client_ca is not None:
        raise InputError("a server with --tls-client-ca accepts clients with a certificate only; ask grpc.health.v1")
    response = _ask(server, timeout)
    click.echo(response)
    if not response.startswith("200 "):
        raise SystemExit(1)


def _ask(server: ServerConfig, timeout: float) -> str:
    """Status and text of the response, or why there is none."""
    host = EVERY_ADDRESS.get(server.host, server.host)
    connection = (
        http.client.HTTPConnection(host, server.http_port, timeout=timeout)
        if server.tls is None
        else http.client.HTTPSConnection(
            host,
            server.http_port,
            timeout=timeout,
            context=ssl._create_unverified_context(),  # noqa: S323 - of itself; the certificate has other names
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
