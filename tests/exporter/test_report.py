"""Verification results in `report.json`, `--json` and `-q`; an interrupted export leaves nothing behind."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.exporter.verification.comparison import CaseOutputs, compare
from sharp.exporter.verification.perplexity import TextPrediction
from tests.marks import full


@pytest.mark.parametrize(("cache", "cases"), [("paged", 7), full("contiguous", 6), full("none", 5)])
def test_the_report_has_every_case(checkpoint, sharp_export, tmp_path, cache, cases):
    options = ("--norm", "ssa", "--cache", cache, "--untrained-norm", "-o", tmp_path / "out")
    result = sharp_export(checkpoint("softmax", layers=2), *options)
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
        assert case["torch_rounding"] is None
        assert case["batch"] == len(case["lengths"]) == len(case["contexts"])
        assert case["rows"] == sum(case["lengths"]) + sum(case["contexts"])
        for kind in ("keys", "values"):
            assert (kind in case) == (cache != "none")
            if kind in case:
                assert 0 < case[kind]["mean_error"] < case[kind]["max_error"] <= report["tolerance"]["logits"]
    for heads in report["heads"]:
        torch_means, means = np.array(heads["torch_mean_entropy"]), np.array(heads["mean_entropy"])
        assert means.shape == (2, 6)
        np.testing.assert_allclose(means, torch_means, atol=1e-4)
        assert np.max(heads["max_error"]) <= report["tolerance"]["entropy"]
    for greedy in report["greedy"]:
        assert (greedy["tokens"], greedy["same"], greedy["first_difference"]) == (64, 64, None)
    for runtime in report["perplexity"]["runtimes"]:
        assert runtime["perplexity"] == pytest.approx(runtime["reference_perplexity"], rel=1e-3)
    assert report["perplexity"]["runtimes"][0]["reference_perplexity"] == report["perplexity"]["after"]
    assert "Greedy tokens of 64 that are PyTorch's: 64 with Sharp's kernels" in " ".join(result.output.split())
    assert report["checked_against"].startswith("Checked against PyTorch with Sharp's own SharpForCausalLM")
    assert report["checked_against"] in result.output.splitlines()


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


def test_a_comparison_weighs_every_number_alike():
    def outputs_of_case(rows, error):
        return CaseOutputs(np.ones((rows, 4), np.float32) + np.float32(error), np.full((2, rows, 3), error, np.float32))

    expected = [outputs_of_case(3, 0.0), outputs_of_case(1, 0.0)]
    found = compare("kernels", "case", [outputs_of_case(3, 0.0), outputs_of_case(1, 0.5)], expected)
    assert (found.logits_error, found.mean_logits_error) == (0.5, 0.125)
    assert (found.entropy_error, found.mean_entropy_error, found.first_wrong_layer) == (0.5, 0.125, 0)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_what_the_caches_hold_is_compared(kind):
    caches = np.full((5, 2, 4), 4, np.float32), np.ones((5, 1, 4), np.float32)
    expected = CaseOutputs(np.ones((5, 9)), np.ones((2, 5, 2)), caches, caches)
    wrong = caches[0], caches[1] + np.float32(0.5) * (np.arange(5) == 4)[:, None, None]
    found = compare("kernels", "case", [replace(expected, **{kind: wrong})], [expected])
    assert found.cached[kind] == (0.5, pytest.approx(0.5 * 4 / 60))
    assert found.cached["values" if kind == "keys" else "keys"] == (0, 0)
    assert not found.passed
    assert f"cached {kind} by 5.0e-01" in found.difference


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing_behind(checkpoint, tmp_path, number):
    source = checkpoint("softmax")
    before = sorted(tmp_path.iterdir())
    code = (
        "import os\n"
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


@pytest.mark.parametrize(
    ("error", "may_fall", "passed"),
    [
        (0.08, True, True),
        (0.081, True, False),
        (-0.2, True, True),
        (-0.2, False, False),
        (-0.08, False, True),
        (math.nan, True, False),
        (math.nan, False, False),
    ],
)
def test_what_a_texts_perplexity_may_differ_by(error, may_fall, passed):
    assert TextPrediction("kernels", 9, 1.0, "PyTorch", 1.0, error, 0.08, may_fall).passed == passed
