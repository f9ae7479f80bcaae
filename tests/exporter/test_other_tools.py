"""Other tools read the contiguous form: onnx's checker and evaluator, Netron, and onnxruntime-genai's own loop."""

import json
import shutil
import subprocess
from pathlib import Path

import netron
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx.reference import ReferenceEvaluator
from transformers import AutoConfig

from sharp.exporter.cli import export
from sharp.exporter.forms.contiguous.genai import with_kernels
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.models.checkpoint import save_checkpoint
from sharp.plugins import library_path
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.missing_tools import optional

PROMPT = np.array([[72, 101, 108, 108, 111]])
NEW_TOKENS = 12
SUMS = ("past + tokens", "tokens + past")  # the tracer may sort the sum either way


@pytest.fixture(scope="module")
def genai():
    return pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai has no build for this platform")


def generate(genai, folder, library=None):
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


@pytest.mark.full
def test_genai_says_what_we_say(genai, contiguous, tmp_path):
    expected = ContiguousSession(contiguous, kernels=True).generate(PROMPT, NEW_TOKENS)[0].tolist()
    assert generate(genai, contiguous) == expected
    # Without its function body, the model runs only with our library.
    shutil.copytree(contiguous, tmp_path / "bodiless")
    model = onnx.load(contiguous / "model.onnx", load_external_data=False)
    del model.functions[:]
    onnx.save(model, tmp_path / "bodiless" / "model.onnx")
    assert generate(genai, tmp_path / "bodiless", library_path("onnxruntime")) == expected
    with pytest.raises(Exception, match="SharpAttention"):
        generate(genai, tmp_path / "bodiless")


@pytest.mark.full
def test_genai_opens_the_tokenizer(genai, contiguous):
    tokenizer = genai.Tokenizer(genai.Model(str(contiguous)))
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169]) == "aé"
    assert json.loads((contiguous / "genai_config.json").read_text())["model"]["eos_token_id"] == [256]


@pytest.mark.full
def test_what_optimum_reads(tmp_path):
    """The names, sizes and config.json are those that optimum reads.

    optimum itself requires transformers 4. It ran SmolLM2 in an ad hoc trial, which is not archived.
    """
    source = save(tiny("llama"), tmp_path / "llama")
    arguments = [str(source), "--norm", "softmax", "--cache", "contiguous", "-o", str(tmp_path / "out")]
    assert CliRunner().invoke(export, arguments).exit_code == 0
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.num_hidden_layers) == ("llama", 2)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    sizes = {
        value.name: [dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for part in ("key", "value"):
        assert sizes[f"past_key_values.1.{part}"] == ["batch", heads, "past", head_dim]
        assert sizes[f"present.1.{part}"] in [["batch", heads, keys, head_dim] for keys in SUMS]


def test_onnx_checks_infers_and_evaluates_it(contiguous):
    path = contiguous / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert [value.name for value in inferred.graph.output] == [value.name for value in model.graph.output]
    session = ContiguousSession(contiguous, kernels=True)
    session.reset(1)
    expected, _ = session.step(PROMPT)
    pasts = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in session.past_shapes.items()}
    (logits,) = ReferenceEvaluator(model).run(["logits"], {"input_ids": PROMPT, **pasts})
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@optional("node")  # Netron's parser is JavaScript
def test_netron_reads_it_without_a_warning(contiguous):
    parser = Path(__file__).with_name("netron.mjs")
    folder = Path(netron.__file__).parent
    # Python packages do not declare that their .js files are modules.
    command = ["node", "--experimental-default-type=module", parser, folder, contiguous / "model.onnx"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    (read,) = json.loads(result.stdout)
    assert (read["functions"], read["unknown"], read["warnings"]) == (["SharpAttention"], [], [])
    assert read["format"].startswith("ONNX")
