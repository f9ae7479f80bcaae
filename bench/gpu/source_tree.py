"""Importing this module makes the tree's plugins importable as `sharp.plugins` where Sharp is not installed."""

import contextlib
import importlib.util
import sys
import types
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def use() -> None:
    """Give the folder `plugins` the name that an install gives it; an installed Sharp stays what it is."""
    with contextlib.suppress(ImportError):
        import sharp.plugins.triton  # noqa: F401

        return
    root = types.ModuleType("sharp")
    root.__path__ = []
    spec = importlib.util.spec_from_file_location(
        "sharp.plugins", PLUGINS / "__init__.py", submodule_search_locations=[str(PLUGINS)]
    )
    assert spec is not None and spec.loader is not None
    plugins = importlib.util.module_from_spec(spec)
    sys.modules.update({"sharp": root, "sharp.plugins": plugins})
    spec.loader.exec_module(plugins)
    root.plugins = plugins  # type: ignore[attr-defined]


use()
