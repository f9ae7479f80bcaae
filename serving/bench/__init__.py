"""Load on a server, and what it answered how fast."""
