"""`sharp-export --cache none`: encoders, decoders over whole sequences, the set model and the models of numbers."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import inliner

from sharp.core.manifest import read_manifest
from sharp.exporter.forms.uncached.scoring import ExportedModel, TorchModel
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.models.checkpoint import Model, save_checkpoint
from sharp.models.hugging_face import to_hugging_face
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.tasks.registry import get_task
from tests.exporter.conftest import tiny_model
from tests.marks import full
from tests.tensor_models import numbers_model, set_model, shaken
from tests.tensorrt_rtx import build_engine


def encoder(norm: str = "softmax", positions: str = "rope") -> Model:
    torch.manual_seed(0)
    return shaken(SharpForMaskedLM(replace(tiny_model(norm, positions).config, causal=False)))


@pytest.fixture
def export_model(sharp_export, tmp_path):
    """Return a function that exports a model, asserts that both runtimes verified it, and returns the folder."""

    def export(model: Model, norm: str, **stored):
        save_checkpoint(tmp_path / "tiny.safetensors", model, dtype=torch.float32, **stored)
        result = sharp_export(tmp_path / "tiny.safetensors", "--norm", norm, "--cache", "none", "-o", tmp_path / "out")
        assert result.exit_code == 0, result.output
        manifest = read_manifest(tmp_path / "out")
        comparisons = manifest.verification["comparisons"]
        assert {comparison["runtime"] for comparison in comparisons} == {"kernels", "inlined"}
        assert all(comparison["logits_error"] < 1e-4 for comparison in comparisons)
        assert manifest.cache.form == "none"
        return tmp_path / "out"

    return export


@pytest.mark.parametrize(
    ("norm", "positions"),
    [
        ("adaptive-temperature", "none"),
        full("asentmax", "nape"),
        full("ssmax", "rope"),
        full("sparsemax", "alibi"),
        full("ssa", "alibi"),
        full("relu2", "nape"),
    ],
)
def test_encoders(export_model, norm, positions):
    folder = export_model(encoder(norm, positions), norm)
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.source.architecture) == ("encoder", "SharpForMaskedLM")
    assert [port.name for port in manifest.inputs] == ["input_ids", "attention_mask", "collect_stats"]
    assert manifest.inputs[0].shape == ("batch", "length")


@pytest.mark.parametrize("norm", ["asentmax", *(full(norm) for norm in ("ssa", "adaptive-temperature"))])
def test_set_models(export_model, norm):
    manifest = read_manifest(export_model(set_model(norm), norm, task="max-retrieval"))
    assert (manifest.kind, manifest.source.task, manifest.vocab_size) == ("set", "max-retrieval", 10)
    assert [port.name for port in manifest.inputs] == ["items", "query", "collect_stats"]


@pytest.mark.parametrize("norm", ["sentmax", full("softmax")])
def test_models_of_numbers(export_model, norm):
    model = numbers_model(norm)
    folder = export_model(model, norm)
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.inputs[0].name, manifest.outputs[0].name) == ("numbers", "numbers", "predictions")
    _, stats = UncachedSession(folder, kernels=True).run_with_stats([np.ones((1, 7), np.float32)])
    scale = model.decoder.blocks[0].attention.query_scale
    factors = 1.0 if scale is None else scale(torch.zeros(1, 7, 1), torch.arange(7)[None])[0].T.detach()
    np.testing.assert_allclose(stats[0, 0, ..., 2], np.broadcast_to(factors, stats.shape[2:4]), rtol=1e-5)


@pytest.mark.parametrize(
    ("trained", "norm", "options"),
    [
        ("entmax", "entmax", ("--alpha", "1.25")),
        full("softmax", "fixed-temperature", ("--temperature", "0.5", "--untrained-norm")),
    ],
)
def test_models_of_numbers_with_another_parameter(sharp_export, tmp_path, trained, norm, options):
    save_checkpoint(tmp_path / "tiny.pt", numbers_model(trained))
    options = ("--norm", norm, "--cache", "none", *options)
    result = sharp_export(tmp_path / "tiny.pt", *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output  # PyTorch computes with the same parameter, so the export is verified


@pytest.mark.parametrize(
    ("norm", "positions"),
    [
        ("ssa", "nape"),
        *(full(*pair) for pair in (("entmax", "rope"), ("ssmax", "alibi"))),
    ],
)
def test_decoders_over_whole_sequences(export_model, norm, positions):
    manifest = read_manifest(export_model(tiny_model(norm, positions), norm))
    assert (manifest.kind, manifest.tokenizer.file) == ("decoder", "tokenizer.json")


def test_hugging_face_models(sharp_export, tmp_path):
    to_hugging_face(encoder("ssa", "alibi")).save_pretrained(tmp_path / "mine")
    result = sharp_export(tmp_path / "mine", "--norm", "ssa", "--cache", "none", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "out").tokenizer.file == "tokenizer.json"


def test_padding_changes_nothing(export_model):
    session = UncachedSession(export_model(encoder("asentmax", "nape"), "asentmax"), kernels=True)
    tokens = np.arange(1, 8)[None]
    alone = session.run([tokens, np.ones_like(tokens)])
    padded = np.concatenate([tokens, np.full((1, 5), 9)], axis=1)
    mask = (np.arange(12) < 7).astype(np.int64)[None]
    np.testing.assert_allclose(session.run([padded, mask])[:, :7], alone, atol=1e-5)


def test_other_tools_need_not_feed_collect_stats(export_model):
    folder = export_model(set_model("entmax"), "entmax")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    items = np.random.default_rng(0).random((2, 6, 11), np.float32)
    logits, stats = session.run(None, {"items": items, "query": np.zeros((2, 1), np.float32)})
    assert logits.shape == (2, 10)
    assert stats.shape == (1, 2, 1, 1, 4)
    assert not stats.any()


def test_a_node_has_no_output_that_nobody_reads(export_model):
    path = export_model(encoder(), "softmax") / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == "ai.sharp"]
    assert [node.op_type for node in nodes] == ["SharpAttention"]
    assert all(list(node.output)[1:3] == ["", ""] for node in nodes)


@pytest.mark.full
def test_tensorrt_rtx_reads_the_inlined_model(export_model, tmp_path):
    model = inliner.inline_local_functions(onnx.load(export_model(encoder("entmax", "alibi"), "entmax") / "model.onnx"))
    onnx.save(model, tmp_path / "inlined.onnx")
    assert build_engine(model, tmp_path / "inlined.onnx").nbytes > 0


@pytest.mark.parametrize("cache", ["paged", None])
def test_models_without_a_cache_say_which_form_they_have(sharp_export, tmp_path, cache):
    save_checkpoint(tmp_path / "set.safetensors", set_model())
    options = [] if cache is None else ["--cache", cache]
    result = sharp_export(tmp_path / "set.safetensors", "--norm", "softmax", *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "holds a MaxRetrieval, which has no cache; export it with --cache none" in result.output
    assert not (tmp_path / "out").exists()


def test_a_set_model_with_another_norm_is_warned_about(sharp_export, tmp_path):
    save_checkpoint(tmp_path / "set.safetensors", set_model())
    options = ["--norm", "adaptive-temperature", "--cache", "none", "--untrained-norm", "-o", tmp_path / "out"]
    result = sharp_export(tmp_path / "set.safetensors", *options)
    assert result.exit_code == 0, result.output
    assert "UNTRAINED NORM" in result.output
    assert "Perplexity" not in result.output  # the model reads no text


@pytest.mark.parametrize(
    ("trained", "norm", "options"),
    [
        ("entmax", "entmax", ("--alpha", "1.25")),
        full("softmax", "fixed-temperature", ("--temperature", "0.2")),
        full("softmax", "adaptive-temperature", ("--temperature-coefficients", "arxiv2024")),
        full("softmax", "ssa", ("--ssa-b", "3", "--ssa-n", "2")),
        full("softmax", "ssmax", ("--log-length-offset", "5")),
    ],
)
def test_evaluation_compares_with_the_norm_as_it_was_exported(sharp_export, tmp_path, trained, norm, options):
    source, folder = tmp_path / "set.safetensors", tmp_path / "out"
    save_checkpoint(source, set_model(trained), task="max-retrieval")
    options = ("--norm", norm, "--untrained-norm", "--cache", "none", *options)
    assert sharp_export(source, *options, "-o", folder).exit_code == 0
    manifest = read_manifest(folder)
    batch = get_task("max-retrieval").sampler.sample(4, 32, torch.Generator().manual_seed(0))
    found = ExportedModel(folder, manifest, "kernels", threads=1)(*batch.inputs)
    torch.testing.assert_close(found, TorchModel(source, manifest)(*batch.inputs), rtol=1e-5, atol=1e-5)
