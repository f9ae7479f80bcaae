"""Every exemption from authentication: the paths and methods that need no token, and their limits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenAccess:
    """An HTTP path or a gRPC method that needs no token.

    Attributes:
        path: the whole path or method.
        reason: why the path needs no token.
        limit: how clients without a token are kept from exhausting the server with this path, besides the limit of
            connections.
    """

    path: str
    reason: str
    limit: str


# The maximum number of simultaneous gRPC calls that need no token, over all connections. A call takes some 20 kB of
# memory. Calls that need a token have a limit of their own.
MOST_HEALTH_CALLS = 2048
# The maximum number of requests for /metrics that are computed at once, and that a network may have unfinished.
METRICS_THREADS, METRICS_OF_A_NETWORK = 2, 4

_PROBE = "probes of orchestrators and load balancers have no token"
_SHARED = "all share one probe of the engine"
HTTP_PROBES = ("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready")
_STATIC = "a constant response"
HTTP_OPEN = (
    *(OpenAccess(path, _PROBE, _SHARED) for path in HTTP_PROBES),
    OpenAccess(
        "/metrics",
        "Prometheus; no series names a client or a text",
        f"{METRICS_THREADS} are computed at once, {METRICS_OF_A_NETWORK} of one network wait or run",
    ),
    OpenAccess("/load", "load balancers", "two numbers"),
    OpenAccess("/version", "which server it is", _STATIC),
    OpenAccess("/", "the page, which asks its reader for a token", _STATIC),
    OpenAccess("/openapi.json", "the same for everybody", _STATIC),
    OpenAccess("/docs", "a page of /openapi.json", _STATIC),
)
_CALLS = f"{MOST_HEALTH_CALLS} calls at once; beyond, the oldest of the network with most calls ends"
GRPC_OPEN = tuple(
    OpenAccess(method, _PROBE, f"{_CALLS}; {_SHARED}")
    for method in (
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    )
)
HTTP_OPEN_PATHS = frozenset(access.path for access in HTTP_OPEN)
GRPC_OPEN_METHODS = frozenset(access.path for access in GRPC_OPEN)
