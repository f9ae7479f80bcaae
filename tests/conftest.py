"""Settings of the whole test run."""

import gc
import json
import os
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch

# `make test` uses the profile fast and `make test-full` the profile full. Both use the same examples in every run, so
# that only a change of the code makes a test fail. The profile search uses new examples, and `make properties` uses
# 50,000 of them with the profile many. A test sets its own number of examples only if its examples are slow (Triton's
# interpreter, a whole model).
EVERYWHERE = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}
hypothesis.settings.register_profile("fast", max_examples=60, derandomize=True, **EVERYWHERE)
hypothesis.settings.register_profile("full", max_examples=80, derandomize=True, **EVERYWHERE)
hypothesis.settings.register_profile("search", max_examples=300, print_blob=True, **EVERYWHERE)
hypothesis.settings.register_profile("many", max_examples=50_000, print_blob=True, **EVERYWHERE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# The background jobs of a shell, as in CI, ignore SIGINT from their start, and so would every command that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
FULL = TESTS / "full"
# `make test` leaves out cases that take longer than SECONDS, except the least slow one of each folder of the tests. Of
# the slow cases, and of those in THINNED, `make test-full` runs the first of every SLOW_SHARE cases of a test.
SECONDS = 2.0
SLOW_SHARE = int(os.environ.get("TESTS_SLOW_SHARE", "1"))
SHARE = int(os.environ.get("TESTS_SHARE", "1"))
FAST_ONLY = os.environ.get("TESTS_FAST_ONLY") == "1"
DURATIONS: dict[str, float] = json.loads((TESTS / "durations.json").read_text())
THINNED = tuple(FULL / name for name in ("triton", "cuda", "exporter", "modules", "docs", "end_to_end", "fuzz", "gguf"))


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # The models of the tests are tiny: threads that wait for each other cost more time than they save.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _rare_collections() -> None:
    # Tracing a model creates very many objects. Without a freeze, every garbage collection would visit all objects of
    # torch again, which takes a tenth of the time of a trace.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that this run leaves out, and spread the files of tests/full over the run.

    The tests in tests/full wait for servers and installers while the others compute. The last files of tests/full come
    first, because tests that compile kernels take longest.
    """
    kept = _without_slow(items) if FAST_ONLY else set(items)
    cases: Counter[str] = Counter()
    taken, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left_out if item not in kept or cases[test] % _share(item) else taken).append(item)
        cases[test] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = taken
    full: dict[Path, None] = {}
    others: dict[Path, None] = {}
    for item in items:
        (full if FULL in item.path.parents else others)[item.path] = None
    order = {path: index / len(group) for group in ([*full][::-1], others) for index, path in enumerate(group)}
    items.sort(key=lambda item: order[item.path])


def _seconds(item: pytest.Item) -> float:
    return DURATIONS.get(item.nodeid, 0.0)


def _without_slow(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the fast tests and the least slow one of every folder (`exporter/adapt`) or file (`core/test_cli.py`)."""
    folders: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        if _seconds(item) > SECONDS:
            folders.setdefault(item.path.relative_to(TESTS).parts[:2], []).append(item)
    slow = {item for folder in folders.values() for item in folder}
    return set(items) - slow | {min(folder, key=_seconds) for folder in folders.values()}


def _share(item: pytest.Item) -> int:
    """Return n if this run takes the first of every n cases of a parametrized test.

    `tests/plugins/test_instruction_sets.py` thins out the tests of kernels.
    """
    thinned = _seconds(item) > SECONDS or any(path == item.path or path in item.path.parents for path in THINNED)
    return SLOW_SHARE if thinned else SHARE
