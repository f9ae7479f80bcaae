"""The base of both clients: channel, retries and token, and the server's errors as exceptions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sharp.core.failed_connection import Endpoint, explain
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

MOST_ATTEMPTS = 5  # gRPC makes no more attempts, whatever its configuration says
RETRY_SECONDS = 1.0  # for a server that is gone and cannot say when to come back
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
    """TLS with PEM files. `cert` and `key` are for servers that ask for a client certificate.

    Without `ca`, the authorities that come with gRPC are trusted, or those in the file that the variable
    GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel.

        Raises:
            InputError: a file cannot be read, or only one of `cert` and `key` is given.
        """
        if (self.cert is None) != (self.key is None):
            raise InputError(
                "a client certificate needs both its file and that of its key; give both --tls-cert and --tls-key"
            )
        try:
            ca, key, cert = (None if file is None else file.read_bytes() for file in (self.ca, self.key, self.cert))
        except OSError as error:
            raise InputError(f"the TLS file {error.filename} cannot be read: {error.strerror}; give another") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


def channel_options(attempts: int) -> list[tuple[str, Any]]:
    """Return the options of a channel that makes each call up to `attempts` times.

    The retries are gRPC's own: after UNAVAILABLE with exponential backoff, after RESOURCE_EXHAUSTED when the server
    says (`grpc-retry-pushback-ms`, which it sends beside `RetryInfo`), and never once a response has begun. A call that
    arrives in the moment a gRPC server closes ends with CANCELLED before the server has read it; such a call is made
    again, too. If several servers are behind the address, calls go to them in rotation.

    With retries gRPC's own code may lose a call in the moment a server closes, about one in a hundred such moments with
    grpcio 1.85: the call ends neither with the server nor at its deadline (github.com/grpc/grpc/issues/41036). With
    `attempts` 1 there are no retries at all, also not those that gRPC makes by default.

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
    # An address may name several servers, as that of a headless service does; by default gRPC would stay with the
    # first.
    config["loadBalancingConfig"] = [{"round_robin": {}}]
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.per_rpc_retry_buffer_size", MESSAGE_BYTES),  # a call that does not fit is never retried
        ("grpc.service_config", json.dumps(config)),
        ("grpc.enable_retries", int(attempts > 1)),
        # Find a restarted server again before the next server goes; by default gRPC's wait grows to minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.keepalive_time_ms", 30_000),  # to find out when the server's machine has gone
    ]


def metadata_of(token: str | None) -> Metadata:
    """Return the gRPC metadata to send with every call: the bearer `token`, or nothing for None."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def error_of(
    error: grpc.RpcError, address: str, endpoint: Endpoint | None = None, *, responded: bool = False
) -> SharpError:
    """Return the error of a call as an exception.

    A server that cannot be reached or is not ready gives an UnavailableError, a full server a QueueFullError, a field
    at fault a FieldError. A status without a class of its own, such as a deadline that has passed, gives a SharpError.

    Args:
        error: the error.
        address: the address of the server.
        endpoint: where the client tried to connect, if it never was connected; then the reason is found by connecting
            again, which may take seconds.
        responded: whether a part of the response came before the error.
    """
    status = rpc_status.from_call(error)
    if error.code() == grpc.StatusCode.UNAVAILABLE and status is None:
        if endpoint is not None and not responded:
            return UnavailableError(explain(endpoint, error.details() or ""), RETRY_SECONDS)
        missing = "went away before the response was complete" if responded else "does not respond"
        reason = error.details() or ""
        why = "" if "Connection refused" in reason else f" ({reason})"
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
