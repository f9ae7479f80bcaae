"""Access to the server: addresses, TLS, tokens."""
