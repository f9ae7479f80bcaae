"""Bits per byte of a text that is read in windows of a given length."""

import math

import pytest
import torch

from sharp.core.errors import InputError
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import SharpConfig
from sharp.models.evaluation import measure_text


@pytest.fixture
def model() -> SharpForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "layers": 1, "q_heads": 2, "kv_heads": 1}
    return SharpForCausalLM(SharpConfig(**sizes, head_dim=8, norm="softmax", tokenizer="bytes")).eval()


def test_a_row_has_mean_and_standard_error_of_the_windows(model) -> None:
    tokens = torch.randint(257, (20,), generator=torch.Generator().manual_seed(1))
    two, one = measure_text(model, tokens, (6,), windows=2) + measure_text(model, tokens, (6,), windows=1)
    bits = []
    for start in (0, 6):
        with torch.no_grad():
            said = model(tokens[None, start : start + 6])[0].log_softmax(-1)
        bits.append(-said[range(6), tokens[start + 1 : start + 7]].mean().item() / math.log(2))
    assert (two.samples, two.length, two.metric) == (2, 6, "bits_per_byte")
    assert two.score == pytest.approx(sum(bits) / 2, rel=1e-5)
    assert two.standard_error == pytest.approx(abs(bits[0] - bits[1]) / 2, rel=1e-4)
    assert (one.score, one.standard_error) == (pytest.approx(bits[0], rel=1e-5), 0.0)


@pytest.mark.parametrize("length", [0, 20])
def test_a_window_that_the_text_does_not_have_is_refused(model, length: int) -> None:
    with pytest.raises(InputError, match=f"windows of {length} cannot be cut from a text of 20 tokens"):
        measure_text(model, torch.zeros(20, dtype=torch.int64), (length,), windows=1)
