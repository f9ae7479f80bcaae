"""A short run of the targets of `make fuzz`: the kept inputs, and some inputs that follow from a seed."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.full.fuzz.native.build import ROOT, TARGETS, build_replay
from tests.full.fuzz.targets import CORPUS, kept_inputs, makers, write_inputs
from tests.missing_tools import missing

RUNS = 100  # runs of each target
RANDOM_CALLS = 2000  # runs of each native target
MAKERS = makers()
MOST_KEPT = 10**6  # bytes of all kept inputs


@pytest.mark.parametrize("name", MAKERS)
def test_kept_inputs_and_damaged_ones_are_read_or_refused_in_one_sentence(name, tmp_path):
    target = MAKERS[name](tmp_path)
    for content in kept_inputs(name):
        target.check(content)
    for seed in range(RUNS):
        target.check(target.damaged(target.seeds[seed % len(target.seeds)], seed))


@pytest.mark.parametrize("name", TARGETS)
def test_the_kernels_refuse_or_run_any_call(name, tmp_path):
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None) or missing(
        "no c++"
    )
    write_inputs(kept_inputs(f"native-{name}"), tmp_path / "kept")
    files = sorted((tmp_path / "kept").iterdir())
    ended = subprocess.run(
        [build_replay(compiler, name, tmp_path), str(RANDOM_CALLS), *files], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:] + ended.stderr[-2000:]


def test_atheris_runs_a_target(tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no wheel for this Python")
    command = [
        sys.executable,
        "-m",
        "tests.full.fuzz.covered",
        "stop-strings",
        "-runs=2000",
        "-seed=1",
        "-print_final_stats=1",
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "number_of_executed_units: 200" in ended.stderr


def test_what_is_kept_is_small():
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MOST_KEPT
