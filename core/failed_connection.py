"""The sentence for a failed connection to a server, which says what listens at the address instead.

All clients check addresses with `grpc_endpoint` and `http_endpoint`, and raise what `explain` returns.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sharp.core.errors import InputError

Protocol = Literal["gRPC", "HTTP"]
SECONDS = 2.0  # that a connection, a handshake or a reply may take; at most five of them
RESOLVERS = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")  # gRPC's schemes for other addresses
HOST_AND_PORT = re.compile(r"(?:\[([\da-fA-F:.%\w]+)\]|([^\s/\[\]:@]+)):(\d{1,5})")
MOST_PORT = 2**16 - 1
SETTINGS = 4  # the type of the frame that an HTTP/2 server, such as gRPC, sends first
GIVE_GRPC = "give the address that sharp-serve prints behind grpc=, as 127.0.0.1:50051"
GIVE_URL = "give the URL of an HTTP server, as http://127.0.0.1:8000, which sharp-serve prints behind http="


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and what a client expects there.

    Attributes:
        shown: the address or URL as the user gave it.
        host: a name or an IP address, without brackets.
        port: the port.
        protocol: the protocol of the client.
        tls: whether the client encrypts.
        ca: the file of the certificates that the client trusts; None means the system's.
    """

    shown: str
    host: str
    port: int
    protocol: Protocol
    tls: bool = False
    ca: Path | None = None


@dataclass(frozen=True)
class _Listener:
    """The server that listens at an address; `protocol` is None if it speaks neither gRPC nor HTTP."""

    protocol: Protocol | None
    tls: bool = False


def grpc_endpoint(address: str, *, tls: bool = False, ca: Path | None = None) -> Endpoint | None:
    """Return the endpoint of a gRPC address host:port; None if one of gRPC's other resolvers is named, as in dns:///a.

    Raises:
        InputError: the address is a URL, a model, or not host:port.
    """
    if address.partition(":")[0] in RESOLVERS and ":" in address:
        return None
    if "://" in address:
        raise InputError(f"{address} is a URL, and this command speaks gRPC; {GIVE_GRPC}")
    found = HOST_AND_PORT.fullmatch(address)
    if found is None and (Path(address).exists() or Path(address).suffix in (".gguf", ".safetensors", ".pt", ".onnx")):
        raise InputError(
            f"{address} is a model, and this command talks to a server; start one with sharp-serve {address}, and "
            f"{GIVE_GRPC}"
        )
    if found is None:
        raise InputError(f"{address!r} is not the address of a server, host:port; {GIVE_GRPC}")
    return Endpoint(address, found[1] or found[2], _port(address, int(found[3])), "gRPC", tls, ca)


def http_endpoint(url: str) -> Endpoint:
    """Return the endpoint of a URL.

    Raises:
        InputError: it is no URL of an HTTP server.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{url} is no URL ({error}); {GIVE_URL}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(f"{url} is no URL of an HTTP server; {GIVE_URL}")
    tls = parts.scheme == "https"
    return Endpoint(url, host, _port(url, (443 if tls else 80) if port is None else port), "HTTP", tls)


def is_url(source: str) -> bool:
    """Whether the user means a server, by a URL that begins with http:// or https://."""
    return source.startswith(("http://", "https://"))


def check_no_address(source: str) -> None:
    """Check that the name of a file or folder is not an address or a URL of another kind than `is_url` takes.

    Raises:
        InputError: it is; the message has the URL to give.
    """
    if Path(source).exists() or is_url(source):
        return
    if "://" in source:
        raise InputError(f"{source} is no URL of an HTTP server; {GIVE_URL}")
    if HOST_AND_PORT.fullmatch(source):
        raise InputError(f"there is no file or folder {source}; for a server give its URL, http://{source}")


def explain(endpoint: Endpoint, detail: str = "") -> str:
    """Return why a client could not reach a server, and what to do, in one sentence.

    Connects to the address up to five times, for at most two seconds each. Call it after a failed connection, and not
    in an event loop.

    Args:
        endpoint: where the client tried to connect.
        detail: the reason that the client's library gave, which is shown where no better one is found.
    """
    return f"the server at {endpoint.shown} does not respond: {_reason(endpoint, ' '.join(detail.split()))}"


