"""The texts that `sharp adapt` trains on and measures with."""

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.exporter.adapt.text import read_text
from sharp.models.byte_tokenizer import byte_tokenizer


def test_json_lines_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} bottles\u2028hang\x85"}, ensure_ascii=False) for number in range(40)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    text = read_text((path,), tokenizer, 300, 8, "a smaller --length")
    assert "39 bottles\u2028hang" in tokenizer.decode(torch.cat([text.train, text.held_out]))
    path.write_text(lines[0] + "\n{}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2, is no JSON object with an entry 'text'"):
        read_text((path,), tokenizer, 300, 8, "a smaller --length")


def test_parquet_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path, wrong = tmp_path / "text[1].parquet", tmp_path / "wrong.parquet"
    lines = [f"{number} bottles" for number in range(40)]
    datasets.Dataset.from_dict({"text": [None, *lines], "number": list(range(41))}).to_parquet(path)
    datasets.Dataset.from_dict({"line": lines}).to_parquet(wrong)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    text = read_text((path,), tokenizer, 300, 8, "a smaller --length")
    found = tokenizer.decode(torch.cat([text.train, text.held_out]))
    assert all(line in found for line in lines) and "None" not in found
    with pytest.raises(InputError, match="has no column 'text'"):
        read_text((wrong,), tokenizer, 300, 8, "a smaller --length")
    wrong.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        read_text((wrong,), tokenizer, 300, 8, "a smaller --length")
