"""GGUF files give the logits, tokens and ends of generation that llama.cpp gives.

llama.cpp's results are in `llama_cpp`.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from sharp.exporter.checkpoints.gguf.tokenizer import read_tokenizer
from sharp.exporter.checkpoints.hugging_face import open_model
from sharp.serving.text.chat_template import load_chat_template
from tests.exporter.checkpoints.gguf_cases import ALL_CASES, CASES, FACTORS, ROPE_CASES
from tests.exporter.checkpoints.gguf_texts import JSON, TEXTS
from tests.exporter.checkpoints.gguf_vocabularies import (
    END_CASES,
    SMOLLM2,
    byte_level,
    sentence_piece,
    write_vocabulary,
)
from tests.exporter.checkpoints.gguf_writer import Case, Tokens, logits
from tests.exporter.checkpoints.write_llama_cpp_fixtures import (
    FOLDER,
    POSITIONS,
    SENTENCE_PIECE,
    TOKENS,
    digest,
)

LOGITS = json.loads((FOLDER / "logits.json").read_text())
FOUND = json.loads((FOLDER / "tokens.json").read_text())
MOST = 1e-3  # relative to the largest logit; llama.cpp's GELU is a table of half precision
# Texts that llama.cpp splits differently from the models' own `tokenizer.json`, whose expressions Sharp uses. llama.cpp
# knows upper and lower case of ASCII only, and takes the spaces before grouped digits as a part of them.
CASED = {"naïve café Ärger ÄRGER Straße", "नमस्ते दुनिया", "สวัสดีชาวโลก", "e\u0301 n\u0303o"}
CAMEL = "CamelCaseWORDSHere snake_case kebab-case"
APPROXIMATED = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), CASED),
    "granite-embed-multi-97m": {"naïve café Ärger ÄRGER Straße"},
    "youtu": {CAMEL},
    **{name: {JSON, CAMEL} for name in ("tiny_aya", "cohere2moe")},
    "afmoe": {JSON},
}


@pytest.mark.parametrize("name", ALL_CASES)
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    model = open_model(ALL_CASES[name].write(tmp_path / "tiny.gguf")).model
    expected = np.array(LOGITS[name])
    assert np.abs(logits(model, TOKENS)[list(POSITIONS)] - expected).max() < MOST * np.abs(expected).max()


def tokenize(path: Path, texts: tuple[str, ...] = TEXTS) -> list[list[int]]:
    tokenizer = read_tokenizer(GgufFile(path)).tokenizer
    assert tokenizer is not None
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_pre_tokenizer_splits_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    """A pre-tokenizer splits all texts as llama.cpp does.

    The tokens of the vocabulary span several words, so that another split would give other tokens.
    """
    tokens = tokenize(write_vocabulary(tmp_path / "vocabulary.gguf", byte_level(FOUND["merges"], pre=name)))
    found, expected = "".join(map(digest, tokens)), FOUND["byte_level"][name]
    different = {text for at, text in enumerate(TEXTS) if found[8 * at : 8 * at + 8] != expected[8 * at : 8 * at + 8]}
    assert different == APPROXIMATED.get(name, set())


@pytest.mark.parametrize("name", ["tekken", "gpt-4o", "minimax-m2"])
def test_where_llama_cpp_approximates_a_pre_tokenizer_splits_as_in_transformers(name: str) -> None:
    theirs = Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    ours = Split(Regex(PRE_TOKENIZERS[name].expressions[0]), behavior="isolated")
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_a_file_without_a_pre_tokenizer_gets_the_default_and_a_warning(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", byte_level(FOUND["merges"]))
    assert "".join(map(digest, tokenize(path))) == FOUND["byte_level"]["default"]
    (warning,) = read_tokenizer(GgufFile(path)).warnings
    assert "tokenizer.ggml.pre" in warning


@pytest.mark.parametrize("name", SENTENCE_PIECE)
def test_sentence_piece_joins_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    tokens = sentence_piece(FOUND["pieces"], **SENTENCE_PIECE[name])
    assert tokenize(write_vocabulary(tmp_path / "vocabulary.gguf", tokens)) == FOUND["sentence_piece"][name]


def test_a_text_comes_back_from_its_tokens(tmp_path: Path) -> None:
    bytes_, pieces = byte_level(FOUND["merges"], pre="gpt-2"), sentence_piece(FOUND["pieces"], add_bos_token=False)
    for tokens in (bytes_, pieces):
        tokenizer = read_tokenizer(GgufFile(write_vocabulary(tmp_path / "vocabulary.gguf", tokens))).tokenizer
        assert tokenizer is not None
        for text in TEXTS:
            # SentencePiece's tokenizers put a space before the first word and after every special token.
            if "<" not in text and not (tokens.kind == "llama" and "  " in text):
                assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", END_CASES)
def test_the_ends_of_a_generation_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    read = read_tokenizer(GgufFile(write_vocabulary(tmp_path / "vocabulary.gguf", END_CASES[name])))
    assert sorted(read.special.ends) == FOUND["ends"][name]
    said = "vocabulary.gguf: tokenizer.ggml.eot_token_id is 1000, but its vocabulary has 28 tokens"
    assert any(said in warning for warning in read.warnings) == (name == "outside")


def test_equal_scores_whose_order_does_not_matter_are_read(tmp_path: Path) -> None:
    """The vocabularies of Llama 2 and Phi-3 have one score for runs of spaces; the numbers are llama.cpp's."""
    tokens = sentence_piece(["▁", "a", "▁▁", "▁▁▁▁", "▁▁▁"])
    changed = [*[0.0] * 259, 0.0, -1.0, -9.0, -9.0, -9.0, -1000.0, -1000.0]
    types = [*tokens.keys["token_type"][:-1], 5]  # unused: the last token, two spaces
    keys = {**tokens.keys, "scores": changed, "token_type": types}
    file = write_vocabulary(tmp_path / "vocabulary.gguf", replace(tokens, keys=keys))
    tokenizer = read_tokenizer(GgufFile(file)).tokenizer
    assert tokenizer is not None
    assert tokenizer("      a")["input_ids"] == [1, 262, 263, 260]
    assert tokenizer("         a")["input_ids"] == [1, 262, 262, 261, 260]


