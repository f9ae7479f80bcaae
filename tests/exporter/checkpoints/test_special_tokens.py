"""Special tokens and tokenizers of checkpoints are checked against the vocabulary of the model."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.programs.tokenizers import read_tokenizer
from tests.exporter.tiny_hugging_face import save, tiny


@pytest.mark.parametrize("facts", [{"eos_token_id": [2, 90]}, {"eos_token_id": -1}, {"bos_token_id": 10**9}], ids=str)
def test_special_tokens_that_the_model_has_not_are_refused(sharp_export, tmp_path, facts):
    folder = save(tiny("llama"), tmp_path / "tiny")
    for file in ("config.json", "generation_config.json"):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | facts))
    result = sharp_export(folder, "--norm", "softmax", "--dry-run")
    assert result.exit_code == 2, result.output
    assert "but the model has tokens 0 to 89; correct it" in " ".join(result.stderr.split())


def test_the_default_of_gpt_2_is_no_token_of_a_small_vocabulary(tmp_path):
    model = tiny("gpt2", eos_token_id=50256, bos_token_id=50256)
    model.generation_config = GenerationConfig(eos_token_id=50256)
    config = read_source(save(model, tmp_path / "tiny"), "softmax").model.config
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def letters(folder, tokens, added=()):
    """Save a tokenizer with `tokens` letters and the tokens `added`, in the form of transformers; return the folder."""
    tokenizer = Tokenizer(
        models.WordLevel({chr(0x100 + number): number for number in range(tokens)}, unk_token=chr(0x100))
    )
    tokenizer.add_tokens(list(added))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_added_tokens_beyond_the_model_are_said_and_others_are_refused(sharp_export, tmp_path):
    folder = letters(save(tiny("llama"), tmp_path / "tiny"), 90, ["<image>"])
    result = sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said = "tokens beyond the 90 of the model, which are never generated and refused in prompts: <image> (90)"
    assert said in " ".join(result.stderr.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tokens_beyond_the_model"] == {"90": "<image>"}
    result = sharp_export(letters(folder, 91), "--norm", "softmax", "--dry-run")
    assert result.exit_code == 2
    assert "the tokenizer of tiny has 91 tokens, but the model has 90" in " ".join(result.stderr.split())


def test_a_model_without_a_tokenizer_gets_one(sharp_export, tmp_path):
    folder, given = save(tiny("llama"), tmp_path / "tiny"), letters(tmp_path / "given", 80)
    result = sharp_export(folder, "--norm", "softmax", "--dry-run")
    assert "tiny has no tokenizer, so it is served by token ids only; --tokenizer FOLDER" in result.stderr
    result = sharp_export(folder, "--norm", "softmax", "--tokenizer", given, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "no tokenizer" not in result.stderr
    tokens = read_manifest(tmp_path / "out").tokenizer
    assert (tokens.file, tokens.bos_token_id, tokens.eos_token_ids) == ("tokenizer.json", 1, (2,))
    letters(folder, 80)
    result = sharp_export(folder, "--norm", "softmax", "--tokenizer", given, "--dry-run")
    assert "--tokenizer is for models that have none" in result.stderr


def test_a_given_tokenizer_at_which_the_library_panics_is_refused_with_a_sentence(tmp_path, capfd):
    file = letters(tmp_path, 80) / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer file: .*"):
        read_tokenizer(str(tmp_path), 90)
    assert not capfd.readouterr().err
