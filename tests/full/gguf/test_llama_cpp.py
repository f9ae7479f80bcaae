"""Sharp's reader of GGUF agrees with llama.cpp, its converter and the vocabularies of its tests (`make foreign`)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.checkpoints.gguf.tokenizer import read_tokenizer
from sharp.exporter.checkpoints.hugging_face import open_model
from sharp.serving.compare.library_worker import GgufModel
from tests.exporter.checkpoints.gguf_cases import ALL_CASES, CASES, LENGTH
from tests.exporter.checkpoints.gguf_texts import TEXTS
from tests.exporter.checkpoints.gguf_vocabularies import SMOLLM2, byte_level
from tests.exporter.checkpoints.gguf_writer import Case, logits
from tests.full.gguf.second_opinion import BUILT, FOLDER, run

pytestmark = pytest.mark.skipif(not BUILT, reason="make foreign compiles llama.cpp")
MOST = 1e-3
# llama.cpp reads GELU from a table in half precision, which at some positions changes a logit by more than 0.001.
MOST_OF_GELU = 3e-3
GELU = ("gemma", "gemma2", "gemma3", "gpt2", "starcoder2", "rope-gemma3-linear")
TOKENS = np.random.default_rng(1).integers(0, 90, LENGTH).tolist()
VOCABULARIES = sorted((FOLDER / "models").glob("ggml-vocab-*.gguf"))
SEPARATOR = "\n__ggml_vocab_test__\n"  # between the texts of llama.cpp's own tests


def difference(path: Path, model: PreTrainedModel, tokens: list[int]) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    (result,) = run([path], tokens=tokens)
    expected = np.array(result["logits"])
    return float(np.abs(logits(model, tokens) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", ALL_CASES)
def test_all_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = ALL_CASES[name].write(tmp_path / "tiny.gguf")
    assert difference(path, open_model(path).model, TOKENS) < (MOST_OF_GELU if name in GELU else MOST)


# The converter recognizes a vocabulary by a digest of its tokens, so a conversion of SmolLM2's tokenizer also proves
# that Sharp reads the tokenizer correctly.
CONVERTED = ("llama", "mixtral", "qwen2moe", "qwen3", "qwen3moe", "starcoder2", "granite", "smollm3")


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_of_llama_cpps_converter(name: str, tmp_path: Path) -> None:
    """Sharp loads a tiny model that llama.cpp converted, with the logits of the original and of llama.cpp."""
    case: Case = CASES[name]
    tokenizer = read_tokenizer(GgufFile(SMOLLM2)).tokenizer
    assert tokenizer is not None
    model = Case(case.architecture, case.model_type, {**case.changes, "vocab_size": len(tokenizer)}).model()
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    path = tmp_path / "converted.gguf"
    command = [
        sys.executable,
        FOLDER / "convert_hf_to_gguf.py",
        tmp_path / "folder",
        "--outfile",
        path,
        "--outtype",
        "f32",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{FOLDER / 'gguf-py'}:{FOLDER}"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    opened = open_model(path)
    tokens = np.random.default_rng(2).integers(100, 49000, LENGTH).tolist()
    assert np.abs(logits(opened.model, tokens) - logits(model, tokens)).max() < 1e-5
    assert difference(path, opened.model, tokens) < (MOST_OF_GELU if name in GELU else MOST)
    assert opened.tokenizer is not None
    assert [opened.tokenizer(text)["input_ids"] for text in TEXTS] == run([path], texts=TEXTS)[0]["tokens"]


def test_smollm2(tmp_path: Path) -> None:
    """Sharp's tokens and logits of SmolLM2 agree with llama.cpp's.

    llama.cpp rounds activations to 8 bits beside weights of 4 bits, so it dequantizes the file first.
    """
    opened = open_model(SMOLLM2)
    (result,) = run([SMOLLM2], texts=TEXTS)
    assert opened.tokenizer is not None
    assert [opened.tokenizer(text)["input_ids"] for text in TEXTS] == result["tokens"]
    run([SMOLLM2], float32=str(tmp_path / "smollm2.gguf"))
    prompt = opened.tokenizer("A long, long time ago, in 1999:")["input_ids"]
    assert difference(tmp_path / "smollm2.gguf", opened.model, prompt) < MOST


def test_compare_knows_the_precision_of_a_file_that_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sharp compare` allowed a float32 file without `general.file_type` the differences of 8 bits."""
    monkeypatch.syspath_prepend(str(FOLDER))
    tokens = byte_level(["h e"])
    path = Case("llama", "llama", {"vocab_size": len(tokens.texts)}).write(tmp_path / "tiny.gguf", tokens)
    assert GgufModel(str(path), 64, trust_remote_code=False).precision == "float32"


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_tokens_of_published_vocabularies(path: Path) -> None:
    """Sharp's tokens of the texts in llama.cpp's tests are Hugging Face's tokens, which the tests list."""
    file = GgufFile(path)
    if file.text("tokenizer.ggml.model") not in ("gpt2", "llama"):
        with pytest.raises(InputError, match=r"tokenizer\.ggml\.model"):
            read_tokenizer(file)
        return
    read = read_tokenizer(file)
    assert read.tokenizer is not None
    texts = path.with_suffix(".gguf.inp")
    if texts.is_file():
        lines = path.with_suffix(".gguf.out").read_text().split("\n")
        for text, line in zip(texts.read_text(encoding="utf-8").split(SEPARATOR), lines, strict=True):
            assert read.tokenizer(text, add_special_tokens=False)["input_ids"] == [int(token) for token in line.split()]
    (result,) = run([path], texts=[text for text in TEXTS if "<" not in text])
    assert sorted(read.special.ends) == result["ends"]
    assert [read.tokenizer(text)["input_ids"] for text in TEXTS if "<" not in text] == result["tokens"]
