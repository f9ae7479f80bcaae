"""Network addresses: as text, and whether they can be had."""

import socket

from sharp.serving.api.errors import InputError


def join(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_can_listen(host: str, port: int, option: str) -> None:
    """Find out before a model is loaded whether an address can be had.

    Raises:
        InputError: it cannot; `option` is the one to change.
    """
    listen(host, port, option).close()


def listen(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        InputError: it cannot; `option` is the one to change.
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
    ) as error:  # the latter is Python's own, of names that never reach a resolver
        raise InputError(
            f"cannot listen on {join(host, port)}: there is no such address; choose another host"
        ) from error
    except OSError as error:
        raise InputError(f"cannot listen on {join(host, port)}: {error.strerror}; choose another {option}") from error
    return listening
