"""Special tokens and tokenizers are checked against a model's vocabulary."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.core.vocabulary import beyond_sentence, check_embeddings, check_special_tokens, tokens_beyond
from tests.serving.conftest import write_folder


@pytest.mark.parametrize(
    "tokens",
    [{"eos_token_ids": [10**9]}, {"eos_token_ids": [256, 257]}, {"bos_token_id": 257}, {"bos_token_id": -1}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["decoder", "encoder", "set", "numbers", "module"])
def test_a_folder_whose_special_tokens_are_not_the_models_is_refused(tmp_path: Path, tokens: dict, kind: str) -> None:
    folder = write_folder(tmp_path / "model", hashing=0)
    manifest = json.loads((folder / "sharp.json").read_text())
    manifest["kind"] = kind
    manifest["tokenizer"] |= tokens
    (folder / "sharp.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"sharp\.json is not a valid manifest: .*token") as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)


def test_the_last_token_is_one_of_the_models() -> None:
    check_special_tokens("it", 257, 0, (256,))
    with pytest.raises(InputError, match=r"^it: bos_token_id has the token 257, but the model has tokens 0 to 256"):
        check_special_tokens("it", 257, 257, ())


def test_a_model_reads_all_that_it_generates() -> None:
    check_embeddings("it", 257, 320)
    with pytest.raises(InputError, match=r"^it has logits for 257 tokens and embeddings for 256"):
        check_embeddings("it", 257, 256)


def test_added_tokens_may_be_beyond_the_model_and_others_may_not() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.add_tokens([AddedToken("<image>", special=True), "<video>"])
    assert tokens_beyond("it", tokenizer, 5) == {}
    assert tokens_beyond("it", tokenizer, 4) == {4: "<video>"}
    assert tokens_beyond("it", tokenizer, 3) == {3: "<image>", 4: "<video>"}
    assert "<image> (3), <video> (4)" in beyond_sentence(tokens_beyond("it", tokenizer, 3), 3)
    with pytest.raises(InputError, match=r"^it has 3 tokens, but the model has 2; give the tokenizer"):
        tokens_beyond("it", tokenizer, 2)
