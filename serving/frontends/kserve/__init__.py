"""KServe's protocol with Triton's tensor names: its messages, over gRPC or HTTP alike."""
