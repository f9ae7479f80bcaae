"""Clients of a Sharp server: `Client`, and `AsyncClient` for asyncio."""

from sharp.serving.client.asynchronous import AsyncClient
from sharp.serving.client.channel import ClientTls
from sharp.serving.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "ClientTls"]