def _reason(endpoint: Endpoint, detail: str) -> str:
    """Connect to the endpoint again and return the words that say why the call failed.

    `detail` is the error's own text; it may be empty.
    """
    proxy = None if proxy_bypass(endpoint.host) else getproxies().get("https" if endpoint.tls else "http")
    if proxy is not None:
        return (
            f"calls go through the proxy {proxy} of the environment ({detail or 'it refuses them'}); add "
            f"{endpoint.host} to the variable no_proxy to connect directly"
        )
    try:
        _connect(endpoint).close()
    except (socket.gaierror, UnicodeError):  # UnicodeError is for names that Python never gives to a resolver
        return f"no machine has the name {endpoint.host}; check its spelling"
    except TimeoutError:
        return f"{endpoint.host} sends nothing for {SECONDS:g} s; check the address, and firewalls between"
    except ConnectionRefusedError:
        return _nothing_listens(endpoint)
    except OSError as error:
        return f"{error.strerror}; check the address and this machine's network"
    listener = _listener(endpoint)
    if listener.protocol not in (None, endpoint.protocol):
        return _other_protocol(endpoint)
    if listener.tls and not endpoint.tls:
        return "it speaks TLS and the client does not; " + (
            "use TLS (--tls, or --tls-ca FILE with the certificate of its authority)"
            if endpoint.protocol == "gRPC"
            else "begin the URL with https://"
        )
    if endpoint.tls and listener.protocol is not None and not listener.tls:
        return "it speaks no TLS and the client does; " + (
            "leave out --tls, --tls-ca, --tls-cert and --tls-key"
            if endpoint.protocol == "gRPC"
            else "begin the URL with http://"
        )
    if endpoint.tls and (problem := _untrusted(endpoint)) is not None:
        trusted = "--tls-ca FILE" if endpoint.protocol == "gRPC" else "the variable SSL_CERT_FILE"
        return f"its certificate is not trusted ({problem}); name the file of its authority with {trusted}"
    if listener.protocol is None and listener.tls:
        return (
            "it ends connections after the TLS handshake, as a server does that accepts only clients with a "
            "certificate of its authority; give one with --tls-cert and --tls-key"
        )
    if listener.protocol is None:
        why = f" ({detail})" if detail else ""
        return f"what listens on this port speaks neither gRPC nor HTTP{why}; check the port"
    return f"{detail or 'the connection ended'}; it accepts connections now, so try again"


def _port(shown: str, port: int) -> int:
    """Return `port` if it is from 1 to 65535.

    Raises:
        InputError: the port is out of range; the message begins with `shown`, the address as the user wrote it.
    """
    if not 1 <= port <= MOST_PORT:
        raise InputError(f"{shown} has the port {port}; it must be from 1 to {MOST_PORT}")
    return port


def _nothing_listens(endpoint: Endpoint) -> str:
    """Return the words for a refused connection: start a server here, or start it with --host on the other machine."""
    try:
        here = ipaddress.ip_address(endpoint.host).is_loopback
    except ValueError:
        here = endpoint.host == "localhost"
    if here:
        return "nothing listens on this port; start a server with sharp-serve, which prints its addresses"
    return (
        f"{endpoint.host} responds, but nothing listens on this port there; sharp-serve is reached from other machines "
        "only if it is started with --host, as --host 0.0.0.0"
    )


def _other_protocol(endpoint: Endpoint) -> str:
    """Return the words for a port whose server speaks HTTP where the command speaks gRPC, or the reverse."""
    if endpoint.protocol == "gRPC":
        return f"this is the port of an HTTP server, and this command speaks gRPC; {GIVE_GRPC}"
    return f"this is the port of a gRPC server, and this command speaks HTTP; {GIVE_URL}"


def _connect(endpoint: Endpoint) -> socket.socket:
    """Open a TCP connection to the endpoint within `SECONDS`, without TLS. OSError and UnicodeError are not caught."""
    return socket.create_connection((endpoint.host, endpoint.port), SECONDS)


def _listener(endpoint: Endpoint) -> _Listener:
    """Find out what listens at an address that accepts connections."""
    with suppress(OSError):
        with _connect(endpoint) as plain:
            protocol = _protocol(_reply(plain, endpoint.host))
        if protocol is not None:
            return _Listener(protocol)
    encrypted = False
    for protocol in ("HTTP", "gRPC"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2" if protocol == "gRPC" else "http/1.1"])
        try:
            with _connect(endpoint) as plain, context.wrap_socket(plain, server_hostname=endpoint.host) as secured:
                encrypted = True
                if _protocol(_reply(secured, endpoint.host)) == protocol:
                    return _Listener(protocol, tls=True)
        except OSError:
            continue
    return _Listener(None, tls=encrypted)


def _reply(connection: socket.socket, host: str) -> bytes:
    """Return the beginning of the reply to a request of HTTP/1.1; a gRPC server sends its settings instead."""
    connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii", "replace"))
    return connection.recv(64)


def _protocol(reply: bytes) -> Protocol | None:
    """Return the protocol that a server's first bytes show, or None.

    HTTP/1 responses begin with "HTTP/"; gRPC servers send an HTTP/2 SETTINGS frame.
    """
    if reply.startswith(b"HTTP/"):
        return "HTTP"
    return "gRPC" if len(reply) >= 9 and reply[3] == SETTINGS and not any(reply[5:9]) else None


def _untrusted(endpoint: Endpoint) -> str | None:
    """Return why the certificate of a server is not trusted; None if it is, or the connection fails otherwise."""
    try:
        context = ssl.create_default_context(cafile=None if endpoint.ca is None else str(endpoint.ca))
        with _connect(endpoint) as plain, context.wrap_socket(plain, server_hostname=endpoint.host):
            return None
    except ssl.SSLCertVerificationError as error:
        return error.verify_message.rstrip(".")
    except OSError:
        return None
