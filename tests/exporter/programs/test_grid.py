"""Logits and weights are recognised in all layouts that graphs have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharp.exporter.programs.grid import Grid, matrix

SHAPE = (2, 6, 3, 5)  # [batch, heads, queries, keys]


def node(*shape: int) -> Any:
    return SimpleNamespace(meta={"val": torch.empty(shape)})


@pytest.mark.parametrize(
    ("grid", "folded"),
    [
        (matrix(node(2, 6, 3, 5)), (2, 6, 3, 5)),
        (matrix(node(2, 2, 3, 3, 5)), (2, 2, 3, 3, 5)),
        (matrix(node(12, 3, 5)), (12, 3, 5)),
        (matrix(node(12, 5, 3), turned=True), (12, 5, 3)),
        (matrix(node(2, 2, 3, 5, 3), turned=True), (2, 2, 3, 5, 3)),
        (Grid(node(2, 3, 6, 5), (0, 2, 1, 3)), (2, 3, 6, 5)),
    ],
    ids=["as it is", "groups", "matrices", "keys first", "groups, keys first", "queries before heads"],
)
def test_folding_and_unfolding_give_back_every_logit(grid: Grid, folded: tuple[int, ...]) -> None:
    z = torch.arange(2 * 6 * 3 * 5.0).reshape(SHAPE)
    found = grid.fold(z)
    assert found.shape == folded
    torch.testing.assert_close(grid.unfold(found, SHAPE), z)


def test_a_value_that_is_the_same_for_all_heads_is_repeated() -> None:
    same = torch.randn(2, 1, 3, 5)
    torch.testing.assert_close(matrix(node(2, 1, 3, 5)).unfold(same, SHAPE), same.expand(SHAPE))
