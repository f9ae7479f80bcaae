"""What these tests share with those of the server."""

from tests.serving.conftest import client, connect, counting, hashing, ids_only, server_settings, start_server, steps

__all__ = ["client", "connect", "counting", "hashing", "ids_only", "server_settings", "start_server", "steps"]
