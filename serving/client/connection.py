"""`Connection`: the base class of both clients."""

from typing import Any

from sharp.core.failed_connection import Endpoint, grpc_endpoint
from sharp.serving.client.channel import MOST_ATTEMPTS, ClientTls, channel_options, metadata_of
from sharp.v1 import control_pb2_grpc, inference_pb2_grpc


class Connection:
    """A channel to the server at `address`, and the services that are called over it.

    The clients that derive from this class close the channel in `close`, or at the end of a `with` block.
    """

    _grpc: Any  # the library that makes channels: `grpc` or `grpc.aio`

    def __init__(
        self,
        address: str,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        attempts: int = MOST_ATTEMPTS,
        timeout: float | None = None,
    ) -> None:
        """Open a channel, on which nothing is sent yet.

        Args:
            address: host:port.
            tls: how to encrypt; None is plain text.
            token: the bearer token that the server asks for.
            attempts: how often a call is made, at most, when the server is full or does not respond; 1 to 5.
            timeout: seconds that a call may take, with all its attempts; None is no limit. A call
                that takes longer raises SharpError.

        Raises:
            InputError: an argument cannot be used.
        """
        endpoint = grpc_endpoint(address, tls=tls is not None, ca=None if tls is None else tls.ca)
        options = channel_options(attempts)
        self.address = address
        # None once the server has responded: a later failure is none of the address or of TLS.
        self._unreached: Endpoint | None = endpoint
        self._metadata = metadata_of(token)
        self._timeout = timeout
        self._channel = (
            self._grpc.insecure_channel(address, options)
            if tls is None
            else self._grpc.secure_channel(address, tls.credentials(), options)
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)  # type: ignore[no-untyped-call]
