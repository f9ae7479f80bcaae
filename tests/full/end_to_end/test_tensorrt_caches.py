"""Caches of 8 bits from the export to the TensorRT backend, over a fake TensorRT that computes with our CPU kernels."""

import onnx
import pytest
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins.checksums import update_sums
from sharp.serving import LLM, SamplingParams
from sharp.serving.config import BackendConfig, EngineConfig
from tests.exporter.conftest import tiny_model
from tests.serving.backends.fake_tensorrt import FakeMachine, write_engine

PROMPTS = [[5, 9, 2, 40, 3, 8, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 7, 31], [7], [10, 20, 50]]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENGINE = EngineConfig(max_sequences=4, max_batch_tokens=16, attention_interval=0)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_cache_with_scales_is_kept_on_the_device(tmp_path, monkeypatch, dtype):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model("ssa"))
    arguments = [str(tmp_path / "tiny.safetensors"), "--norm", "ssa", "--kv-dtype", dtype, "--target", "tensorrt"]
    folder = tmp_path / "model"
    result = CliRunner().invoke(export, [*arguments, "-o", str(folder)])
    assert result.exit_code == 0, result.output
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx")  # the fake's engine is this file, and has the weights in it
    update_sums(folder, (folder / "model.onnx",))
    machine = FakeMachine()
    machine.install(monkeypatch)
    write_engine(folder, machine, block=16)

    def completions(name):
        return [
            one.token_ids
            for one in LLM(folder, backend=BackendConfig(name=name), engine=ENGINE).generate(PROMPTS, PARAMS)
        ]

    assert completions("tensorrt") == completions("onnxruntime")
    outputs = {value.name for value in model.graph.output}
    for name in ("key_cache", "value_cache", "key_scale", "value_scale"):
        assert f"{name}_out.0" in outputs
        read, written = machine.addresses[f"{name}.0"], machine.addresses[f"{name}_out.0"]
        assert read == written and len(read) == 1
