"""`BrowserMiddleware`: refuses requests that a page of another site makes a browser on this machine send.

A server without tokens that listens on 127.0.0.1 is open to every page that its user visits:

- A page may send a POST to any address if the content type is that of a form (CSRF). The browser names the origin of
  the page in the header Origin.
- A name of the page's own site may resolve to 127.0.0.1 (DNS rebinding). Then the page has the same origin as the
  server and can read the responses, too, but the header Host has the name of that site.

gRPC needs no such checks, because pages cannot send HTTP/2 with trailers.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sharp.serving.api.errors import SharpError
from sharp.serving.frontends.http.errors import ForbiddenError, UnsupportedMediaTypeError, error_response, path_of
from sharp.serving.security.open_access import HTTP_PROBES

# Content types that a page may send to another site without the site's consent. curl's default is FORM.
FORM, FORMS = "application/x-www-form-urlencoded", ("multipart/form-data", "text/plain")
LOCAL_NAMES = (".localhost", ".local", ".internal")
ALL = "*"


class BrowserMiddleware:
    """Middleware that checks Origin, Host and the content type of all requests except those of probes."""

    def __init__(self, app: ASGIApp, origins: Collection[str], hosts: Collection[str], local: bool) -> None:
        """Allow pages of `origins`, and pages of this server itself under one of the names `hosts`.

        With `local`, names that only this machine and its network can have are allowed, too. Without `local` and
        `hosts`, every name is allowed.
        """
        self._app = app
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it to the application."""
        if scope["type"] == "http" and path_of(scope) not in HTTP_PROBES:
            try:
                self._check(Headers(scope=scope), scope["method"])
            except SharpError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        """Check Host, Origin and content type of a request against attacks by web pages.

        Raises:
            ForbiddenError: the host or the origin is not allowed.
            UnsupportedMediaTypeError: the body has a type that forms send.
        """
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if not self._is_own(host):
            raise ForbiddenError(
                f"this server does not answer under the name {host!r:.300}; --allowed-hosts says which names it has"
            )
        # Schemes are not compared, as a proxy may add TLS.
        if origin and not {ALL, origin} & self._origins and origin.partition("://")[2] != host:
            raise ForbiddenError(
                f"pages of {origin!r:.300} may not use this server; --allowed-origins says which ones may"
            )
        content = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and (content in FORMS or (content == FORM and (origin or "sec-fetch-site" in headers))):
            raise UnsupportedMediaTypeError(f"the content type is {content}; send application/json")

    def _is_own(self, host: str) -> bool:
        """Whether the server may respond under this Host header."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # brackets of an IPv6 address that do not match
            return False
        if not host or ALL in self._hosts or {host, name} & self._hosts:
            return True
        if not self._local:
            return not self._hosts
        # A name without a dot belongs to no public domain, and an address is no name, so no site can make either of
        # them resolve to this machine.
        return "." not in name or name.endswith(LOCAL_NAMES) or _is_address(name)


def _is_address(name: str) -> bool:
    """Whether the name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
