"""What the log and traces want to know of a gRPC call."""

from sharp.serving.frontends.rpc.status import Context
from sharp.serving.observability.request_record import Call


def call_of(context: Context, protocol: str) -> Call:
    """How a call came; metadata that is not text is left out."""
    metadata = context.invocation_metadata() or ()
    return Call(protocol, {name: value for name, value in metadata if isinstance(value, str)})
