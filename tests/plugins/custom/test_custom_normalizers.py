"""A user's own normalizer passes `sharp check-normalizer` and every part of Sharp that built-in norms pass."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import sharp
from sharp.core.cli import main
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.models.normalized_attention import normalized_attention
from sharp.plugins.custom.checks import run_checks
from sharp.plugins.op import custom_normalizer as custom
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.llm import LLM
from tests.exporter.conftest import checkpoint, one_registry, one_trace, quick_tracing, sharp_export
from tests.exporter.programs import gpt

__all__ = ["checkpoint", "one_registry", "one_trace", "quick_tracing", "sharp_export"]

FILES = sorted((Path(__file__).parents[3] / "docs" / "normalizers").glob("*.py"))
SOFTMAX1 = next(path for path in FILES if path.stem == "softmax1")


@pytest.fixture
def softmax1():
    found = custom.in_file(SOFTMAX1)
    custom.add(found)
    yield found
    custom._added.clear()


def check(*arguments):
    return CliRunner().invoke(main, ["check-normalizer", *map(str, arguments)])


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_shipped_examples_pass_their_check(file):
    result = check(file)
    assert (result.exit_code, "is ready" in result.output, result.output.count("FAIL")) == (0, True, 0), result.output


def test_a_module_that_calls_it_is_exported_with_it_unsaid(softmax1, tmp_path):
    module, inputs = gpt.GPT(partial(normalized_attention, norm="softmax1", causal=True)), (torch.zeros(1, 9).long(),)
    result = sharp.export(module, inputs, output=tmp_path / "out")
    assert result.verification.passed
    assert (result.manifest.norm.name, result.manifest.norm.trained) == ("softmax1", True)
    with pytest.raises(InputError, match="no kernel has --norm softmax1"):
        sharp.export(module, inputs, target="onnxruntime", output=tmp_path / "other")


def shifted_by_hidden_keys(logits, visible):
    return torch.softmax(logits, -1) * visible


def by_place(logits, visible):
    return torch.softmax(logits.masked_fill(~visible, -1e9) + 0.1 * torch.arange(logits.shape[-1]), -1).to(logits.dtype)


def overflowing(logits, visible):
    grown = torch.exp(logits) * visible
    total = grown.sum(-1, keepdim=True)
    return grown / total.masked_fill(total == 0, 1.0)


def with_half_the_gradient(logits, visible):
    lowest = -1e9 if logits.abs().max() < 1e8 else -1e38
    return torch.softmax((logits + logits.detach()).masked_fill(~visible, lowest) / 2, -1) * visible


def without_a_message(logits, visible):
    raise ValueError


def other_body(op, logits, visible):
    return op("Where", visible, op("Relu", logits), 0.0)


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"weights": shifted_by_hidden_keys}, "mask"),
        ({"weights": by_place}, "order of keys"),
        ({"weights": overflowing}, "huge logits"),
        ({"weights": with_half_the_gradient}, "gradients"),
        ({"weights": lambda logits, visible: -logits}, "weights"),
        ({"weights": lambda logits, visible: logits.relu()}, "weights"),  # sparse, without saying so
        ({"weights": lambda logits, visible: logits.float()}, "weights"),
        ({"weights": lambda logits, visible: logits.sum(-1)}, "weights"),
        ({"weights": without_a_message}, "weights"),
        ({"body": other_body}, "body of standard ops"),
        ({"body": lambda op, logits, visible: op("NoSuchOp", logits)}, "body of standard ops"),
        ({"body": lambda op, logits, visible: None}, "body of standard ops"),
        ({"streamed": custom.Streamed((0.0,), lambda s, z, seen: (s, torch.exp(z), 1.0), lambda s: 1.0)}, "streamed"),
    ],
)
def test_a_mistake_is_found(softmax1, change, fails):
    found = [result for result in run_checks(replace(softmax1, **change)) if result.problem]
    assert any(fails in check.name for check in found), found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no file"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "defines 0 normalizers"),
        ("import sharp\nx = sharp.CustomNormalizer('softmax', abs, abs)", "which Sharp has itself"),
        ("import sharp\nx = sharp.CustomNormalizer('A b', abs, abs)", "use up to 64 small letters"),
        ("import sharp\nx = sharp.CustomNormalizer('a', 1, abs)", "is no function"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path, content, says):
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    result = check(file)
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_an_exported_model_is_verified_and_served(softmax1, checkpoint, sharp_export, tmp_path):
    folder = tmp_path / "model"
    result = sharp_export(checkpoint("softmax"), "--norm", "softmax1", "--untrained-norm", "-o", folder)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(folder)
    assert (manifest.norm.normalizer, manifest.target, manifest.verified) == ("softmax1", "portable", True)
    model = LLM(str(folder))
    (completion,) = model.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4


def test_a_server_does_not_need_the_file(softmax1, checkpoint, sharp_export, tmp_path):
    folder = tmp_path / "model"
    assert sharp_export(checkpoint("softmax"), "--norm", "softmax1", "--untrained-norm", "-o", folder).exit_code == 0
    custom._added.clear()
    assert read_manifest(folder).norm.name == "softmax1"
    text = (folder / "sharp.json").read_text().replace('"target": "portable"', '"target": "onnxruntime"')
    (folder / "sharp.json").write_text(text)
    with pytest.raises(InputError, match="no kernel has"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--target", "onnxruntime"), "no kernel has --norm softmax1"),
        (("--quantize", "int8"), "--quantize"),
        ((), "--untrained-norm"),
    ],
)
def test_what_it_cannot_have_is_a_sentence(softmax1, checkpoint, sharp_export, tmp_path, options, says):
    allowed = ("--untrained-norm",) if options else ()
    result = sharp_export(checkpoint("softmax"), "--norm", "softmax1", *allowed, *options, "-o", tmp_path / "model")
    assert (result.exit_code, says in " ".join(result.output.split())) == (2, True), result.output


def test_it_trains_in_chunks_as_by_autograd(softmax1):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 12, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    plain = softmax1.weights((query @ key.mT * 8**-0.5).masked_fill(~visible, 0.0), visible) @ value
    chunked = normalized_attention(query, key, value, norm="softmax1", causal=True)
    torch.testing.assert_close(chunked, plain)
    target = torch.randn_like(plain)
    for found, expected in zip(
        torch.autograd.grad((chunked * target).sum(), (query, key, value)),
        torch.autograd.grad((plain * target).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_sinks_of_a_model_are_refused(softmax1):
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(InputError, match="sinks"):
        normalized_attention(query, query, query, norm="softmax1", sinks=torch.zeros(2))
