"""`python -m tests.mutants PACKAGE`: change the source a little, and see whether the package's own tests notice.

A mutant has one comparison, operator, constant or condition changed, or one call dropped. The sample is seeded. No file
of the tree is written: a module finder in every process of the tests loads the mutant instead of the module
(`SHARP_MUTANT`). Where `make coverage` has recorded which test runs which line, only tests that run the mutated line
are started: the package's own tests of the line or, if the package has none, those of other packages.
"""

import argparse
import ast
import copy
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
PACKAGES = {  # the source and the tests of each package
    "engine": ("serving/engine", "tests/serving/engine"),
    "models": ("models", "tests/models"),
    "exporter": ("exporter", "tests/exporter"),
}
COVERAGE = ROOT / "build" / "coverage" / "data"
MOST_TESTS = 40  # of a line that more tests run, a random sample of this size
SWAPS: dict[type[ast.AST], type[ast.AST]] = dict(
    [
        *((ast.Lt, ast.LtE), (ast.LtE, ast.Lt), (ast.Gt, ast.GtE), (ast.GtE, ast.Gt), (ast.Eq, ast.NotEq)),
        *((ast.NotEq, ast.Eq), (ast.Is, ast.IsNot), (ast.IsNot, ast.Is), (ast.In, ast.NotIn), (ast.NotIn, ast.In)),
        *((ast.And, ast.Or), (ast.Or, ast.And), (ast.Add, ast.Sub), (ast.Sub, ast.Add), (ast.Mult, ast.Div)),
        *((ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult), (ast.Mod, ast.Mult)),
    ]
)
# Every process of a run finds this module first on sys.path, so commands that tests start run the mutant, too.
FINDER = """
import importlib.util, os, sys
NAME, _, PATH = os.environ.get("SHARP_MUTANT", "").partition("=")
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, PATH) if name == NAME else None
sys.meta_path.insert(0, Finder)
"""


def mutants(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield each possible mutation of `tree`: the node to replace, a description, and the replacement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp):
            operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
            if type(operator) in SWAPS and not (isinstance(node, ast.BinOp) and _is_text_or_type(node)):
                changed = copy.deepcopy(node)
                other = SWAPS[type(operator)]()
                if isinstance(changed, ast.Compare):
                    changed.ops[0] = other  # type: ignore[assignment]
                else:
                    changed.op = other  # type: ignore[assignment]
                yield node, f"{type(operator).__name__} -> {type(other).__name__}", changed
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node, f"{node.value} -> {value}", ast.copy_location(ast.Constant(value), node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "not dropped", node.operand
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call dropped", ast.copy_location(ast.Pass(), node)


def _is_text_or_type(node: ast.BinOp) -> bool:
    sides = [side.value for side in (node.left, node.right) if isinstance(side, ast.Constant)]
    return any(side is None or isinstance(side, str) for side in sides)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def sample(source: str, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return a random sample of the package's mutants, each as (file, number of the mutant in the file).

    Files of workers are left out. Workers are started by their path, so no module finder can put a mutant in their
    place.
    """
    files = sorted(file for file in (ROOT / source).rglob("*.py") if not file.name.endswith("_worker.py"))
    every = [(file, number) for file in files for number, _ in enumerate(mutants(ast.parse(file.read_text())))]
    return random.Random(seed).sample(every, min(count, len(every)))


def tests_of(file: Path, line: int, tests: str, seed: int) -> list[str]:
    """Return the tests that run this line: none if no test does, the whole folder of tests if that is not known."""
    if not COVERAGE.exists():
        return [tests]
    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    contexts = data.contexts_by_lineno(str(file)).get(line, [])
    names = sorted({name.partition("|")[0] for name in contexts})
    if "" in names:  # the line runs at import
        return [tests]
    chosen = [name for name in names if name.startswith(tests + "/")] or names
    return random.Random(seed).sample(chosen, min(MOST_TESTS, len(chosen)))


def survives(module: str, mutant: Path, tests: list[str], folder: Path, seconds: float) -> bool:
    """Whether all these tests pass with the mutant. A run that does not end in time counts as failed."""
    environment = os.environ | {
        "SHARP_MUTANT": f"{module}={mutant}",
        "PYTHONPATH": str(folder),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def main() -> int:
    """Run a sample of mutants and print the survivors; return 0 in any case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="of one mutant; then it counts as killed")
    parser.add_argument("--within", type=float, default=3600, help="seconds after which no further mutant begins")
    options = parser.parse_args()
    source, tests = PACKAGES[options.package]
    began, outcomes = time.monotonic(), defaultdict(int)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(FINDER)
        for file, number in sample(source, options.count, options.seed):
            if time.monotonic() - began > options.within:
                break
            tree = ast.parse(file.read_text())
            old, what, new = list(mutants(tree))[number]
            line = old.lineno  # type: ignore[attr-defined]
            mutant = folder / file.name
            mutant.write_text(ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree))))
            module = ".".join(("sharp", *file.relative_to(ROOT).with_suffix("").parts))
            chosen = tests_of(file, line, tests, options.seed)
            alive = not chosen or survives(module, mutant, chosen, folder, options.seconds)
            outcome = "killed" if not alive else "SURVIVES" if chosen else "NO TEST"
            outcomes[outcome] += 1
            print(f"{outcome:9}{file.relative_to(ROOT)}:{line}: {what}: {ast.unparse(old)[:70]}", flush=True)
    print(f"{options.package}: {outcomes['killed']} of {sum(outcomes.values())} killed (seed {options.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
