"""Sharp: export and serve transformers whose attention does not disperse."""

import os
from typing import Any

# ONNX Runtime reports its use to its makers unless this is set before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "${version}"
__all__ = [
    "LLM",
    "AdaptSettings",
    "AsyncClient",
    "Client",
    "ClientTls",
    "Completion",
    "CustomNormalizer",
    "Guided",
    "SamplingParams",
    "Streamed",
    "__version__",
    "export",
    "adapt",
    "adapt_module",
]


def __getattr__(name: str) -> Any:
    # Lazy, so that the exporter and the models need no serving dependency.
    if name in ("LLM", "Completion", "Guided", "SamplingParams"):
        import sharp.serving

        return getattr(sharp.serving, name)
    if name in ("AsyncClient", "Client", "ClientTls"):
        import sharp.serving.client

        return getattr(sharp.serving.client, name)
    if name == "export":
        import sharp.exporter.module

        return sharp.exporter.module.export
    if name in ("adapt", "AdaptSettings"):
        import sharp.exporter.adapt.adapt

        return getattr(sharp.exporter.adapt.adapt, name)
    if name == "adapt_module":
        import sharp.exporter.adapt.module

        return sharp.exporter.adapt.module.adapt_module
    if name in ("CustomNormalizer", "Streamed"):
        import sharp.plugins.op.custom_normalizer

        return getattr(sharp.plugins.op.custom_normalizer, name)
    raise AttributeError(f"module 'sharp' has no attribute {name!r}")
