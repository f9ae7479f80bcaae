"""What both clients share: channel, retries and token, and errors as the exceptions that the server raised."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sharp.serving.api.errors import (
    AlreadyExistsError,
    FieldError,
    InputError,
    NotFoundError,
    QueueFullError,
    SharpError,
    SlowReaderError,
    UnauthenticatedError,
    UnavailableError,
)
from sharp.serving.config import MIB

MOST_ATTEMPTS = 5  # gRPC makes no more, whatever it is told
RETRY_SECONDS = 1.0  # after a server that is gone, which cannot say when to come back
CUT_SHORT = "the server ended, or the request was aborted"  # what FinishReason.CANCELLED means to a client
MESSAGE_BYTES = 64 * MIB
ERRORS: dict[grpc.StatusCode, type[SharpError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InputError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SlowReaderError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ClientTls:
    """TLS: PEM files. Without `ca` the system's own are trusted; `cert` and `key` are for servers that ask for them."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel needs.

        Raises:
            InputError: a file cannot be read, or only one of `cert` and `key` is given.
        """
        if (self.cert is None) != (self.key is None):
            raise InputError("a client certificate needs both its file and that of its key")
        try:
            ca, key, cert = (None if file is None else file.read_bytes() for file in (self.ca, self.key, self.cert))
        except OSError as error:
            raise InputError(f"the TLS file {error.filename} cannot be read: {error.strerror}") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


def channel_options(attempts: int) -> list[tuple[str, Any]]:
    """Options of a channel that makes each call up to `attempts` times.

    gRPC's own retries: after UNAVAILABLE with exponential backoff, after RESOURCE_EXHAUSTED when the server says
    (`grpc-retry-pushback-ms`, which it sends beside `RetryInfo`), and never once a response has begun. A call that
    arrives in the moment a gRPC server closes ends with CANCELLED before anything has read it; it is made again too.
    Of several servers behind the address, calls take one after the other.

    With retries gRPC's own code may lose a call in the moment a server closes, about one in a hundred such moments
    with grpcio 1.85: it ends neither with the server nor at its deadline (github.com/grpc/grpc/issues/41036). With
    `attempts` 1 there are none at all, also not those that gRPC makes without being told.

    Raises:
        InputError: `attempts` is out of range.
    """
    if not 1 <= attempts <= MOST_ATTEMPTS:
        raise InputError(f"attempts is {attempts}; it must be from 1 to {MOST_ATTEMPTS}")
    retry = {
        "maxAttempts": attempts,
        "initialBackoff": "0.2s",
        "maxBackoff": "10s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
    }
    config: dict[str, Any] = {"methodConfig": [{"name": [{}], "retryPolicy": retry}]} if attempts > 1 else {}
    # An address may name several servers, as a headless service's does; gRPC alone would stay with the first.
    config["loadBalancingConfig"] = [{"round_robin": {}}]
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.per_rpc_retry_buffer_size", MESSAGE_BYTES),  # what does not fit is never sent again
        ("grpc.service_config", json.dumps(config)),
        ("grpc.enable_retries", int(attempts > 1)),
        # A server that was restarted is found again before the next one goes; gRPC's own wait grows to minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.keepalive_time_ms", 30_000),  # finds out that the server's machine has gone
    ]


def metadata_of(token: str | None) -> Metadata:
    """The metadata of every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def error_of(error: grpc.RpcError, address: str, *, responded: bool = False) -> SharpError:
    """The server's error; `responded` says that a part of the response came before."""
    status = rpc_status.from_call(error)
    if error.code() == grpc.StatusCode.UNAVAILABLE and status is None:
        missing = "went away before the response was complete" if responded else "does not respond"
        reason = error.details() or ""
        why = "" if "Connection refused" in reason else f" ({reason})"  # TLS against plain text, an unknown name, ...
        return UnavailableError(f"the server at {address} {missing}{why}; start one with sharp-serve", RETRY_SECONDS)
    message = error.details() or error.code().name
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and status is None:  # gRPC's own: a message is too large
        return InputError(message)
    retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details if status else ():
        if detail.Unpack(retry):
            kind = UnavailableError if error.code() == grpc.StatusCode.UNAVAILABLE else QueueFullError
            return kind(message, retry.retry_delay.ToMilliseconds() / 1000)
        if detail.Unpack(bad):
            return FieldError(bad.field_violations[0].field, message)
    return ERRORS.get(error.code(), SharpError)(message)
