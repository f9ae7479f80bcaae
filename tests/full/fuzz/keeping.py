"""Chooses a few inputs of a target in Python, small ones first, such that each runs new steps of the code."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from tests.full.fuzz.native.build import ROOT
from tests.full.fuzz.targets import Target

PACKAGES = tuple(f"{ROOT / name}/" for name in ("core", "plugins", "models", "exporter", "serving"))
Step = tuple[str, int, int]  # file, line, and the line that runs after it


def steps_of(run: Callable[[], object]) -> set[Step]:
    """Return the steps of Sharp's code that `run` runs."""
    found: set[Step] = set()

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        file, last = frame.f_code.co_filename, 0
        if not file.startswith(PACKAGES):
            return None

        def step(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal last
            if event == "line":
                found.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        with suppress(Exception):
            run()
    finally:
        sys.settrace(None)
    return found


def few_of(target: Target, inputs: Iterable[bytes]) -> list[bytes]:
    """Return the inputs that run a step which neither the seeds nor a smaller input run."""
    known: set[Step] = set()
    for seed in target.seeds:
        known |= steps_of(lambda seed=seed: target.run(seed))
    kept = []
    for content in sorted(inputs, key=lambda one: (len(one), one)):
        steps = steps_of(lambda content=content: target.run(content))
        if steps - known:
            known |= steps
            kept.append(content)
    return kept
