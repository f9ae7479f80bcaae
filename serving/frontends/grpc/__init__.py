"""The gRPC edge: messages in, messages out; what a step is, it does not know."""
