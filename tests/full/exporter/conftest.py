"""Fixtures that these tests share with the exporter's quicker tests."""

from tests.exporter.conftest import checkpoint, one_registry, one_trace, quick_tracing, sharp_export

__all__ = ["checkpoint", "one_registry", "one_trace", "quick_tracing", "sharp_export"]
