"""A module of the user whose attention has a gate on its output is exported, with its own norm and with another."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import entmax
import pytest
import torch
from torch import Tensor, nn

import sharp
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.paged.session import PagedSession
from tests.exporter.programs import gpt
from tests.marks import full

TOKENS = torch.randint(gpt.VOCABULARY, (1, 33), generator=torch.Generator().manual_seed(1))
SSA = {"norm": "ssa", "norm_parameters": {"b": math.exp(0.3), "n": math.exp(0.4)}}
IDS = (torch.zeros(1, 9, dtype=torch.int64),)


class GatedAttention(gpt.Attention):
    """Attention whose output is multiplied by `squash` of a projection of its input, per head or per channel."""

    def __init__(self, attend: gpt.Attend, gates: int, squash: Callable[[Tensor], Tensor]) -> None:
        super().__init__(attend, kv_heads=2)
        self.gate, self.squash = nn.Linear(gpt.WIDTH, gates, bias=False), squash

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.query, self.key, self.value))
        output = self.attend(*parts).transpose(1, 2)  # [batch, tokens, heads, dim]
        return self.out((output * self.squash(self.gate(x)).unflatten(-1, (gpt.HEADS, -1))).flatten(2))


def gated(attend: gpt.Attend, gates: int, squash: Callable[[Tensor], Tensor] = torch.sigmoid) -> gpt.GPT:
    module = gpt.GPT(attend)
    module.attention[0] = GatedAttention(attend, gates, squash)
    with torch.no_grad():
        for part in (module.attention[0].query, module.attention[0].key, module.attention[0].gate):
            part.weight.mul_(4)  # large weights make attention and gates differ by token
    return module.eval()


@pytest.mark.parametrize(
    ("attend", "gates", "squash", "options", "other"),
    [
        (gpt.fused, gpt.HEADS, torch.sigmoid, {}, gpt.fused),
        (
            gpt.written_out,
            gpt.WIDTH,
            torch.sigmoid,
            {"norm": "entmax"},
            gpt.with_weights(partial(entmax.entmax15, dim=-1)),
        ),
        full(gpt.einsums, gpt.HEADS, nn.functional.softplus, {}, gpt.einsums),
        full(gpt.fused, gpt.WIDTH, nn.functional.silu, SSA, gpt.with_weights(gpt.ssa_of_the_authors)),
    ],
)
def test_the_folder_has_the_logits_of_the_gated_module(
    attend: gpt.Attend,
    gates: int,
    squash: Callable[[Tensor], Tensor],
    options: dict[str, Any],
    other: gpt.Attend,
    tmp_path: Path,
) -> None:
    module = gated(attend, gates, squash)
    sharp.export(module, IDS, output=tmp_path / "model", untrained_norm=True, **options)
    with torch.no_grad():
        expected = gated(other, gates, squash)(TOKENS)[0]
    manifest: Any = read_manifest(tmp_path / "model")
    session = PagedSession(tmp_path / "model", manifest, manifest.cache, kernels=True)
    session.reset(1, TOKENS.shape[1])
    steps = [session.step([part.numpy()])[0][0] for part in TOKENS[0].split([20, 1, 1, 11])]
    found = torch.cat([torch.from_numpy(step) for step in steps])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
