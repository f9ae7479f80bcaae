"""`expected_entropy` of `sharp.json` agrees with the attention weights that transformers returns."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import MistralConfig, MistralForCausalLM

from sharp.core.errors import InputError
from sharp.core.manifest import MANIFEST_FILE, read_manifest
from sharp.exporter.cli import export

WINDOW = 40  # the window of one layer, shorter than the longest context


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a Mistral with a sliding window, and the manifest of its export."""
    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=90,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=160,
        sliding_window=WINDOW,
        initializer_range=0.3,
    )
    model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder / "source")
    result = CliRunner().invoke(
        export, [str(folder / "source"), "--norm", "softmax", "-o", str(folder / "out")], prog_name="sharp-export"
    )
    assert result.exit_code == 0, result.output
    return model, read_manifest(folder / "out"), folder / "out"


def test_it_is_what_transformers_attends_with(exported):
    model, manifest, _ = exported
    found = manifest.expected_entropy
    assert (found.text, found.contexts, found.tokens) == ("random tokens", (64, 128, 256), (32, 64, 32))
    tokens = torch.randint(90, (1024,), generator=torch.Generator().manual_seed(0))[:160]
    with torch.no_grad():
        attentions = model(tokens[None], output_attentions=True).attentions
    context = np.arange(1, 161)
    for layer, weights in enumerate(attentions):
        rows = weights[0].double().numpy()  # [heads, queries, keys]
        entropy = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1)
        normalized = entropy / np.log(np.minimum(context, WINDOW).clip(2))
        for index, bound in enumerate(found.contexts):
            chosen = (context > bound // 2) & (context <= bound)
            means = [head[index] for head in found.normalized_entropy[layer]]
            assert means == pytest.approx(normalized[:, chosen].mean(1), abs=1e-4)


@pytest.mark.parametrize("damage", ["layer", "head", "range"])
def test_another_shape_than_the_models_is_refused(exported, damage):
    _, manifest, folder = exported
    expected = manifest.expected_entropy
    table = expected.normalized_entropy
    damaged = {
        "layer": table[:1],
        "head": (table[0][:5], table[1]),
        "range": ((table[0][0][:2], *table[0][1:]), table[1]),
    }[damage]
    path = folder / MANIFEST_FILE
    whole = path.read_text()
    try:
        changed = expected.model_copy(update={"normalized_entropy": damaged})
        path.write_text(manifest.model_copy(update={"expected_entropy": changed}).model_dump_json())
        with pytest.raises(InputError, match="2 layers, 6 heads and 3 ranges"):
            read_manifest(folder)
    finally:
        path.write_text(whole)
