"""`sharp fit-temperature` reads a Hugging Face model and windows of a text, and an export takes the polynomial."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.temperature.cli import fit_temperature
from sharp.exporter.temperature.texts import find_texts
from sharp.models.attention import EagerAttention
from sharp.models.byte_tokenizer import byte_tokenizer
from sharp.models.temperature_fit import EntropyRecorder, at_temperature
from tests.exporter.tiny_hugging_face import save, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(tiny("gemma2", vocab_size=257), tmp_path_factory.mktemp("gemma2") / "model")
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return folder


def test_a_temperature_divides_the_logits_of_every_layer(folder):
    model, _ = find_texts(folder, "16", None)
    tokens = torch.arange(5, 25)[None]
    decoder = read_source(folder, "softmax").model
    positions = torch.arange(20)[None]
    plain = decoder.logits(decoder.hidden_states(tokens, positions, EagerAttention(model.config)))
    torch.testing.assert_close(model(tokens, attention=at_temperature(model.config, 1.0)), plain)
    sharp = model(tokens, attention=at_temperature(model.config, 0.2))
    assert (sharp - plain).abs().max() > 1e-3
    recorder = EntropyRecorder(model.config)
    torch.testing.assert_close(model(tokens, attention=recorder), plain)
    assert [entropy.shape for entropy in recorder.entropies] == [(1, model.config.q_heads, 20)] * model.config.layers


def test_from_a_folder_to_an_export(folder, tmp_path, sharp_export):
    text = tmp_path / "text.txt"
    text.write_text("some words and others, " * 40)
    preset = tmp_path / "fit.json"
    options = ("--text", text, "--lengths", 24, "--samples", 3, "--entropy-threshold", 0, "--threads", 1, "-o", preset)
    result = CliRunner().invoke(fit_temperature, [str(argument) for argument in (folder, *options)])
    assert result.exit_code == 0, result.output
    found = json.loads(preset.read_text())
    assert found["data"] == "text.txt, windows of 24, 3 samples of each length, seed 0"
    assert len(found["temperature_coefficients"]) == 5 and found["entropy_range"][1] > 0
    chosen = ("--norm", "adaptive-temperature", "--untrained-norm", "--temperature-coefficients", preset)
    exported = sharp_export(folder, *chosen, "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output


@pytest.mark.parametrize(
    ("lengths", "words", "message"),
    [
        ("100000", "a " * 100, "and the context of"),
        ("64", "a b", "windows of 64 cannot be cut from text.txt"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(folder, tmp_path, lengths, words, message):
    text = tmp_path / "text.txt"
    text.write_text(words)
    with pytest.raises(InputError, match=message):
        find_texts(folder, lengths, text)


def test_an_encoder_says_no_next_token(tmp_path):
    with pytest.raises(InputError, match="is no causal language model with a tokenizer"):
        find_texts(save(tiny("bert"), tmp_path / "model"), None, None)
