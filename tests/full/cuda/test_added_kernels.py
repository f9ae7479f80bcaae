"""Kernels that the library was not built with come from the model's folder, or are compiled at the first start."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sharp.core.cli import main
from sharp.core.errors import InputError
from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.cuda import model_package
from sharp.plugins.cuda.kernel_set import kernels_for, options_for, plan_constants
from sharp.plugins.cuda.package import INDEX_FILE, write_package
from tests.exporter.conftest import tiny_model
from tests.full.cuda.native import ROOT, fake_image
from tests.full.cuda.process import Call


@pytest.fixture
def package(tmp_path):
    """Write kernels in bfloat16, which the library of these tests lacks, and return their folder."""
    kernels = kernels_for(options_for(["softmax"], [64], ["bfloat16"], ["plain"]), 90)
    write_package([fake_image(kernel, 90) for kernel in kernels], plan_constants(), tmp_path / "kernels")
    return tmp_path / "kernels"


def run(libraries, *folders):
    return subprocess.run(
        [sys.executable, "-m", "tests.full.cuda.process", libraries / "libsharp_cuda.so", *folders],
        input=json.dumps([Call(dtype="bfloat16").as_dict()]),
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_kernels_of_a_folder_are_launched_like_those_that_are_built_in(libraries, package):
    [without] = json.loads(run(libraries).stdout)
    assert "has no kernel write_cache bfloat16 bfloat16 64 64 16" in without["error"]
    assert "`sharp build FOLDER --backend cuda` compiles those of an exported model" in without["error"]
    [added] = json.loads(run(libraries, package).stdout)
    launched = [event.split()[1] for event in added["events"] if event.startswith("launch ")]
    assert launched == [f"{name}@sm_90a" for name in ("write_cache", "decode_stream", "merge", "prefill")]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace("kSplitKeys\t256", "kSplitKeys\t512"), "was written by another version of Sharp"),
        (lambda text: re.sub(r"kSources\t\d+", "kSources\t1", text), "was written by another version of Sharp"),
        (lambda text: text + "prefill\tmore\tcolumns\n", "is damaged; compile the kernels again"),
        (lambda text: text.replace("\t4096\t", "\t-1\t"), "'-1' is no number"),
    ],
)
def test_a_damaged_folder_is_refused(libraries, package, damage, words):
    index = package / INDEX_FILE
    index.write_text(damage(index.read_text()))
    finished = run(libraries, package)
    assert finished.returncode == 1 and words in finished.stderr.splitlines()[-1]


def test_a_first_start_compiles_what_is_missing_and_sharp_build_does_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model("softmax", head_dim=16))
    arguments = [str(tmp_path / "tiny.safetensors"), "--norm", "softmax", "-o", str(tmp_path / "model")]
    assert CliRunner().invoke(export, arguments).exit_code == 0
    found, compiled = set(), []

    class Library:
        def __init__(self, path):
            pass

        def has_kernel(self, name, capability):
            return name in found

        def add_kernels(self, folder):
            found.update(line.split("\t")[0] for line in (folder / INDEX_FILE).read_text().splitlines())

    def compile_with_progress(work, cache, jobs):
        compiled.append(len(work))
        return [fake_image(kernel, capability) for kernel, capability in work]

    monkeypatch.setattr(model_package, "Library", Library)
    monkeypatch.setattr(model_package, "library_path", lambda runtime: f"/{runtime}")
    monkeypatch.setattr("sharp.plugins.cuda.build_kernels.compile_with_progress", compile_with_progress)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_package.add_kernels(tmp_path / "model", 90)
    assert compiled == [6] and "merge_prompts float32 float32 16 16 16 softmax" in found
    model_package.add_kernels(tmp_path / "model", 90)
    assert compiled == [6]
    # `sharp build` puts the kernels into the model's folder, so that no start has to compile them.
    found.clear()
    built = CliRunner().invoke(
        main, ["build", str(tmp_path / "model"), "--backend", "cuda", "--compute-capability", "90"]
    )
    assert built.exit_code == 0 and "model/kernels: 6 kernels for compute capability 9.0" in built.output
    model_package.add_kernels(tmp_path / "model", 90)
    assert compiled == [6, 6]
    refused = CliRunner().invoke(
        main, ["build", str(tmp_path / "model"), "--backend", "cuda", "--compute-capability", "75"]
    )
    assert refused.exit_code == 2 and "--compute-capability is 75; kernels are compiled for one of 80" in refused.output
    (tmp_path / "model" / "kernels").rename(tmp_path / "kernels")
    found.clear()
    with pytest.raises(InputError, match=r"has no kernel write_cache .* 13\.0, and Sharp compiles for 8\.0, 8\.6"):
        model_package.add_kernels(tmp_path / "model", 130)
