"""The gRPC APIs, `sharp.v1` and KServe's: RPCs, messages and requests, status codes, authentication, limits."""
