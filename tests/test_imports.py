"""Imports go the way that ARCHITECTURE.md draws."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The folders that each folder may import within its own package. Where a package's loose files have an order, they are
# listed, too.
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
PLUGINS = {
    "cpu": set(),
    "op": {"cpu"},
    "triton": {"op", "cpu"},
    "cuda": {"op", "cpu", "triton"},
    "tensorrt": {"op"},
    "custom": {"op"},
    "doctor": {"op", "triton", "cuda", "tensorrt"},
}
EXPORTER = {
    "sources": set(),
    "graph": {"sources"},
    "programs": {"sources"},
    "verification": {"sources", "graph"},
    "checkpoints": {"sources", "graph", "programs"},
    "forms": {"sources", "graph", "verification", "checkpoints"},
    "plan": {"sources", "graph", "programs", "verification", "forms"},
    "export": {"sources", "graph", "programs", "verification", "checkpoints", "forms", "plan", "staging"},
    "module": {"sources", "graph", "programs", "export"},
    "user_class": {"sources", "programs", "module"},
    "report": {"sources", "verification", "plan", "export"},
    "temperature": {"sources", "verification", "checkpoints", "ignore_key"},
    "tensorrt": {"graph"},
    "inspection": {"sources", "programs", "checkpoints", "ignore_key"},
    "adapt": {"sources", "programs", "verification", "checkpoints", "module", "staging", "ignore_key", "phases"},
    "long_context": {"sources", "checkpoints", "forms", "adapt", "staging"},
    "export_command": {
        "sources",
        "graph",
        "programs",
        "checkpoints",
        "plan",
        "export",
        "staging",
        "phases",
        "user_class",
        "report",
    },
    "cli": {"checkpoints", "export_command", "ignore_key"},
    "build": {"tensorrt"},
    "evaluate": {"forms"},
    "staging": set(),
    "phases": set(),
    "ignore_key": set(),
}
PACKAGES = {
    "core": set(),
    "plugins": {"core"},
    "models": {"core", "plugins"},
    "exporter": {"core", "plugins", "models"},
    "serving": {"core", "plugins"},
}


@cache
def imports_of(path: Path) -> tuple[ast.ImportFrom, ...]:
    """Return the imports of a file in the form `from a import b`, the only form that Sharp uses for its own modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))


def imported(folder: Path, package: str) -> dict[str, set[str]]:
    """Return the names behind `package` in the imports of every file in `folder`, without imports for types alone."""
    found = {}
    for path in sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]:
        modules = set()
        for node in imports_of(path):
            if node.module == package:
                modules |= {alias.name for alias in node.names}
            elif (node.module or "").startswith(f"{package}."):
                modules.add((node.module or "").removeprefix(f"{package}.").split(".")[0])
        found[str(path.relative_to(ROOT))] = modules
    return found


@pytest.mark.parametrize(
    ("package", "part"),
    [
        (package, part)
        for package, order in (
            ("serving", SERVING),
            ("serving.frontends", FRONTENDS),
            ("plugins", PLUGINS),
            ("exporter", EXPORTER),
        )
        for part in order
    ],
)
def test_parts_of_a_package(package: str, part: str) -> None:
    order = {"serving": SERVING, "serving.frontends": FRONTENDS, "plugins": PLUGINS, "exporter": EXPORTER}[package]
    files = imported(ROOT / package.replace(".", "/") / part, f"sharp.{package}")
    others = order.keys() - order[part] - {part}
    assert files
    assert {path: modules & others for path, modules in files.items() if modules & others} == {}


@pytest.mark.parametrize(("package", "order"), [("plugins", PLUGINS), ("exporter", EXPORTER)])
def test_every_folder_has_a_place_in_the_order(package: str, order: dict[str, set[str]]) -> None:
    """The order has no circles: a folder never imports, even indirectly, a folder that imports it."""
    folders = {path.name for path in (ROOT / package).iterdir() if any(path.glob("*.py"))}
    assert folders <= order.keys()
    assert tuple(TopologicalSorter(order).static_order())  # raises CycleError for a circle


@pytest.mark.parametrize("package", PACKAGES)
def test_packages(package: str) -> None:
    files = imported(ROOT / package, "sharp")
    others = PACKAGES.keys() - PACKAGES[package] - {package}
    wrong = {path: modules & others for path, modules in files.items() if modules & others}
    assert wrong == ({"core/manifest.py": {"plugins"}} if package == "core" else {})


def test_the_manifest_takes_names_of_the_op() -> None:
    """The definition of the op, which has the names of normalizers, imports only the errors of the core."""
    manifest = imported(ROOT / "core", "sharp.plugins")["core/manifest.py"]
    assert manifest == {"op"}
    names = imported(ROOT / "core", "sharp.plugins.op")["core/manifest.py"]
    assert names == {"attributes", "definition"}
    needed = imported(ROOT / "plugins" / "op", "sharp.core")
    assert [needed[f"plugins/op/{name}.py"] for name in ("attributes", "definition")] == [{"errors"}, set()]
