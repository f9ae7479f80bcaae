"""Metrics, traces and the request log."""
