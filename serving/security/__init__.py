"""Who is let in, and how: addresses, TLS, tokens."""