@pytest.mark.parametrize(
    ("pieces", "scores", "said"),
    [
        (["▁", "a", "ab"], [0.0, -1.0, -2.0], "'ab' is made of 'b', which is no token"),
        (["▁", "a", "b", "ab", "ba"], [0.0, -1.0, -2.0, -3.0, -3.0], "has -3 for 'ba' and another token"),
        (["▁", "▁▁", "▁▁▁"], [0.0, -3.0, -3.0], "has -3 for '▁▁▁' and another token"),
    ],
    ids=["a part is missing", "equal scores", "runs with equal scores"],
)
def test_pieces_that_llama_cpp_joins_by_other_rules_are_refused(
    tmp_path: Path, pieces: list[str], scores: list[float], said: str
) -> None:
    tokens = sentence_piece(pieces)
    changed = [*[0.0] * 259, *scores, -1000.0, -1000.0]
    file = write_vocabulary(tmp_path / "vocabulary.gguf", replace(tokens, keys={**tokens.keys, "scores": changed}))
    with pytest.raises(InputError, match=said):
        read_tokenizer(GgufFile(file))


def test_the_tokens_of_smollm2_are_those_of_llama_cpp() -> None:
    """SmolLM2, the model of the demonstration, has a pre-tokenizer that splits digits."""
    opened = read_tokenizer(GgufFile(SMOLLM2))
    assert opened.tokenizer is not None
    assert [opened.tokenizer(text)["input_ids"] for text in TEXTS] == FOUND["smollm2"]
    assert sorted(opened.special.ends) == FOUND["ends"]["smollm2"]


def vocabulary(**keys: Any) -> Tokens:
    """Return a vocabulary of 90 tokens, the number of embeddings of the tiny models."""
    texts = [*(chr(33 + letter) for letter in range(85)), "ab", "<|im_end|>", "<s>", "</s>", "Ċ"]
    types = [1] * 86 + [3, 3, 3, 1]
    flags = {"merges": ["a b"], "token_type": types, "pre": "gpt-2", "bos_token_id": 87, "eos_token_id": 88}
    return Tokens("gpt2", texts, {**flags, **keys})


def export(sharp_export: Any, path: Path, *arguments: object) -> tuple[int, str]:
    result = sharp_export(path, "--norm", "softmax", "-o", path.with_suffix(""), *arguments)
    return result.exit_code, " ".join(result.output.split())


