"""What both gRPC APIs share: status codes, authentication, request metadata."""
