"""Logits in the shapes that graphs have them in."""

from types import SimpleNamespace

import pytest
import torch

from sharp.exporter.programs.logits import fold, unfold

SHAPE = (2, 6, 3, 5)  # [batch, heads, queries, keys]


@pytest.mark.parametrize("folded", [(2, 6, 3, 5), (2, 2, 3, 3, 5), (12, 3, 5)], ids=["as it is", "groups", "matrices"])
def test_folding_and_unfolding_give_back_every_logit(folded) -> None:
    z = torch.arange(2 * 6 * 3 * 5.0).reshape(SHAPE)
    found = fold(z, SimpleNamespace(meta={"val": torch.empty(folded)}))
    assert found.shape == folded
    torch.testing.assert_close(unfold(found, SHAPE), z)


def test_what_is_the_same_for_all_heads_is_repeated() -> None:
    same = torch.randn(2, 1, 3, 5)
    torch.testing.assert_close(unfold(same, SHAPE), same.expand(SHAPE))
