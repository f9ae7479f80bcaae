"""The GPU libraries compute the right results on an interpreted GPU, from the call to its results.

Other tests compare launches with expected launches, and kernels with the reference. These tests cover the whole way.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.op.attributes import NORMALIZERS
from tests.exporter.conftest import tiny_model
from tests.full.cuda.native import ROOT

# Decoding over several splits and over no context, a chunk behind a context, and a prompt.
SEQUENCES = [[150, 1], [0, 1], [37, 5], [0, 40]]
QUESTION = [[4200, 9]]  # its keys are split over programs
PASSES = {
    "adaptive_softmax": ("prefill_observe", "prefill_settled"),
    "entmax": ("prefill_observe", "prefill_count", "prefill_settled"),
}


def paged(normalizer, dtype="float32", sequences=SEQUENCES, **options):
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
    options = {**sizes, "dtype": dtype, "sequences": sequences, "statistics": True, **options}
    return ["PagedAttention", {"normalizer": normalizer, **options}]


def attention(normalizer, form, queries, new_keys, dtype="float32", sinks=False):
    shape = {"form": form, "queries": queries, "new_keys": new_keys, "past": 60, "sinks": sinks}
    return ["SharpAttention", {"normalizer": normalizer, "dtype": dtype, **shape}]


CASES = {
    name: [
        paged(name),
        paged(name, "float16", [[30, 1], [0, 20]], alibi=True, softcap=5.0, window=20, head_dim=128),
        paged(name, sequences=[[20, 1], [20, 5]], cache_dtype="int8"),
        attention(name, "shared", 20, 20),
        attention(name, "concatenating", 1, 1, "float16"),
    ]
    for name in NORMALIZERS
}
for name in NORMALIZERS:  # with sinks, or with the columns of normalizers without a sink
    CASES[name] += [paged(name, sinks=True), attention(name, "shared", 20, 20, sinks=True)]
CASES["softmax"] += [attention("softmax", "none", 4, 120), attention("softmax", "shared", 1, 1)]
CASES["softmax"] += [
    paged("softmax", dtype, [[20, 1], [20, 5]], cache_dtype=cache)
    for dtype, cache in (("float16", "int8"), ("float16", "float8_e4m3fn"), ("float32", "float8_e4m3fn"))
]
for name in ("ssa", *PASSES):
    CASES[name] += [paged(name, "float16", QUESTION, q_heads=2, kv_heads=1, statistics=None)]
CASES["entmax"] += [paged("entmax", alpha=alpha, sequences=[[30, 1], [0, 20]]) for alpha in (1.25, 2.0)]
CASES["entmax"] += [paged("entmax", sequences=[[90, 1], [0, 20]], screened=True, spread=3.0)]


def run(module, libraries, *arguments, given=None):
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.full.cuda.{module}", *arguments],
        input=json.dumps(given),
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver"), "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


# Pointwise normalizers are launched alike, and tests/full/triton runs the kernel of each. relu stands for the others.
@pytest.mark.parametrize("normalizer", [name for name in NORMALIZERS if name not in ("sigmoid", "relu2")])
def test_library_and_plugins_agree_with_float64(libraries, normalizer):
    launched, ways = set(), set()
    cases = CASES[normalizer]
    for case, rows in zip(cases, run("compute_calls", libraries, libraries, given=cases), strict=True):
        for row in rows:
            ways.add((case[0], row["how"]))
            assert not row["failures"], (case, row)
            assert row["holds"], (case, row)
            launched.update(name.split()[0] for name in row["launches"])
    assert len(ways) == 6  # both ops through the library, through a plugin in place, and through a plugin that copies
    decoding = {"decode_stream"}
    if normalizer in ("adaptive_softmax", "entmax"):
        decoding = {"decode_observe", "decode_solve", "decode_settled"}
    question = {"merge_prompts", *PASSES.get(normalizer, ())} if normalizer in ("ssa", *PASSES) else set()
    screen = {"write_screened_cache", "decode_screen", "decode_survivors"} if normalizer == "entmax" else set()
    writing = {"write_cache", "write_scaled_cache", "write_present"}
    assert launched == {*writing, "prefill", "merge", *decoding, *question, *screen}


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("ssa", ()),
        ("asentmax", ("--kv-dtype", "int8")),
        ("softmax", ("--kv-dtype", "fp8")),
        ("entmax", ("--key-screen", "int8")),
    ],
)
def test_a_text_is_that_of_the_cpu(libraries, tmp_path, norm, options):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model(norm, head_dim=64))
    folder = tmp_path / "model"
    arguments = [str(tmp_path / "tiny.safetensors"), "--norm", norm, "-o", str(folder), *options]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    said = run("compute_text", libraries, folder, libraries / "host_provider.so")
    assert not said["failures"]
    assert any("prefill" in name for name in said["launches"]) and any("decode" in name for name in said["launches"])
    screened = {name.split()[0] for name in said["launches"]} & {"write_screened_cache", "decode_screen"}
    assert len(screened) == (2 if "--key-screen" in options else 0)
    if screened:
        assert not {name.split()[0] for name in said["launches_unscreened"]} & screened
        assert said["gpu"] == said["unscreened"]  # equal bit for bit
    cpu, gpu = said["cpu"], said["gpu"]
    for (tokens, logprobs), (others, their_logprobs) in zip(cpu["completions"], gpu["completions"], strict=True):
        assert tokens == others
        np.testing.assert_allclose(their_logprobs, logprobs, atol=1e-4)
    for stats, others in zip(cpu["stats"], gpu["stats"], strict=True):
        np.testing.assert_allclose(others, stats, atol=1e-3)
