"""KServe's gRPC protocol, with Triton's tensor names."""
