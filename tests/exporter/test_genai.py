"""onnxruntime-genai's own loop generates from the contiguous form, with Sharp's library and without."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from sharp.exporter.cli import export
from sharp.exporter.contiguous_session import ContiguousSession
from sharp.exporter.genai import with_kernels
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins import library_path
from tests.exporter.conftest import tiny_model

genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai has no build for this platform")
PROMPT = np.array([[72, 101, 108, 108, 111]])
NEW_TOKENS = 12


def generate(folder, library=None):
    config = genai.Config(str(folder))
    if library is not None:
        config.overlay(with_kernels(library))
    model = genai.Model(config)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=PROMPT.shape[1] + NEW_TOKENS)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT[0].astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0)[PROMPT.shape[1] :].tolist()


@pytest.fixture(scope="module")
def contiguous(tmp_path_factory):
    folder = tmp_path_factory.mktemp("genai")
    save_checkpoint(
        folder / "tiny.safetensors", tiny_model("asentmax", "nape", eos_token_ids=(256,)), dtype=torch.float32
    )
    arguments = ["--norm", "asentmax", "--cache", "contiguous", "-o", str(folder / "out")]
    result = CliRunner().invoke(export, [str(folder / "tiny.safetensors"), *arguments])
    assert result.exit_code == 0, result.output
    return folder / "out"


def test_genai_says_what_we_say(contiguous, tmp_path):
    expected = ContiguousSession(contiguous, kernels=True).generate(PROMPT, NEW_TOKENS)[0].tolist()
    assert generate(contiguous) == expected
    # Without its function body the model runs nowhere but in our library.
    shutil.copytree(contiguous, tmp_path / "bodiless")
    model = onnx.load(contiguous / "model.onnx", load_external_data=False)
    del model.functions[:]
    onnx.save(model, tmp_path / "bodiless" / "model.onnx")
    assert generate(tmp_path / "bodiless", library_path("onnxruntime")) == expected
    with pytest.raises(Exception, match="Attention"):
        generate(tmp_path / "bodiless")


def test_genai_opens_the_tokenizer(contiguous):
    tokenizer = genai.Tokenizer(genai.Model(str(contiguous)))
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169]) == "aé"
    assert json.loads((contiguous / "genai_config.json").read_text())["model"]["eos_token_id"] == [256]
