"""Benchmarks that reach into the engine run on a small model, and the page has a section for their result.

No times are checked.
"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import embeddings, engine_step, host_share, long_prompt, metrics, normalizers, plan, precision
from bench.tables import page
from sharp.exporter.cli import export

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("model") / "text-softmax"
    checkpoint = ROOT / "models" / "checkpoints" / "text-ssa.safetensors"
    run(export, checkpoint, "--norm", "softmax", "--untrained-norm", "-o", out, "-q")
    return out


def run(command, *arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (engine_step, ("--streams", 2, "--steps", 4, "--prefix", 128)),
        (host_share, ("--streams", 2, "--milliseconds", 1, "--steps", 16, "--rounds", 1)),
        (plan, ("--streams", "1,4", "--context", 64, "--completion-tokens", 8, "--rounds", 1)),
        (metrics, ("--streams", 2, "--context", 64, "--steps", 40)),
        (long_prompt, ("--lengths", 256)),
        (precision, ("--text", ROOT / "LICENSE", "--tokens", 256)),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else "",
)
def test_a_script_writes_what_the_page_shows(script, arguments, folder, tmp_path):
    output = tmp_path / "result.json"
    run(script.main, folder, *arguments, "--output", output)
    result = json.loads(output.read_text())
    assert {"benchmark", "date", "machine", "load_average", "versions"} <= set(result)
    assert "### result.json" in page(tmp_path)


def test_embeddings_are_compared(tmp_path):
    output = tmp_path / "result.json"
    run(embeddings.main, "--small", "--texts", 8, "--rounds", 1, "--threads", 1, "--output", output)
    assert json.loads(output.read_text())["largest_difference"] < 1e-5
    assert "x sentence-transformers" in page(tmp_path)


def test_every_norm_decodes_over_one_cache(folder, tmp_path):
    cache, output = tmp_path / "cache.npz", tmp_path / "result.json"
    run(normalizers.main, "fill", folder, "--cache", cache, "--context", 512)
    small = ("--contexts", 512, "--rounds", 1, "--tokens", 4)
    run(normalizers.main, "measure", folder, "--cache", cache, *small, "--output", output)
    rows = json.loads(output.read_text())["rows"]
    assert [row["norm"] for row in rows] == list(normalizers.NORMS)
    assert "x softmax" in page(tmp_path)
