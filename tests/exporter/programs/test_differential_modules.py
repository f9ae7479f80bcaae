"""A user's module with differential attention is exported: two maps per layer, each with values of twice the size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import entmax
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sharp
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.paged.session import PagedSession
from tests.exporter.programs import gpt
from tests.marks import full

TOKENS = torch.randint(gpt.VOCABULARY, (1, 33), generator=torch.Generator().manual_seed(1))
IDS = (torch.zeros(1, 9, dtype=torch.int64),)
DIM = gpt.WIDTH // gpt.HEADS


def logits(query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT * DIM**-0.5
    return scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)


class Differential(nn.Module):
    """Differential attention with `HEADS` pairs of maps and values of 2 * DIM channels (Ye et al. 2025, equation 1).

    `attend` gives a map times values of a query and a key. If it is None, the difference of the maps is multiplied.
    """

    def __init__(self, attend: gpt.Attend | None) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (nn.Linear(gpt.WIDTH, 2 * gpt.WIDTH) for _ in range(3))
        self.factor = nn.Parameter(torch.linspace(0.2, 0.8, gpt.HEADS).view(-1, 1, 1))
        self.out = nn.Linear(2 * gpt.WIDTH, gpt.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (gpt.HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = parts  # [batch, heads, tokens, 2 * DIM]
        pairs = list(zip(query.chunk(2, -1), key.chunk(2, -1), strict=True))
        if self.attend is None:
            first, second = (logits(*pair).softmax(-1) for pair in pairs)
            mixed = (first - self.factor * second) @ value
        else:
            first, second = (self.attend(*pair, value) for pair in pairs)
            mixed = first - self.factor * second
        return self.out(mixed.transpose(1, 2).flatten(2))


def module_of(attend: gpt.Attend | None) -> gpt.GPT:
    module = gpt.GPT()
    torch.manual_seed(1)
    module.attention[0] = Differential(attend)
    with torch.no_grad():
        for part in (module.attention[0].query, module.attention[0].key):
            part.weight.mul_(4)  # large weights make the maps differ by token
    return module.eval()


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def mixed_by(normalize: Callable[[Tensor], Tensor]) -> gpt.Attend:
    return lambda query, key, value: normalize(logits(query, key)) @ value


@pytest.mark.parametrize(
    ("attend", "options", "other"),
    [
        (fused, {"norm": "entmax"}, mixed_by(lambda z: entmax.entmax15(z, -1))),
        full(mixed_by(lambda z: z.softmax(-1)), {}, fused),
    ],
)
def test_the_folder_has_the_logits_of_the_module_and_both_maps(
    attend: gpt.Attend, options: dict[str, Any], other: gpt.Attend, tmp_path: Path
) -> None:
    sharp.export(module_of(attend), IDS, output=tmp_path / "model", untrained_norm=True, **options)
    with torch.no_grad():
        expected = module_of(other)(TOKENS)[0]
    manifest: Any = read_manifest(tmp_path / "model")
    assert (manifest.layers, manifest.q_heads, manifest.head_dim, manifest.value_dim) == (2, gpt.HEADS, DIM, 2 * DIM)
    session = PagedSession(tmp_path / "model", manifest, manifest.cache, kernels=True)
    session.reset(1, TOKENS.shape[1])
    steps = [session.step([part.numpy()])[0][0] for part in TOKENS[0].split([20, 1, 1, 11])]
    found = torch.cat([torch.from_numpy(step) for step in steps])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_difference_of_maps_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"adds 2 products.*multiply each with the values on its own"):
        sharp.export(module_of(None), IDS, output=tmp_path / "model")