def test_an_export_ends_at_every_end_and_samples_as_the_file_says(sharp_export, tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_p": 0.95, "general.sampling.top_k": 20}
    templates = {"tokenizer.chat_template": "{{ 'plain' }}", "tokenizer.chat_template.tool_use": "{{ 'tools' }}"}
    tokens = vocabulary(eot_token_id=5, eom_token_id=6, **sampling, **templates)
    code, output = export(sharp_export, CASES["llama"].write(tmp_path / "tiny.gguf", tokens))
    assert code == 0, output
    manifest = json.loads((tmp_path / "tiny" / "sharp.json").read_text())
    ends = manifest["tokenizer"]["eos_token_ids"]
    assert ends[0] == 88 and set(ends) == {88, 5, 6, 86}
    assert {name: value for name, value in manifest["sampling"].items() if value is not None} == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    template = load_chat_template(tmp_path / "tiny")
    assert template is not None and template.render([{"role": "user", "content": "a"}]) == "plain"
    assert load_chat_template(tmp_path / "tiny", "tool_use") is not None


REFUSALS = {
    "longrope": (
        replace(
            ROPE_CASES["phi3-longrope"],
            keys={**ROPE_CASES["phi3-longrope"].keys, "rope.scaling.original_context_length": 64},
        ),
        {},
        "gguf-set-metadata",
    ),
    "another scaling": (Case("llama", "llama", {}, {"rope.scaling.type": "dynamic"}), {}, "llama.rope.scaling.type"),
    "part of a head": (Case("llama", "llama", {}, {"rope.dimension_count": 4}), {}, "llama.rope.dimension_count"),
    "scale of attention": (Case("llama", "llama", {}, {"attention.scale": 0.5}), {}, "'llama.attention.scale'"),
    "a base of windows": (
        replace(CASES["gemma2"], keys={**CASES["gemma2"].keys, "rope.freq_base_swa": 500.0}),
        {},
        "gemma2.rope.freq_base_swa",
    ),
    "soft cap": (Case("qwen3", "qwen3", {}, {**CASES["qwen3"].keys, "attn_logit_softcapping": 5.0}), {}, "softcapping"),
    "factors that nobody reads": (
        replace(CASES["qwen2"], tensors={"rope_freqs.weight": FACTORS}),
        {},
        "'rope_freqs.weight'",
    ),
    "bias without a place": (
        replace(CASES["qwen3"], tensors={"output.bias": np.ones(90, np.float32)}),
        {},
        "'output.bias'",
    ),
    "encoder": (Case("llama", "llama", {}, {"attention.causal": False}), {}, "llama.attention.causal"),
    "pre-tokenizer": (CASES["llama"], {"pre": "superbpe"}, "'superbpe'"),
    "unknown pre-tokenizer": (CASES["llama"], {"pre": "of-tomorrow"}, "'of-tomorrow'"),
    "suppressed tokens": (CASES["llama"], {"suppress_tokens": [3]}, "tokenizer.ggml.suppress_tokens"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_honoured_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    case, keys, said = REFUSALS[name]
    path = case.write(tmp_path / "tiny.gguf", vocabulary(**keys))
    with pytest.raises(InputError, match=re.escape(said)):
        open_model(path)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "gemma4", "whitespace"])
def test_a_tokenizer_of_another_kind_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    path = CASES["llama"].write(tmp_path / "tiny.gguf", replace(vocabulary(), kind=kind))
    with pytest.raises(InputError, match=f"tokenizer.ggml.model is '{kind}'"):
        open_model(path)


def test_a_key_that_the_user_names_is_ignored(tmp_path: Path) -> None:
    case = Case("llama", "llama", {}, {"attention.scale": 0.5, "my_note": 1})
    path = case.write(tmp_path / "tiny.gguf", vocabulary())
    opened = open_model(path, ignore=["llama.attention.scale"])
    (keys, tensors) = opened.unused
    assert (keys.ignored, keys.unknown) == (("llama.attention.scale",), ("llama.my_note",))
    assert not tensors.unknown


def test_a_file_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    tokens = vocabulary()
    more = replace(tokens, texts=[*tokens.texts, "cd"], keys={**tokens.keys, "token_type": [1] * 91})
    with pytest.raises(InputError, match="91 tokens, but embeddings of 90 only"):
        open_model(CASES["llama"].write(tmp_path / "tiny.gguf", more))
