"""`bench.gpu.first`: the plan fits its call, and its checks find what is right and what is wrong."""

import json
import time

import pytest

from bench.gpu import first
from bench.gpu.first import Step
from tests.full.cuda.test_computing import run


def test_the_plan_fits_one_call(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(first, "FOLDER", tmp_path)
    assert first.dry_run(480) == 1
    said = capsys.readouterr().out
    assert (
        "has no libsharp_cuda.so, references.pt, kernels; make them with: python -m bench.gpu.first --prepare" in said
    )
    for name in (first.LIBRARY, first.REFERENCES):
        (tmp_path / name).write_bytes(bytes(15 << 20))
    (tmp_path / first.KERNELS).mkdir()
    assert first.dry_run(480) == 0
    assert " of 480 s; " in capsys.readouterr().out
    assert first.dry_run(400) == 1
    (tmp_path / "kernels" / "kernels.bin").write_bytes(bytes(40 << 20))
    assert first.dry_run(480) == 1


def test_the_library_is_held_to_references_that_were_computed_before(libraries, tmp_path):
    rows = run("compute_first", libraries, libraries, tmp_path)
    assert [row["holds"] for row in rows] == [True, True, True, False], rows
    assert [row["op"] for row in rows] == ["PagedAttention", "PagedAttention", "SharpAttention", "PagedAttention"]


def test_every_kernel_of_the_plan_is_prepared():
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from sharp.plugins.cuda.kernel_set import kernels_for

    names = {kernel.name for kernel in kernels_for(first.options_of_plan(), first.TARGET)}
    assert len(names) < 90
    for normalizer in ("ssa", "adaptive_softmax"):
        assert f"merge bfloat16 bfloat16 128 128 16 {normalizer}" in names
    assert {f"decode_stream bfloat16 {kind} 128 128 16 softmax" for kind in ("bfloat16", "int8", "fp8")} <= names


def test_steps_keep_their_rows_and_go_on_behind_errors(tmp_path):
    def failing(_context):
        yield {"what": "a"}
        yield {"what": "b", "error": "out of memory"}

    def slow(context):
        while context.timely():
            time.sleep(0.01)
            yield {"what": "c"}

    steps = (Step("first", "fails", 9, failing), Step("second", "has no end", 0, slow), Step("third", "", 9, failing))
    output = tmp_path / "results.json"
    assert first.perform(steps, tmp_path, output, 60) == 1
    results = json.loads(output.read_text())
    assert [len(results[step.name]["rows"]) for step in steps] == [2, 0, 2]
    assert first.perform(steps[1:2], tmp_path, output, 60) == 0
