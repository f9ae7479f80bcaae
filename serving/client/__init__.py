"""Clients of a Sharp server: `Client`, and `AsyncClient` for asyncio."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharp.serving.client.asynchronous import AsyncClient
    from sharp.serving.client.channel import ClientTls
    from sharp.serving.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "ClientTls"]

MODULES = {"AsyncClient": "asynchronous", "Client": "synchronous", "ClientTls": "channel"}


def __getattr__(name: str) -> Any:
    # The import is lazy, because the help of commands needs none of these classes.
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
