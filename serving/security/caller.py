"""The caller of a request: the token that the request came with and the address that it came from."""

import hashlib
from contextvars import ContextVar
from urllib.parse import unquote

from sharp.serving.security.address import network_of

TOKEN_DIGITS = 16
# The name (`token_name`) of the token of the request that the current task serves; empty without a token.
CURRENT_TOKEN: ContextVar[str] = ContextVar("sharp_current_token", default="")


def token_name(token: bytes) -> str:
    """Return a name for a bearer token, some hexadecimal digits, from which the token cannot be recovered."""
    return hashlib.sha256(b"sharp token " + token).hexdigest()[:TOKEN_DIGITS]


def share_of(token: str, host: str) -> str:
    """Return the name of the client whose share of the server a request uses: its token, or without one its network."""
    return f"token {token}" if token else f"address {network_of(host)}"


def host_of_peer(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as `ipv6:%5B::1%5D:1234`; empty if the name has none."""
    family, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else ""
