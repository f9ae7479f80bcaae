"""Equal spellings of every norm are recognised as that norm; functions that only resemble a norm are not."""

import math
from collections.abc import Callable

import entmax
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharp.core.errors import InputError
from sharp.exporter.programs.attention import find_attention
from sharp.exporter.programs.attention_call import AttentionCall, OwnNorm
from sharp.exporter.programs.masks import Logits, examine
from sharp.exporter.programs.program import Program
from sharp.exporter.programs.sizes import Roles, roles_of
from sharp.exporter.programs.unrecognised import unrecognised_attention
from sharp.plugins.op import custom_normalizer as custom
from sharp.plugins.op.attributes import ICML2025_COEFFICIENTS
from sharp.plugins.op.torch_normalizers import attention_weights
from tests.exporter.programs.spellings import (
    BIAS,
    CHEAP,
    DIM,
    EVERY,
    HEADS,
    INFINITE,
    SCALE,
    Attentions,
    B,
    N,
    Spelling,
    mask_of,
    spellings,
)
from tests.marks import full

EXPECTED = {
    "softmax": OwnNorm("softmax"),
    "ssa": OwnNorm("ssa", head_params=torch.cat([B, N], -1)[0, :, 0]),
    "sigmoid": OwnNorm("sigmoid"),
    "biased sigmoid": OwnNorm("sigmoid", head_params=torch.cat([BIAS, torch.zeros_like(BIAS)], -1)[0, :, 0]),
    "relu": OwnNorm("relu"),
    "relu2": OwnNorm("relu2"),
    "entmax 1.5": OwnNorm("entmax", alpha=1.5),
    "entmax 1.4": OwnNorm("entmax", alpha=1.4),
    "sparsemax": OwnNorm("entmax", alpha=2.0),
    "adaptive": OwnNorm("adaptive_softmax", temperature_coefficients=ICML2025_COEFFICIENTS),
    "softpick": OwnNorm("softpick"),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def operands(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    query, key, value = (torch.randn(2, HEADS, tokens, DIM, generator=random) for _ in range(3))
    return 3 * query, key, value


def traced(attentions: list[Attend]) -> tuple[Program, Roles]:
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 2: torch.export.Dim("tokens", min=2, max=512)}
    module = Attentions(attentions).eval()
    program = Program(torch.export.export(module, operands(8), dynamic_shapes=((sizes,) * 3)))
    return program, roles_of(program)


def recognised(attentions: list[Attend]) -> list[tuple[AttentionCall, Logits]]:
    with torch.no_grad():
        program, roles = traced(attentions)
        calls = find_attention(program, roles)
        assert len(calls) == len(attentions), unrecognised_attention(program, roles, calls)
        found: list[tuple[AttentionCall, Logits]] = []
        for call, attend in zip(calls, attentions, strict=True):
            try:
                found.append((call, examine(program, roles, call, 300)))
            except InputError as error:
                error.add_note(f"{attend}, {call.norm}, {call.written_out}")
                raise
        return found


def output_by(call: AttentionCall, logits: Logits, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the float64 output of the recognised norm over the recognised mask."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    scale = logits.scale[:, None, None] if isinstance(logits.scale, Tensor) else logits.scale
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    visible = (distance >= 0) & (distance < (logits.window if logits.window > 0 else math.inf))
    norm = call.norm
    weights = attention_weights(
        norm.normalizer,
        query @ key.transpose(-1, -2) * scale,
        visible,
        head_params=norm.head_params,
        alpha=norm.alpha or 1.5,
        temperature_coefficients=norm.temperature_coefficients or ICML2025_COEFFICIENTS,
    )
    return weights @ value


def check(attentions: list[Spelling]) -> None:
    """Assert that each spelling is recognised with its parameters, and that the recognised norm computes its output."""
    for (call, logits), spelling in zip(recognised(attentions), attentions, strict=True):
        expected, norm = EXPECTED[spelling.norm], call.norm
        assert (norm.normalizer, norm.alpha, norm.temperature_coefficients) == (
            *(expected.normalizer, expected.alpha, expected.temperature_coefficients),
        ), spelling
        if expected.head_params is not None:
            assert norm.head_params is not None
            torch.testing.assert_close(norm.head_params, expected.head_params, rtol=1e-4, atol=1e-5)
        assert logits.scale == pytest.approx(SCALE / spelling.scale_before)
        assert (logits.causal, logits.window) == (True, spelling.window), spelling
        for tokens in (5, 23):
            query, key, value = operands(tokens)
            found = output_by(call, logits, query * spelling.scale_before, key, value).float()
            torch.testing.assert_close(found, spelling(query, key, value), rtol=1e-4, atol=1e-4, msg=str(spelling))


@settings(max_examples=5, phases=[Phase.generate])
@given(st.lists(spellings(CHEAP), min_size=6, max_size=6))
def test_equal_spellings_are_one_norm(attentions: list[Spelling]) -> None:
    check(attentions)


@pytest.mark.full
@settings(max_examples=6, phases=[Phase.generate])
@given(st.lists(spellings(EVERY), min_size=8, max_size=8))
def test_equal_spellings_of_every_norm_are_one_norm(attentions: list[Spelling]) -> None:
    check(attentions)


def with_weights(weights: Callable[[Tensor], Tensor], hidden: float = INFINITE) -> Attend:
    """Return attention with `weights` over logits whose masked entries are set to `hidden`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        z = query @ key.transpose(-1, -2) * SCALE
        return weights(z.masked_fill(~mask_of("tril", z), hidden)) @ value

    return attend


def over_sum(powers: Tensor, added: float = 0.0) -> Tensor:
    return powers / (powers.sum(-1, keepdim=True) + added)


def uneven_ssa(z: Tensor) -> Tensor:
    return over_sum((1 + B * z.abs()) ** torch.where(z < 0, -1.01 * N, N))


def ssa(z: Tensor) -> Tensor:
    return over_sum((1 + B * z.abs()) ** (N * z.sign()))


def of_high_powers(z: Tensor) -> Tensor:
    return over_sum((1 + z.abs()) ** (1.2 * z.sign()))


def added_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    z = query @ key.transpose(-1, -2) * SCALE
    return (z - 50.0 * ~mask_of("tril", z)).softmax(-1) @ value


def masked_weights(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    z = query @ key.transpose(-1, -2) * SCALE
    return z.softmax(-1).masked_fill(~mask_of("tril", z), 0.0) @ value


def factor_of_each_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    z = query @ key.transpose(-1, -2) * torch.arange(1, query.shape[2] + 1).log()[:, None]
    return z.masked_fill(~mask_of("tril", z), INFINITE).softmax(-1) @ value


NEAR_MISSES: dict[str, tuple[Attend, str]] = {
    "n off by 1 % below 0": (with_weights(uneven_ssa), "no norm of Sharp's makes; the nearest is"),
    "an epsilon in the sum": (with_weights(lambda z: over_sum(z.exp(), 1e-2)), "w / w.sum"),
    "an epsilon in the sum of ssa": (
        with_weights(lambda z: over_sum((1 + B * z.abs()) ** (N * z.sign()), 1e-2)),
        "with nothing added to it",
    ),
    "clipped logits": (with_weights(lambda z: z.clamp(max=20.0).softmax(-1)), "does something to its logits"),
    "clipped inside": (
        with_weights(lambda z: over_sum((1 + B * z.abs().clamp(max=20.0)) ** (N * z.sign()))),
        "no norm of Sharp's makes|does something",
    ),
    "a constant under ssa": (with_weights(lambda z: ssa(z + 0.1)), "adds a number to all logits of a row"),
    "weights to a power": (with_weights(lambda z: z.softmax(-1) ** 1.01), "w / w.sum"),
    "entmax to a power": (with_weights(lambda z: entmax.entmax15(z, dim=-1) ** 1.01), "no norm of Sharp's makes"),
    "99 % of sigmoid": (with_weights(lambda z: z.sigmoid() * 0.99), "the nearest is sigmoid"),
    "cubes": (with_weights(lambda z: z.relu() ** 3), "no norm of Sharp's makes|no attention"),
    "weights masked after softmax": (masked_weights, r"masked_fill\(~mask, float\('-inf'\)\) before the norm"),
    "a finite mask under ssa": (with_weights(ssa, -1e4), r"ssa's but for a mask of -1e\+04"),
    "a mask that is finite under ssa": (with_weights(of_high_powers, -1e6), r"its mask of -1e\+06 leaves hidden keys"),
    "a small mask": (with_weights(lambda z: z.softmax(-1), -50.0), "writes -50 over some logits"),
    "a factor of each query": (factor_of_each_query, r"by a number for each query; multiply the query by it instead"),
    "a small mask that is added": (added_mask, "if its -50 is a mask, write z.masked_fill"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_resembles_a_norm_is_refused_with_the_line_to_change(name: str) -> None:
    attend, sentence = NEAR_MISSES[name]
    with pytest.raises(InputError, match=sentence), torch.no_grad():
        program, roles = traced([attend])
        calls = find_attention(program, roles)
        if not calls:
            raise InputError(unrecognised_attention(program, roles, calls))
        examine(program, roles, calls[0], 300)


def test_factors_that_no_node_multiplies_with_are_found() -> None:
    (call, logits), (other, scaled) = recognised(
        [with_weights(lambda z: over_sum(2.0**z)), with_weights(lambda z: over_sum((B * z).exp()))]
    )
    assert (call.norm.normalizer, other.norm.normalizer) == ("softmax", "softmax")
    assert logits.scale == pytest.approx(SCALE * math.log(2))
    torch.testing.assert_close(scaled.scale, SCALE * B.flatten())


def test_a_users_normalizer_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def cubes(logits: Tensor, visible: Tensor) -> Tensor:
        powers = logits.relu() ** 3 * visible
        return powers / (1 + powers.sum(-1, keepdim=True))

    monkeypatch.setitem(custom._added, "cubes", custom.CustomNormalizer("cubes", cubes, lambda op, z, _: z))

    def spelled(z: Tensor) -> Tensor:
        powers = z.clamp(min=0) * z.clamp(min=0).square()
        return powers * (1 + powers.sum(-1, keepdim=True)).reciprocal()

    ((call, _),) = recognised([with_weights(spelled)])
    assert call.norm.normalizer == "cubes"


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, full(INFINITE)])
def test_a_mask_that_is_as_good_as_infinite_is_taken(hidden: float) -> None:
    ((call, logits),) = recognised([with_weights(ssa, hidden)])
    assert (call.norm.normalizer, logits.causal) == ("ssa", True)
