"""A module's attention is recognised in its graph, and other graphs are refused by the node's name and line."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import entmax
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from sharp.core.errors import InputError
from sharp.exporter.module import check_traced, evaluated, trace
from sharp.exporter.programs.decoder import ProgramDecoder
from sharp.exporter.programs.reading import ProgramOptions, read_program
from sharp.exporter.sources.source import Source
from sharp.models.attention import EagerAttention
from sharp.models.normalized_attention import normalized_attention
from sharp.plugins.op.schema import TEMPERATURE_PRESETS
from tests.exporter.programs import gpt
from tests.marks import full

TOKENS = torch.arange(18).reshape(2, 9)


def read(module: nn.Module, *inputs: Tensor, norm: str | None = "softmax", **given: object) -> Source:
    with evaluated(module):
        exported = trace(module, inputs)
        check_traced(module, exported, inputs)
    return read_program(Path("model"), norm, given=ProgramOptions(exported=exported, **given))  # type: ignore[arg-type]


def count(scores: Tensor) -> Tensor:
    """Return how many keys each row sees."""
    return (scores > -torch.inf).sum(-1, keepdim=True).float()


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def flexible_alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def biased(score: Tensor, _b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, score + SLOPES[head] * (j - i), -torch.inf)

    return flex_attention(query, key, value, score_mod=biased, enable_gqa=True)


@pytest.mark.parametrize(
    ("attend", "softcap", "window", "slopes"),
    [
        (gpt.fused, 0, -1, None),
        (gpt.written_out, 0, -1, None),
        (gpt.alibi, 0, -1, [0.5, 0.25, 0.125, 0.0625]),
        full(gpt.capped_in_a_window, 5, 20, None),
        (gpt.einsums, 0, -1, None),
        (gpt.expanded, 0, -1, None),
        (gpt.of_a_type, 0, -1, None),
        full(flexible_alibi, 0, -1, [0.5, 0.25, 0.125, 0.0625]),
    ],
)
def test_what_stands_between_the_products_is_found_by_evaluating_it(
    attend: gpt.Attend, softcap: float, window: int, slopes: list[float] | None
) -> None:
    model = read(gpt.GPT(attend), TOKENS).model
    assert isinstance(model, ProgramDecoder)
    (layer,) = model.attention.layers
    assert (layer.q_heads, layer.kv_heads, model.config.max_context) == (4, 2, gpt.CONTEXT)
    found = layer.logits
    assert found.scale == pytest.approx(8**-0.5, rel=1e-6)
    assert (found.softcap, found.causal, found.window) == (pytest.approx(softcap), True, window)
    assert slopes is None if found.slopes is None else found.slopes.tolist() == pytest.approx(slopes)


def test_a_call_by_name_needs_no_pattern_and_brings_its_norm() -> None:
    parameters = nn.Parameter(torch.tensor([[1.0, 1.5]] * gpt.HEADS))

    def named(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return normalized_attention(query, key, value, norm="ssa", head_params=parameters, causal=True, window=20)

    source = read(gpt.GPT(named), TOKENS, norm="ssa")
    assert source.trained
    assert isinstance(source.model, ProgramDecoder)
    assert source.model.attention.first.logits.window == 20


@pytest.mark.parametrize("norm", ["entmax", full("softmax"), full("ssa")])
def test_a_call_by_name_brings_its_sinks(norm: str) -> None:
    parameters = nn.Parameter(torch.tensor([[1.0, 1.5]] * gpt.HEADS))
    sinks = nn.Parameter(torch.tensor([-9.0, 0.0, 2.0, 5.0]))

    def named(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = parameters if norm == "ssa" else None
        return normalized_attention(query, key, value, norm=norm, head_params=given, sinks=sinks, causal=True)

    source = read(gpt.GPT(named), TOKENS, norm=norm)  # read refuses a program whose logits differ
    assert isinstance(source.model, ProgramDecoder)
    seen: list[Tensor | None] = []

    def attention(layer: int, query: Tensor, *rest: Any) -> Tensor:
        seen.append(rest[-1].sinks)
        return query

    source.model.hidden_states(TOKENS, torch.arange(TOKENS.shape[1])[None], attention)
    assert [found.tolist() for found in seen if found is not None] == [sinks.tolist()] * len(seen)


@pytest.mark.parametrize("norm", ["sigmoid-n", full("relu2-n")])
def test_a_call_by_name_brings_what_its_norm_makes_of_the_length(norm: str) -> None:
    def named(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return normalized_attention(query, key, value, norm=norm, causal=True)

    source = read(gpt.GPT(named), TOKENS, norm=None)  # read refuses a program whose logits differ
    assert isinstance(source.model, ProgramDecoder)
    assert source.model.config.scheme.normalizer == norm.removesuffix("-n")


def test_parameters_that_the_user_gives_make_a_norm_trained() -> None:
    source = read(gpt.GPT(), TOKENS, norm="ssa", norm_parameters={"b": 2.0, "n": torch.arange(1.0, 5.0)})
    assert source.trained
    assert isinstance(source.model, ProgramDecoder)
    assert source.model.parameters_of_norm.ssa is not None
    assert source.model.parameters_of_norm.ssa.tolist() == [[[2, 1], [2, 2], [2, 3], [2, 4]]]
    assert not read(gpt.GPT(), TOKENS, norm="ssa").trained


@pytest.mark.parametrize(
    ("norm", "parameters"),
    [
        ("sentmax", {"beta": 0.5, "gamma": torch.tensor([-1.0, 0.0, 0.5, 1.0])}),
        (
            "asentmax",
            {
                "w_beta": torch.randn(1, gpt.HEADS, gpt.WIDTH),
                "w_gamma": "attention.{layer}.gamma",
                "c_beta": torch.arange(4.0),
            },
        ),
        ("assmax", {"w_beta": torch.randn(gpt.HEADS, gpt.WIDTH), "w_gamma": "attention.{layer}.gamma"}),
    ],
)
def test_learned_scales_of_the_query_are_those_that_are_given(norm: str, parameters: dict[str, object]) -> None:
    module = gpt.GPT()
    gamma = torch.randn(gpt.HEADS, gpt.WIDTH)
    module.attention[0].register_buffer("gamma", gamma)
    source = read(module, TOKENS, norm=norm, norm_parameters=parameters)
    assert source.trained
    model = source.model
    assert isinstance(model, ProgramDecoder)
    seen: list[Tensor] = []

    def attention(_layer: int, query: Tensor, *_rest: object) -> Tensor:
        seen.append(query)
        return query

    def queries(one: ProgramDecoder) -> Tensor:
        one.hidden_states(TOKENS, torch.arange(9).expand(2, 9), attention)  # type: ignore[arg-type]
        return seen.pop()

    original = read(gpt.GPT(), TOKENS).model
    assert isinstance(original, ProgramDecoder)
    plain = queries(original)  # [batch, tokens, heads, dim]
    with torch.no_grad():
        hidden = module.norms[0](module.tokens(TOKENS) + module.places(torch.arange(9)))
        length = torch.log(torch.arange(9) + 2.0)[:, None]
        if norm == "sentmax":
            factor = 1 + 0.5 * length ** parameters["gamma"]
        else:
            weight, bias = parameters["w_beta"].reshape(gpt.HEADS, -1), parameters.get("c_beta", 0.0)  # type: ignore[attr-defined]
            beta = functional.softplus(hidden @ weight.T + bias)
            factor = 1 + beta * length ** (2 * torch.tanh(hidden @ gamma.T))
        assert torch.allclose(queries(model), plain * factor[..., None], atol=1e-5)


def test_a_scale_that_is_learned_has_no_start_values() -> None:
    with pytest.raises(InputError, match="give w_gamma with norm_parameters"):
        read(gpt.GPT(), TOKENS, norm="asentmax", norm_parameters={"w_beta": torch.zeros(gpt.HEADS, gpt.WIDTH)})
    with pytest.raises(InputError, match=r"'head.weight' of norm_parameters 'w_beta' has shape \[257, 32\], not"):
        read(gpt.GPT(), TOKENS, norm="assmax", norm_parameters={"w_beta": "head.weight", "w_gamma": 0.0})


def softpick_of_the_authors(scores: Tensor) -> Tensor:
    """Return softpick weights as its authors write them (Zuhri et al. 2025).

    They add an epsilon to the sum, which leaves out keys with an infinite mask.
    """
    top = scores.amax(-1, keepdim=True)
    parts = torch.exp(scores - top) - torch.exp(-top)
    return parts.relu() / (torch.where(scores.isfinite(), parts.abs(), 0).sum(-1, keepdim=True) + 1e-8)


@pytest.mark.parametrize(
    ("normalize", "norm", "alpha"),
    [
        (partial(entmax.sparsemax, dim=-1), "sparsemax", 2.0),
        full(partial(entmax.entmax15, dim=-1), "entmax", 1.5),
        full(gpt.ssa_of_the_authors, "ssa", 1.5),
        full(gpt.adaptive_of_the_authors, "adaptive-temperature", 1.5),
        (lambda scores: scores.exp() / scores.exp().sum(-1, keepdim=True), "softmax", 1.5),
        (torch.sigmoid, "sigmoid", 1.5),
        full(lambda scores: scores.relu().square(), "relu2", 1.5),
        (softpick_of_the_authors, "softpick", 1.5),
        (lambda scores: torch.sigmoid(scores - count(scores).log()), "sigmoid-n", 1.5),
        full(lambda scores: scores.relu() / count(scores), "relu-n", 1.5),
        full(lambda scores: scores.relu().square() / count(scores), "relu2-n", 1.5),
        # a bias for the trained length, a constant
        (lambda scores: torch.sigmoid(scores - math.log(512)), "sigmoid", 1.5),
    ],
)
def test_a_norm_that_is_written_out_is_the_programs_own(normalize: object, norm: str, alpha: float) -> None:
    source = read(gpt.GPT(gpt.with_weights(normalize)), TOKENS, norm=None)  # type: ignore[arg-type]
    assert source.trained
    assert isinstance(source.model, ProgramDecoder)
    assert (source.model.config.norm, source.model.config.alpha) == (norm, alpha)
    assert source.no_cache is None
    if norm == "ssa":
        head_params = source.model.attention.first.call.norm.head_params
        assert head_params is not None
        assert torch.allclose(head_params, torch.tensor([0.3, 0.4]).exp().expand(gpt.HEADS, 2), atol=1e-5)
    if norm == "adaptive-temperature":
        assert source.model.config.temperature_coefficients == TEMPERATURE_PRESETS["icml2025"]


class Convolved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.ones(gpt.WIDTH, 1, 3)
        return functional.conv1d(x.transpose(1, 2), kernel, padding=1, groups=gpt.WIDTH).transpose(1, 2)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[1]


@pytest.mark.parametrize(
    ("module", "node", "line"),
    [
        (Convolved, "conv1d", "functional.conv1d(x.transpose"),
        (Summed, "cumsum", "x.cumsum(1)"),
        (Centred, "mean", "x.mean(1, keepdim=True)"),
        (Scaled, "div", "x / x.shape[1]"),
    ],
)
def test_what_mixes_tokens_has_no_cache_and_is_named_with_its_line(module: type, node: str, line: str) -> None:
    reason = read(gpt.GPT(mixing=module()), TOKENS).no_cache
    assert reason is not None
    assert node in reason
    assert line in reason


def biased(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tokens = query.shape[2]
    bias = torch.sin(torch.arange(tokens)[:, None] + 2.0 * torch.arange(tokens))
    return gpt.weighted(gpt.logits(query, key) + bias, value)


def sparse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = gpt.logits(query, key)
    return gpt.weighted(torch.where(scores > 0.1, scores, scores.square()), value)


def none_at_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query + (key + value).repeat_interleave(2, 1)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [(biased, "bias that is not ALiBi's"), (sparse, "does something"), (none_at_all, "no attention")],
)
def test_attention_that_the_op_has_not_is_refused_in_one_sentence(attend: gpt.Attend, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(gpt.GPT(attend), TOKENS)


def clamped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return gpt.weighted(gpt.logits(query, key).clamp(max=200.0), value)


def test_attention_that_only_seems_to_be_the_ops_is_named() -> None:
    module = gpt.GPT(clamped, layers=2)
    with torch.no_grad():
        module.attention[1].query.weight *= 5000.0
    with pytest.raises(InputError, match=r"recognised \(node matmul_3, gpt.py line \d+: .*\) its output differs by"):
        read(module, TOKENS)


def test_capped_logits_have_no_norm_that_grows_with_the_length() -> None:
    with pytest.raises(InputError, match=r"attention at node .* caps its logits at 5, and norm asentmax would scale"):
        read(gpt.GPT(gpt.capped_in_a_window), TOKENS, norm="asentmax", norm_parameters={"w_beta": 0.1, "w_gamma": 0.1})


class TokensFirst(gpt.GPT):
    """A GPT with attention over [tokens, batch, size], as in torch.nn.MultiheadAttention."""

    def forward(self, ids: Tensor) -> Tensor:
        x = (self.tokens(ids) + self.places(torch.arange(ids.shape[1]))).transpose(0, 1)
        own = self.attention[0]
        heads = (part(x).unflatten(-1, (-1, own.dim)).permute(1, 2, 0, 3) for part in (own.query, own.key, own.value))
        return self.head(self.norm(own.out(own.attend(*heads).transpose(1, 2).flatten(2))))


class TokensSecond(gpt.GPT):
    """A GPT that computes what `TokensFirst` computes, with the batch first."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.attention[0](self.tokens(ids) + self.places(torch.arange(ids.shape[1])))))


def test_the_scale_of_a_query_is_of_its_own_token_in_either_layout() -> None:
    parameters = {"w_beta": torch.randn(gpt.HEADS, gpt.WIDTH), "w_gamma": 0.1}
    ids = torch.arange(27).reshape(3, 9)
    found: list[Tensor] = []
    for module in (TokensFirst(), TokensSecond()):
        model = read(module, TOKENS, norm="asentmax", norm_parameters=parameters).model
        assert isinstance(model, ProgramDecoder)
        hidden = model.hidden_states(ids, torch.arange(9).expand(3, 9), EagerAttention(model.config))
        found.append(model.logits(hidden))
    assert torch.allclose(*found, atol=1e-5)


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gpt.GPT(), gpt.GPT(kv_heads=4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT()
        self.model.head.half()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.tokens(ids) + self.model.places(torch.arange(ids.shape[1]))
        return self.model.head(self.model.attention[0](x).half()).float()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            Uneven,
            r"differ in their heads.* at node scaled_dot.*line \d+: .*4 query and 4 KV heads of 8, the first 4 .* 2",
        ),
        (Half, r"its weights model\.head\.weight are float16"),
    ],
)
def test_what_differs_in_a_module_is_named(module: type, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(module(), TOKENS)
