"""The options of commands that talk to a server."""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

CONNECTION = {"Connection": ("--tls", "--tls-ca", "--tls-cert", "--tls-key", "--token")}  # a group in the help
TOKEN_VARIABLE = "SHARP_TOKEN"  # noqa: S105 - a name
_PATH = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--tls", is_flag=True, help="Use TLS; --tls-ca and --tls-cert imply it."),
    click.option("--tls-ca", type=_PATH, help="PEM certificates to trust.  [default: the system's]"),
    click.option("--tls-cert", type=_PATH, help="PEM certificate to show to a server that asks for one."),
    click.option("--tls-key", type=_PATH, help="PEM key of --tls-cert."),
    click.option(
        "--token",
        envvar=TOKEN_VARIABLE,
        help=f"Bearer token. The variable {TOKEN_VARIABLE} is safer, because other users can see flags.",
    ),
)


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of TLS and token; it gets them as `connection`, the arguments of a client.

    `connection` is a dict by the names of the arguments.
    """

    @wraps(command)
    def connected(
        *arguments: Any,
        tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        token: str | None,
        **options: Any,
    ) -> None:
        # gRPC writes a line for every failed handshake, and the command says why it failed in one sentence.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from sharp.serving.client.channel import ClientTls

        secured = ClientTls(tls_ca, tls_cert, tls_key) if tls or tls_ca or tls_cert or tls_key else None
        command(*arguments, connection={"tls": secured, "token": token}, **options)

    for option in reversed(_OPTIONS):
        connected = option(connected)
    return connected
