"""Checkpoints of version 1 still compute the logits that they had when they were saved.

`version1/` has decoders of one layer, saved by commit 2598803, and their logits after the last of tokens 0 to 11.
"""

import json
from pathlib import Path

import pytest
import torch

from sharp.core.errors import InputError
from sharp.models.adapted_model import read_adapted_norm
from sharp.models.checkpoint import load_checkpoint, save_checkpoint
from sharp.models.hugging_face import HuggingFaceConfig

SAVED = Path(__file__).parent / "version1"
LOGITS = json.loads((SAVED / "logits.json").read_text())


@pytest.mark.parametrize("norm", LOGITS)
def test_they_compute_what_they_did(norm, tmp_path):
    model = load_checkpoint(SAVED / f"{norm}.safetensors")
    assert model.config.norm == ("ssmax-bias" if norm == "ssmax" else norm)
    save_checkpoint(tmp_path / "again.safetensors", model)
    for loaded in (model, load_checkpoint(tmp_path / "again.safetensors")):
        with torch.no_grad():
            logits = loaded(torch.arange(12)[None])[0, -1]
        torch.testing.assert_close(logits, torch.tensor(LOGITS[norm]), atol=2e-5, rtol=0)


def test_a_folder_for_transformers_is_told_to_be_saved_again():
    with pytest.raises(InputError, match=r"earlier Sharp, whose ssmax had other parameters; read it with"):
        _ = HuggingFaceConfig(sharp={"version": 1, "config": {"norm": "ssmax"}}).sharp_config


def test_an_adapted_model_is_told_to_be_adapted_again():
    content = {"norm": "sentmax", "attention_modules": ["a"], "q_heads": 2, "hidden_size": 4, "trained_context": 8}
    with pytest.raises(InputError, match=r"norm sentmax of version 1.* adapt its base model again"):
        read_adapted_norm(content)
    assert read_adapted_norm({**content, "norm": "entmax"}).norm == "entmax"
