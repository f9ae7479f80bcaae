"""Guides against JSON Schema's own test suite: `python -m tests.full.guides FOLDER` prints a table."""
