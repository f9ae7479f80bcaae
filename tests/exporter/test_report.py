"""What verification found: `report.json`, `--json` and `-q`; and what an interrupted export leaves behind."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.exporter.contiguous_session import ContiguousSession
from sharp.exporter.verification import Pair, compare


@pytest.mark.parametrize(("cache", "cases"), [("paged", 6), ("contiguous", 5), ("none", 5)])
def test_the_report_has_every_case(checkpoint, sharp_export, tmp_path, cache, cases):
    options = ("--norm", "ssa", "--cache", cache, "--untrained-norm", "-o", tmp_path / "out")
    result = sharp_export(checkpoint("softmax"), *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["passed"], report["norm"], report["trained_norm"]) == (True, "ssa", "softmax")
    assert report["perplexity"]["tokens"] == 1024
    assert [case["runtime"] for case in report["cases"]] == ["kernels"] * cases + ["inlined"] * cases
    for case in report["cases"]:
        assert 0 <= case["logits"]["mean_error"] <= case["logits"]["max_error"] <= report["tolerance"]["logits"]
        entropy = case["entropy"]
        assert 0 <= entropy["mean_error"] <= entropy["max_error"] <= report["tolerance"]["entropy"]
        assert (len(entropy["max_error_of_layers"]), max(entropy["max_error_of_layers"])) == (2, entropy["max_error"])
        assert case["passed"]


def test_json_is_the_report_and_nothing_else(checkpoint, tmp_path):
    arguments = [str(checkpoint("softmax")), "--norm", "softmax", "--json", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    result = CliRunner().invoke(export, [*arguments[:-1], str(tmp_path / "other"), "--dry-run", "-q"])
    assert json.loads(result.output)["weights"] > 0


def test_quiet_says_nothing_but_errors(checkpoint, sharp_export, tmp_path):
    arguments = (checkpoint("softmax"), "--norm", "ssa", "-q", "-o", tmp_path / "out")
    refused = sharp_export(*arguments)
    assert (refused.exit_code, len(refused.output.splitlines())) == (2, 1)
    assert sharp_export(*arguments, "--untrained-norm").output == ""


def test_a_failed_verification_names_the_first_layer(checkpoint, sharp_export, tmp_path, monkeypatch):
    step = ContiguousSession.step

    def spoiled(session, tokens):
        logits, stats = step(session, tokens)
        stats[1, ..., 0] += 1
        return logits, stats

    monkeypatch.setattr(ContiguousSession, "step", spoiled)
    options = ("--norm", "softmax", "--cache", "contiguous", "-o", tmp_path / "out")
    result = sharp_export(checkpoint("softmax"), *options)
    assert result.exit_code == 1
    assert "from layer 1 on" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_comparison_weighs_every_number_alike():
    def pair(rows, error):
        logits, entropy = np.ones((rows, 4), np.float32), np.zeros((2, rows), np.float32)
        return Pair(logits + np.float32(error), logits, entropy + np.float32(error), entropy)

    found = compare("kernels", "case", [pair(3, 0.0), pair(1, 0.5)])
    assert (found.logits_error, found.mean_logits_error) == (0.5, 0.125)
    assert (found.entropy_error, found.mean_entropy_error, found.first_wrong_layer) == (0.5, 0.125, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing_behind(checkpoint, tmp_path, number):
    source = checkpoint("softmax")
    before = sorted(tmp_path.iterdir())
    code = (
        # As in a terminal: a shell's background jobs, CI's among them, are started with SIGINT ignored.
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from sharp.exporter import lowering\n"
        "write = lowering.write\n"
        "def interrupted(*arguments):\n"
        f"    write(*arguments); os.kill(os.getpid(), {int(number)})\n"
        "    while True: pass\n"
        "lowering.write = interrupted\n"
        "from sharp.exporter.cli import export; export()"
    )
    arguments = [source, "--norm", "softmax", "-o", tmp_path / "new" / "deep" / "out"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=60, check=False)
    assert result.returncode not in (0, 2)
    assert sorted(tmp_path.iterdir()) == before
