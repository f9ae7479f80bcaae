"""Servers for third-party clients."""

import pytest

from tests.full.clients.models import MODELS
from tests.serving.conftest import start_server as start_server


@pytest.fixture(scope="module")
def server_of(start_server, tmp_path_factory):
    """Return a function that starts a server of a kind of model, once per kind.

    The function returns the address of HTTP, the name of the model, and the address of gRPC.
    """
    started = {}

    def serve(kind):
        if kind not in started:
            folder = MODELS[kind](tmp_path_factory.mktemp(kind))
            server = start_server(folder)
            started[kind] = f"http://{server.http_address}", folder.name, server.grpc_address
        return started[kind]

    return serve
