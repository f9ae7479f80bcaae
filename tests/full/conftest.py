"""Fixtures of the serving tests, for the tests in this folder."""

from tests.serving.conftest import (
    client,
    connect,
    counting,
    hashing,
    ids_only,
    loop_watch,
    server_settings,
    start_server,
    steps,
)

__all__ = [
    "client",
    "connect",
    "counting",
    "hashing",
    "ids_only",
    "loop_watch",
    "server_settings",
    "start_server",
    "steps",
]
