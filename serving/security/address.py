"""Network addresses: as text, and as sockets that listen on them."""

import errno
import ipaddress
import socket

from sharp.serving.api.errors import InputError

NETWORK_BITS = 64  # of an IPv6 address; a subscriber usually has all addresses of a network of this size


def join(host: str, port: int) -> str:
    """Return `host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_can_listen(host: str, port: int, option: str) -> None:
    """Check, before a model is loaded, that the server can listen on an address.

    Raises:
        InputError: the address cannot be bound; the message names `option` as the setting to change.
    """
    listen(host, port, option).close()


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        InputError: the address cannot be bound; the message names `option` as the setting to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may linger
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except (
        socket.gaierror,
        UnicodeError,
    ) as error:  # UnicodeError is for names that Python never gives to a resolver
        raise InputError(
            f"cannot listen on {join(host, port)}: there is no such address; choose another --host"
        ) from error
    except OSError as error:
        remedy = {
            errno.EADDRNOTAVAIL: "choose an address of this machine with --host: 127.0.0.1, or 0.0.0.0 for all of them",
            errno.EACCES: f"ports below 1024 need a privilege; choose another {option}",
        }.get(error.errno or 0, f"choose another {option}")
        raise InputError(f"cannot listen on {join(host, port)}: {error.strerror}; {remedy}") from error
    return listening


def network_of(host: str) -> str:
    """Return the part that all addresses of a client share: an IPv4 address, or 64 bits of an IPv6 address."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:  # a proxy may write anything here
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, NETWORK_BITS), strict=False))


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
