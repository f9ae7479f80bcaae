"""Norm fixed-temperature: softmax over logits divided by one constant."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sharp.core.errors import InputError
from sharp.models import train
from sharp.models.attention import EagerAttention, LayerOptions
from sharp.models.checkpoint import read_checkpoint, save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.tasks.largest_item import LargestItem

GOLDEN = json.loads((Path(__file__).parents[1] / "plugins" / "conformance" / "normalizers.json").read_text())["rows"]
ROWS = [row for row in GOLDEN if row["normalizer"] == "softmax"]


def one_head(temperature: float) -> SharpConfig:
    return SharpConfig(
        vocab_size=2,
        hidden_size=1,
        intermediate_size=1,
        layers=1,
        q_heads=1,
        kv_heads=1,
        head_dim=1,
        norm="fixed-temperature",
        positions="none",
        temperature=temperature,
        causal=False,
    )


def weights_over(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the attention weights of one query over keys whose products with it are `logits`, all float64."""
    attention = EagerAttention(one_head(temperature), record=True)
    keys = logits.view(1, -1, 1, 1)
    attention(0, torch.ones_like(keys[:, :1]), keys, keys, None, None)
    return attention.weights[0].flatten()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(len(row["logits"])))
def test_logits_times_the_temperature_give_the_golden_softmax(row, temperature):
    logits = torch.tensor(row["logits"], dtype=torch.float64) * temperature
    expected = torch.tensor(row["weights"])
    torch.testing.assert_close(weights_over(logits, temperature), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_a_fixed_temperature_divides_a_scale_of_the_layers_own(temperature):
    config = one_head(temperature)
    assert LayerOptions(scale=3.0).scale_of(config) == 3.0 / temperature
    assert LayerOptions().scale_of(config) == 1.0 / temperature


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_a_fixed_temperature_divides_logits_that_were_capped(temperature):
    """The logits are c tanh(s z / c) / T: the cap comes before the temperature."""
    products = torch.tensor([-40.0, -3.0, 0.0, 0.5, 3.0, 40.0])
    logits = LayerOptions(scale=2.0, softcap=5.0).logits_of(products, one_head(temperature))
    torch.testing.assert_close(logits, 5.0 * torch.tanh(2.0 * products / 5.0) / temperature)


def test_a_softcap_of_zero_caps_nothing():
    products = torch.tensor([-4000.0, 4000.0])
    torch.testing.assert_close(LayerOptions(scale=0.5).logits_of(products, one_head(1.0)), products / 2)


def test_max_retrieval_divides_its_logits_by_the_temperature():
    torch.manual_seed(0)
    plain = MaxRetrieval(MaxRetrievalConfig()).eval()
    cold = MaxRetrieval(MaxRetrievalConfig(norm="fixed-temperature", temperature=0.1)).eval()
    cold.load_state_dict(plain.state_dict())
    items, query = LargestItem().sample(4, 30, torch.Generator().manual_seed(0)).inputs
    logits, _ = plain.attention_logits(items, query)
    torch.testing.assert_close(cold.attention(items, query)[0], torch.softmax(10 * logits, -1))


def test_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, 4, 1, 1, generator=generator, dtype=torch.float64) for _ in range(3)]
    query, key, value = (tensor.requires_grad_() for tensor in tensors)

    def function(query, key, value):
        return EagerAttention(one_head(0.7))(0, query, key, value, None, None)

    # The logits are rounded to float32, so the steps of the finite differences must be large.
    assert torch.autograd.gradcheck(function, (query, key, value), eps=1e-3, atol=1e-3)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_temperature_is_kept_in_the_checkpoint(tmp_path, suffix):
    model = MaxRetrieval(MaxRetrievalConfig(norm="fixed-temperature", temperature=0.25))
    save_checkpoint(tmp_path / f"cold{suffix}", model)
    assert read_checkpoint(tmp_path / f"cold{suffix}").model.config.temperature == 0.25


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_cannot_work_are_refused(temperature):
    with pytest.raises(InputError, match=r"temperature is .*, but must be above 0"):
        one_head(temperature)
    with pytest.raises(InputError, match=r"temperature is .*, but must be above 0"):
        MaxRetrievalConfig(norm="fixed-temperature", temperature=temperature)


def test_other_norms_ignore_it():
    config = one_head(0.5)
    assert config.scale == 2.0
    assert replace(config, norm="softmax").scale == 1.0


@pytest.mark.parametrize("task", ["max-retrieval", "text"])
@pytest.mark.parametrize(
    ("options", "message"),
    [(("--norm", "fixed-temperature"), "needs a temperature"), (("--norm", "ssa", "--temperature", "2"), "ssa has no")],
)
def test_training_wants_a_temperature_with_this_norm_only(tmp_path, task, options, message):
    arguments = [task, "--no-compile", "--steps", "10", "--work", str(tmp_path), *options]
    result = CliRunner().invoke(train.main, arguments)
    assert result.exit_code == 2
    assert message in result.output
