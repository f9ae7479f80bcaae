"""The server process: settings, TLS, health, start and stop."""
