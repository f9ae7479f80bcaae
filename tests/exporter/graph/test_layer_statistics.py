"""In every form, statistics include the factor of a learned length scale, as PyTorch computes it."""

import math

import pytest
import torch

from sharp.core.manifest import Cache
from sharp.exporter.checkpoints.own_model import OwnDecoder
from sharp.exporter.forms.contiguous.model import ContiguousGraph
from sharp.exporter.forms.paged.model import trace_paged
from sharp.exporter.forms.uncached.model import UncachedGraph
from sharp.exporter.sources.head_parts import LayerStatistics
from sharp.exporter.sources.mapped_decoder import MappedDecoder
from sharp.exporter.sources.norm_map import map_heads, read_norm_map
from sharp.exporter.sources.uncached_model import UncachedDecoder, UncachedSet
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from tests.exporter.conftest import tiny_model

INVERSE_TEMPERATURE = 2
TOKENS = 6
collect = torch.tensor(True)
ids = torch.arange(2 * TOKENS).reshape(2, TOKENS)


def with_scales(norm: str = "ssmax"):
    """Return a model of two layers whose parameters s differ by layer and head."""
    model = tiny_model(norm, "rope", layers=2).eval()
    for layer, block in enumerate(model.blocks):
        s = block.attention.query_scale.s
        s.data = torch.arange(1.0, 1 + len(s)) / 10 + layer
    return model


def expected(model, positions: torch.Tensor) -> torch.Tensor:
    """Return the factors s ln(i + 2), [layers, q_heads, positions]."""
    s = torch.stack([block.attention.query_scale.s for block in model.blocks])
    return s[..., None] * torch.log(positions + 2.0)


@torch.no_grad()
def test_the_paged_form():
    model = with_scales()
    tracing = trace_paged(OwnDecoder(model), Cache(form="paged", block_size=16, dtype="float32"))
    _, stats, *_ = tracing.module(*tracing.arguments)
    positions = tracing.arguments[1]
    factors = expected(model, positions).transpose(1, 2)  # [layers, tokens, q_heads]
    torch.testing.assert_close(stats[..., INVERSE_TEMPERATURE], factors)
    assert (stats[..., 1] == 1 + positions[:, None]).all()  # the other statistics are unchanged


def test_layers_without_sinks_beside_such_with_them_have_the_mass_0():
    with_sinks, without = torch.rand(3, 2, 5), torch.rand(3, 2, 4)
    statistics = LayerStatistics([without, with_sinks], [None, torch.full((3, 2, 1), 2.0)])
    first, second = statistics.joined(torch.stack)
    torch.testing.assert_close(first, torch.cat([without, torch.zeros(3, 2, 1)], dim=-1))
    torch.testing.assert_close(second, with_sinks * torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0]))


@torch.no_grad()
def test_the_contiguous_form_after_other_tokens():
    model, past = with_scales(), 3
    config = model.config
    pasts = [torch.zeros(2, config.kv_heads, past, config.head_dim) for _ in range(2 * config.layers)]
    _, stats, *_ = ContiguousGraph(OwnDecoder(model))(ids, collect, pasts)
    for sequence in range(2):
        found = stats[:, sequence, ..., INVERSE_TEMPERATURE]  # [layers, q_heads, tokens]
        torch.testing.assert_close(found, expected(model, torch.arange(past, past + TOKENS)))


@torch.no_grad()
def test_the_form_without_a_cache():
    model = with_scales()
    _, stats = UncachedGraph(UncachedDecoder(OwnDecoder(model)))(ids, collect)
    torch.testing.assert_close(stats[:, 1, ..., INVERSE_TEMPERATURE], expected(model, torch.arange(TOKENS)))


@torch.no_grad()
def test_a_set_model():
    model = MaxRetrieval(MaxRetrievalConfig(norm="ssmax", hidden_size=24)).eval()
    graph = UncachedSet(model)
    inputs = graph.random_inputs(3, TOKENS, torch.Generator().manual_seed(0))
    _, stats = UncachedGraph(graph)(*inputs, collect)
    factor = model.query_scale.s.item() * math.log(TOKENS + 1)
    torch.testing.assert_close(stats[..., INVERSE_TEMPERATURE], torch.full((1, 3, 1, 1), factor))


@torch.no_grad()
def test_heads_and_layers_without_a_scale_have_1(tmp_path):
    model = tiny_model("softmax", "rope", layers=2).eval()
    named = tmp_path / "norms.toml"
    named.write_text('[[norms]]\nlayers = [1]\nheads = [0]\nnorm = "ssmax"\n')
    decoder = MappedDecoder(OwnDecoder(model), map_heads(model.config, read_norm_map(named), named), named)
    _, stats = UncachedGraph(UncachedDecoder(decoder))(ids, collect)
    factors = stats[..., INVERSE_TEMPERATURE]
    assert (factors[0] == 1).all() and (factors[1, :, 1:] == 1).all()
    growth = torch.log(torch.arange(TOKENS) + 2) / math.log(2)
    torch.testing.assert_close(factors[1, 0, 0] / factors[1, 0, 0, 0], growth)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["softmax", "entmax"])
def test_norms_without_a_scale_have_1(norm):
    _, stats = UncachedGraph(UncachedDecoder(OwnDecoder(tiny_model(norm, "rope").eval())))(ids, collect)
    assert (stats[..., INVERSE_TEMPERATURE] == 1).all()
