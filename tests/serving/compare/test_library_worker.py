"""The other program runs in its own process and reads Hugging Face folders."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from sharp.serving.compare.library_worker import GgufModel, HuggingFaceModel
from tests.exporter.tiny_hugging_face import save, tiny


def test_tokens_are_those_of_the_folders_file_whatever_class_its_settings_name(tmp_path: Path) -> None:
    folder = save(tiny("llama", vocab_size=300), tmp_path / "saved")
    letters = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    stored = Tokenizer(models.BPE(letters | {"12": 256, "123": 257}, [("1", "2"), ("12", "3")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    stored.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    stored.decoder = decoders.ByteLevel()
    stored.add_special_tokens(["<s>", "</s>"])
    stored.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    stored.enable_truncation(2)
    stored.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | special))
    other = HuggingFaceModel(str(folder), 64, trust_remote_code=False)
    stored.no_truncation()
    for text in ("", "a 123 b", "12345 he'll", "</s>1"):
        assert other.tokens(text) == stored.encode(text).ids
    assert (other.declared, other.allowed) == ([2], [2, 259])


def test_llama_cpp_takes_yarn_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package llama-cpp-python has YaRN's usual betas as defaults, which replace those of a Ministral 3's file."""
    given: dict[str, Any] = {}

    def opened(_path: str, **options: Any) -> None:
        given.update(options)
        raise ValueError("enough")

    library = SimpleNamespace(llama_log_callback=id, llama_log_set=lambda *_: None, Llama=opened)
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    with pytest.raises(ValueError, match="enough"):
        GgufModel("model.gguf", 64, trust_remote_code=False)
    assert given["yarn_beta_fast"] < 0 and given["yarn_beta_slow"] < 0 and given["yarn_attn_factor"] < 0
