"""Requests, completions and errors, independent of the protocol that carries them."""
