"""`sharp inspect` on models of sets and of numbers, which read no text."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from sharp.core.cli import main
from sharp.exporter.inspection.attention_map import attention_map
from sharp.exporter.inspection.heads import head_statistics
from sharp.exporter.inspection.inspection import open_model
from sharp.exporter.inspection.prompt import random_numbers
from sharp.models.attention import EagerAttention
from sharp.plugins.op.torch_normalizers import entropy
from tests.marks import full
from tests.tensor_models import export_tensor_model, numbers_model, set_model

COUNT = 30


@pytest.fixture
def sharp_inspect(tmp_path):
    def run(*arguments):
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(main, ["inspect", *words, "-o", str(tmp_path / "out")], prog_name="sharp")

    return run


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that exports a model to a folder, with its checkpoint beside it, once per model."""
    made = {}

    def make(model):
        key = type(model), model.config.norm
        if key not in made:
            made[key] = export_tensor_model(tmp_path_factory.mktemp("model"), model)
        return made[key]

    return make


def records_of(folder, model):
    """Return random inputs, and their records from the folder and from its checkpoint."""
    inputs = random_numbers(11 if hasattr(model.config, "classes") else 0, COUNT)
    checkpoint = folder.with_name("checkpoint.safetensors")
    return inputs, open_model(folder).record(inputs), open_model(checkpoint).record(inputs)


@pytest.mark.parametrize(
    "norm", ["asentmax", *(full(norm) for norm in ("softmax", "ssa", "adaptive-temperature", "sentmax"))]
)
def test_a_set_is_shown_for_its_first_items(folder_of, norm):
    model = set_model(norm)
    items, from_folder, from_checkpoint = records_of(folder_of(model), model)
    for (record,) in (from_folder, from_checkpoint):
        found = attention_map(record, 0, 0)
        statistics = head_statistics((record,), "set")
        for count in (1, 2, 17, COUNT):
            with torch.no_grad():
                weights, _ = model.attention(torch.from_numpy(items[None, :count]), torch.full((1, 1), 0.5))
            np.testing.assert_allclose(found.weights[count - 1, :count], weights[0], atol=1e-5)
            assert statistics.entropy[0, 0, count - 1] == pytest.approx(entropy(weights)[0].item(), abs=1e-4)
    has_scale = model.query_scale is not None
    assert (from_checkpoint[0].length_scale is not None, from_folder[0].length_scale) == (has_scale, None)


@pytest.mark.parametrize("norm", ["softmax", full("asentmax"), full("ssa")])
def test_numbers_are_shown_as_tokens_are(folder_of, norm):
    model = numbers_model(norm)
    numbers, from_folder, from_checkpoint = records_of(folder_of(model), model)
    eager = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model(torch.from_numpy(numbers[None]), eager)
    for records in (from_folder, from_checkpoint):
        statistics = head_statistics(records, "numbers")
        assert statistics.bound is not None
        for layer, weights in enumerate(eager.weights):
            np.testing.assert_allclose(statistics.entropy[layer], entropy(weights)[0], atol=1e-4)
            np.testing.assert_allclose(attention_map(records[layer], layer, 1).weights, weights[0, 1], atol=1e-5)


def test_the_command_reads_random_numbers_or_a_file(folder_of, sharp_inspect, tmp_path):
    folder = folder_of(set_model("asentmax"))
    result = sharp_inspect(folder, "--max-tokens", 20)
    assert result.exit_code == 0, result.output
    assert "20 items: random ones" in result.output
    assert "A set has one query." in (tmp_path / "out" / "index.html").read_text()
    (tmp_path / "set.json").write_text(json.dumps(random_numbers(11, 7).tolist()))
    result = sharp_inspect(folder.with_name("checkpoint.safetensors"), "--numbers", tmp_path / "set.json")
    assert (result.exit_code, "7 items: " in result.output) == (0, True), result.output
    (tmp_path / "numbers.json").write_text("[1, 2.5, -3]")
    result = sharp_inspect(folder_of(numbers_model()), "--numbers", tmp_path / "numbers.json")
    assert (result.exit_code, "3 numbers: " in result.output) == (0, True), result.output


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1, 2", "cannot be read as JSON"),
        ("7", "must be a list of items, each a list of 11 numbers"),
        ("[1, 2]", "must be a list of items, each a list of 11 numbers"),
        ("[[1, 2], [3]]", "cannot be read as JSON"),
        ('[["a"]]', "cannot be read as JSON"),
        ("{}", "cannot be read as JSON"),
        (json.dumps([[float("nan")] * 11] * 3), "all finite"),
        (json.dumps([[1] * 11]), "has 1 items; it must have 2 to"),
        (None, "does not exist"),
    ],
)
def test_a_file_with_something_else_is_refused(folder_of, sharp_inspect, tmp_path, content, sentence):
    file = tmp_path / "numbers.json"
    if content is not None:
        file.write_text(content)
    result = sharp_inspect(folder_of(set_model("asentmax")), "--numbers", file)
    assert (result.exit_code, sentence in " ".join(result.output.split())) == (2, True), result.output


def test_texts_and_numbers_are_not_confused(folder_of, sharp_inspect, checkpoint, tmp_path):
    result = sharp_inspect(folder_of(set_model("asentmax")), "--prompt", "a text")
    assert (result.exit_code, "reads items, not text" in result.output) == (2, True), result.output
    (tmp_path / "numbers.json").write_text("[1, 2]")
    result = sharp_inspect(checkpoint("softmax"), "--numbers", tmp_path / "numbers.json")
    assert (result.exit_code, "--numbers is for models of sets" in result.output) == (2, True), result.output
    result = sharp_inspect(checkpoint("softmax"), "--numbers", tmp_path / "numbers.json", "--prompt", "a")
    assert (result.exit_code, "give one of" in result.output) == (2, True), result.output


def test_a_decoder_without_a_cache_is_shown_as_its_checkpoint(checkpoint, sharp_export, tmp_path):
    path = checkpoint("ssa", "nape")
    result = sharp_export(path, "--norm", "ssa", "--cache", "none", "-o", tmp_path / "whole")
    assert result.exit_code == 0, result.output
    tokens = np.arange(40)
    one, other = (head_statistics(open_model(from_).record(tokens), "x") for from_ in (path, tmp_path / "whole"))
    for field in ("entropy", "support", "spread", "bound"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field), atol=1e-4, rtol=1e-4)
