"""`sharp.core` and `sharp.plugins` from this tree where Sharp is not installed, once this module is imported."""

import contextlib
import importlib.util
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use() -> None:
    """Give `core` and `plugins` the names that an install gives them; an installed Sharp stays as it is."""
    with contextlib.suppress(ImportError):
        import sharp.plugins.triton  # noqa: F401

        return
    root = types.ModuleType("sharp")
    root.__path__ = []
    sys.modules["sharp"] = root
    for name in ("core", "plugins"):
        folder = ROOT / name
        spec = importlib.util.spec_from_file_location(
            f"sharp.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[f"sharp.{name}"] = package
        spec.loader.exec_module(package)
        setattr(root, name, package)


use()
