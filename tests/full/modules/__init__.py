"""Modules that nobody here wrote."""
