"""Imports go the way that ARCHITECTURE.md draws."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a folder may import of its own package.
SERVING = {
    "api": set(),
    "text": {"api"},
    "security": {"api"},
    "backends": {"api"},
    "engine": {"api", "text", "backends"},
    "encoder": {"api", "text", "backends", "engine"},
    "tensors": {"api", "backends", "engine"},
    "observability": {"api", "text", "engine"},
    "frontends": {"api", "text", "engine", "encoder", "tensors", "observability", "security"},
    "server": {"api", "text", "engine", "encoder", "tensors", "backends", "observability", "security", "frontends"},
}
FRONTENDS: dict[str, set[str]] = {"kserve": set(), "grpc": {"kserve"}, "http": {"kserve"}}
PACKAGES = {
    "plugins": set(),
    "models": {"plugins"},
    "exporter": {"plugins", "models"},
    "serving": {"plugins"},
}


def imported(folder: Path, package: str) -> dict[str, set[str]]:
    """For every file in `folder`, the names behind `package` in its imports; those for types alone are left out."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        modules = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                modules.add((node.module or "").removeprefix(f"{package}.").split(".")[0])
        found[str(path.relative_to(ROOT))] = modules
    return found


@pytest.mark.parametrize("folder", SERVING)
def test_folders_of_serving(folder: str) -> None:
    files = imported(ROOT / "serving" / folder, "sharp.serving")
    assert files
    others = SERVING.keys() - SERVING[folder] - {folder}
    assert {path: modules & others for path, modules in files.items() if modules & others} == {}


@pytest.mark.parametrize("folder", FRONTENDS)
def test_folders_of_frontends(folder: str) -> None:
    files = imported(ROOT / "serving" / "frontends" / folder, "sharp.serving.frontends")
    others = FRONTENDS.keys() - FRONTENDS[folder] - {folder}
    assert {path: modules & others for path, modules in files.items() if modules & others} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages(package: str) -> None:
    files = imported(ROOT / package, "sharp")
    others = PACKAGES.keys() - PACKAGES[package] - {package}
    # The command `sharp` starts the commands of every package.
    wrong = {path: modules & others for path, modules in files.items() if path != "plugins/cli.py"}
    assert {path: modules for path, modules in wrong.items() if modules} == {}
