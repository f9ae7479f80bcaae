"""The origin of a request over HTTP."""

from starlette.requests import HTTPConnection
from starlette.types import Scope

from sharp.serving.observability.request_record import RequestOrigin
from sharp.serving.security.caller import CURRENT_TOKEN, share_of


def origin_of(scope: Scope, protocol: str = "http") -> RequestOrigin:
    """Return the origin of a request: its headers, the address of its client and the name of its token."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    token = CURRENT_TOKEN.get()
    return RequestOrigin(protocol, dict(HTTPConnection(scope).headers), host, token, share_of(token, host))
