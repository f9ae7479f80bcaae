"""Auxiliary cache tensors reach the TensorRT backend from the export; a fake TensorRT computes with our CPU kernels."""

import onnx
import pytest
from click.testing import CliRunner

from sharp.core.checksums import update_sums
from sharp.core.manifest import read_manifest
from sharp.exporter.cli import export
from sharp.exporter.graph.key_screens import leave_out_key_screens
from sharp.models.checkpoint import save_checkpoint
from sharp.serving import LLM, SamplingParams
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from tests.exporter.conftest import tiny_model
from tests.serving.backends.fake_tensorrt import FakeMachine, write_engine

PROMPTS = [[5, 9, 2, 40, 3, 8, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 7, 31], [7], [10, 20, 50]]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENGINE = EngineConfig(max_sequences=4, max_batch_tokens=16, attention_interval=0)


@pytest.mark.parametrize(
    ("norm", "options", "tensors"),
    [
        ("ssa", ("--kv-dtype", "int8", "--target", "tensorrt"), ("key_scale", "value_scale")),
        ("ssa", ("--kv-dtype", "fp8", "--target", "tensorrt"), ("key_scale", "value_scale")),
        ("entmax", ("--key-screen", "int8"), ("key_screen",)),
    ],
)
def test_auxiliary_cache_tensors_are_kept_on_the_device(tmp_path, monkeypatch, norm, options, tensors):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model(norm))
    folder = tmp_path / "model"
    arguments = [str(tmp_path / "tiny.safetensors"), "--norm", norm, *options, "-o", str(folder)]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx")  # the fake's engine is this file, so the file must contain the weights
    update_sums(folder, (folder / "model.onnx",))
    machine = FakeMachine()
    machine.install(monkeypatch)
    write_engine(folder, machine, block=16)

    def completions(name):
        llm = LLM(folder, backend=BackendConfig(name=name), engine=ENGINE)
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]

    assert completions("tensorrt") == completions("onnxruntime")
    for name in ("key_cache", "value_cache", *tensors):
        read, written = machine.addresses[f"{name}.0"], machine.addresses[f"{name}_out.0"]
        assert read == written and len(read) == 1
    assert load_backend(folder, read_manifest(folder), BackendConfig(name="tensorrt")).screened == (
        "key_screen" in tensors
    )


def test_an_engine_of_before_has_no_screens(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "tiny.safetensors", tiny_model("entmax"))
    folder = tmp_path / "model"
    arguments = [str(tmp_path / "tiny.safetensors"), "--norm", "entmax", "--key-screen", "int8", "-o", str(folder)]
    assert CliRunner().invoke(export, arguments).exit_code == 0
    model = onnx.load(folder / "model.onnx")
    leave_out_key_screens(model)
    onnx.save(model, folder / "model.onnx")
    update_sums(folder, (folder / "model.onnx",))
    machine = FakeMachine()
    machine.install(monkeypatch)
    write_engine(folder, machine, block=16)
    llm = LLM(folder, backend=BackendConfig(name="tensorrt"), engine=ENGINE)
    assert all(len(completion.token_ids) == 20 for completion in llm.generate(PROMPTS, PARAMS))
    assert not load_backend(folder, read_manifest(folder), BackendConfig(name="tensorrt")).screened
    assert "key_screen.0" not in machine.addresses
