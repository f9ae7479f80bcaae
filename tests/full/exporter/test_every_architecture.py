"""Hugging Face's architectures in every form of cache: a model folder has the logits that transformers has."""

import os

import numpy as np
import pytest
import torch

from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.architectures import ARCHITECTURES
from sharp.exporter.forms.uncached.session import UncachedSession
from tests.exporter import support_table
from tests.exporter.greedy import NEW_TOKENS, check_greedy_tokens, export
from tests.exporter.tiny_hugging_face import save, tiny

DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]
ENCODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "encoder"]
SEEN: support_table.Seen = {}


@pytest.mark.parametrize(("name", "cache"), [pair for pair in sorted(support_table.expected()) if pair[0] in DECODERS])
def test_greedy_tokens_equal_transformers(sharp_export, tmp_path, name, cache):
    manifest = check_greedy_tokens(sharp_export, tmp_path, name, cache)
    assert manifest.positions == ARCHITECTURES[name].positions
    SEEN[name, cache] = f"{NEW_TOKENS} tokens"


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_transformers(sharp_export, tmp_path, name):
    model = tiny(name)
    folder = export(sharp_export, save(model, tmp_path / name), "softmax", "none", tmp_path / "out")
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.positions) == ("encoder", ARCHITECTURES[name].positions)
    names = [port.name for port in manifest.inputs]
    assert ("token_type_ids" in names) == (name == "bert")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, model.config.vocab_size, (3, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    inputs = {"input_ids": torch.where(mask.bool(), tokens, model.config.pad_token_id), "attention_mask": mask}
    if name == "bert":
        inputs["token_type_ids"] = torch.randint(2, (3, 9), generator=generator)
    with torch.no_grad():
        target = model(**inputs).logits[mask.bool()]
    fed = [inputs[port].numpy() for port in names if port in inputs]
    found = UncachedSession(folder, kernels=True).run(fed)[mask.bool().numpy()]
    assert np.abs(found - target.numpy()).max() < 1e-4 * target.abs().max()
    SEEN[name, "none"] = "logits"


def test_readme_says_what_was_just_seen():
    if SEEN.keys() != support_table.expected():
        pytest.skip("not every architecture was tested in this run")
    table = support_table.table(SEEN)
    if os.environ.get("SHARP_UPDATE_TABLE"):
        support_table.write(table)
    assert support_table.written() == table
