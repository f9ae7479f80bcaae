"""`bench/gpu/generation.py` without a GPU: both models are right on a CPU, and ONNX Runtime's steps are graphs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench.gpu import generation
from bench.gpu.cases import Cases
from sharp import LLM, SamplingParams
from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins import library_path
from sharp.serving.config import BackendConfig
from tests.exporter.conftest import tiny_model
from tests.full.cuda.native import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    save_checkpoint(out / "tiny.safetensors", tiny_model("softmax", head_dim=64))
    result = CliRunner().invoke(export, [str(out / "tiny.safetensors"), "--norm", "softmax", "-o", str(out / "out")])
    assert result.exit_code == 0, result.output
    return out / "out"


def test_the_loop_generates_what_the_engine_does(folder):
    library = Path(library_path("onnxruntime"))
    prompts = np.array([[5, 9, 40, 7], [200, 3, 1, 8]])
    model = generation.OnnxModel(folder, library, 2, 40, device="cpu", graphs=False)
    found = generation.generate(model, prompts, 0, 12)
    llm = LLM(folder, backend=BackendConfig(threads=1, device="cpu"))
    completions = llm.generate(prompts.tolist(), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert found.tolist() == [list(completion.token_ids) for completion in completions]


def test_the_peer_reads_its_cache_as_if_it_had_read_all_at_once():
    sizes = generation.Sizes(layers=2, q_heads=4, kv_heads=2, head_dim=16, vocab=97)
    prompt = np.random.default_rng(1).integers(0, 97, (3, 6))

    def made():
        model = generation.TorchPeer(sizes, 3, 20, device="cpu", dtype=torch.float64, graph=False)
        for layer in model.layers:  # the weights are so large that the context decides the next token
            for name in ("query_key_value", "out", "gate_up", "down"):
                layer[name] *= 20
        return model

    generated = generation.generate(made(), prompt, 0, 8)
    assert len(set(generated.ravel())) > 10
    whole, again = np.concatenate([prompt, generated[:, :-1]], 1), made()
    assert [again.run(whole[:, : 6 + step], 0).tolist() for step in range(8)] == generated.T.tolist()
    # A graph captures attention over the whole cache under a mask.
    masked = made()
    tokens = [masked.run(prompt, 0)]
    for step in range(7):
        ids, position = torch.from_numpy(tokens[-1][:, None]), torch.tensor([6 + step])
        tokens.append(masked.forward(ids, position, None).numpy())
    assert np.stack(tokens, 1).tolist() == generated.tolist()


def test_weights_that_were_left_out_are_random(folder, tmp_path):
    generation.strip(folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "sharp.json", "weights.size"]
    generation.fill(tmp_path)
    assert (tmp_path / "model.onnx.data").stat().st_size == (folder / "model.onnx.data").stat().st_size
    assert np.fromfile(tmp_path / "model.onnx.data", np.float16).std() == pytest.approx(0.02, rel=0.05)


def test_what_is_missing_is_a_row(tmp_path):
    rows = list(generation.end_to_end(True, Cases(lambda: True), tmp_path, tmp_path))
    assert list(dict.fromkeys(row["subject"] for row in rows)) == [
        *("ONNX Runtime, our kernels", "torch", "ONNX Runtime, our kernels, CUDA graph", "torch, CUDA graph")
    ]
    assert all("has no model.onnx" in row["skipped"] or "sharp.json" in row["skipped"] for row in rows)


def test_decode_steps_become_graphs_under_the_cuda_provider(libraries, cuda_provider, folder):
    script = f"""
import sys, json, ctypes, pathlib
import numpy as np; from bench.gpu import generation
runtime = ctypes.CDLL("libcudart.so.13"); runtime.fake_runtime_events.restype = ctypes.c_char_p
said = []
for graphs in (False, True):
    library = pathlib.Path({str(libraries)!r}) / "libsharp_ops.so"
    model = generation.OnnxModel(pathlib.Path({str(folder)!r}), library, 3, 40, device="cuda", graphs=graphs)
    runtime.fake_runtime_events()
    tokens = generation.generate(model, np.ones((3, 7), np.int64), 0, 5)
    events = runtime.fake_runtime_events().decode().splitlines()
    said.append([tokens.shape, events.count("capture"), events.count("replay")])
print(json.dumps(said))
"""
    environment = {**os.environ, "SHARP_FAKE_HOST_MEMORY": "1", **cuda_provider}
    finished = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    # The prompt, then the first decode step, which is captured, and three more replays.
    assert json.loads(finished.stdout) == [[[3, 5], 0, 0], [[3, 5], 1, 4]]
