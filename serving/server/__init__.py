"""The server process: settings, the gRPC server, the health check, start and end."""
