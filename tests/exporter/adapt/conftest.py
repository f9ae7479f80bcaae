"""A tiny model to adapt, and a text to train it on."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from sharp.models.byte_tokenizer import byte_tokenizer
from tests.exporter.tiny_hugging_face import tiny

TEXT = "".join(f"{number} green bottles hang on the wall, number {number * 7}.\n\n" for number in range(1500))


@pytest.fixture
def teacher(tmp_path: Path):
    def make(model_type: str = "llama", **changes: object) -> Path:
        folder = tmp_path / f"teacher-{model_type}"
        tiny(model_type, **{"vocab_size": 300, **changes}).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "bottles.txt"
    path.write_text(TEXT)
    return path
