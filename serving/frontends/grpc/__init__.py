"""The gRPC API `sharp.v1`: messages to requests, events to messages."""
