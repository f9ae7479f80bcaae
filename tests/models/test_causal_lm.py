"""`SharpForCausalLM`: causality, positions, Hugging Face's Llama as a second opinion, and export."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sharp.core.errors import InputError
from sharp.models.attention import EagerAttention
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.config import SharpConfig
from sharp.models.norms import NORMS
from sharp.models.positions import alibi_slopes, inverse_frequency
from sharp.plugins.op.torch_normalizers import entropy

TINY = SharpConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    norm="softmax",
    positions="nape",
    trained_context=32,
    max_context=256,
)


def tiny(**changes) -> SharpForCausalLM:
    """Return a model whose weights are so large that attention is far from uniform."""
    torch.manual_seed(0)
    model = SharpForCausalLM(replace(TINY, **{"alpha": 0.0, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm", NORMS)
def test_a_token_depends_on_no_later_one(norm):
    model = tiny(norm=norm)
    before = tokens(2, 12)
    after = before.clone()
    after[:, 7:] = (after[:, 7:] + 1) % TINY.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model(before)[:, :7], model(after)[:, :7])
        assert not torch.allclose(model(before)[:, 7:], model(after)[:, 7:])


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_trains_all_its_parameters(norm):
    model = tiny(norm=norm)
    model(tokens(2, 9)).square().mean().backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the constants of log-power and llama4 are not trained
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": TINY.trained_context}


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    ("stretch", "rope_parameters"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_factor": 16.0}, {"rope_type": "linear", "factor": 16.0}),
        ({"rope_factor": 16.0, "rope_scaling": "llama3"}, {"rope_type": "llama3", "factor": 16.0, **LLAMA3}),
    ],
)
def test_softmax_with_rope_is_hugging_faces_llama(tie, stretch, rope_parameters):
    model = tiny(positions="rope", tie_embeddings=tie, rope_theta=500.0, **stretch)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TINY.vocab_size,
            hidden_size=TINY.hidden_size,
            intermediate_size=TINY.intermediate_size,
            num_hidden_layers=TINY.layers,
            num_attention_heads=TINY.q_heads,
            num_key_value_heads=TINY.kv_heads,
            head_dim=TINY.head_dim,
            rms_norm_eps=TINY.rms_norm_eps,
            tie_word_embeddings=tie,
            rope_parameters={"rope_theta": 500.0, **rope_parameters},
            attn_implementation="eager",
        )
    ).eval()
    names = {
        "embedding.": "model.embed_tokens.",
        "blocks.": "model.layers.",
        ".attention.": ".self_attn.",
        ".attention_norm.": ".input_layernorm.",
        ".feed_forward_norm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        renamed = "model.norm.weight" if name == "norm.weight" else name
        for ours, theirs in names.items():
            renamed = renamed.replace(ours, theirs)
        state[renamed] = tensor
    llama.load_state_dict(state)
    input_ids, positions = tokens(2, 17), torch.arange(5, 22).expand(2, 17)
    with torch.no_grad():
        ours, theirs = model(input_ids, positions), llama(input_ids, position_ids=positions).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_linear_scaling_reads_every_sixteenth_position_as_the_next_one():
    model, stretched = tiny(positions="rope"), tiny(positions="rope", rope_factor=16.0)
    with torch.no_grad():
        torch.testing.assert_close(stretched(tokens(1, 9), 16 * torch.arange(9)[None]), model(tokens(1, 9)))


def test_llama3_scaling_stretches_only_the_long_waves():
    config = replace(TINY, positions="rope", head_dim=64, rope_factor=16.0, rope_scaling="llama3")
    ratio = inverse_frequency(config) / inverse_frequency(replace(config, rope_factor=1.0))
    assert (ratio[0], ratio[-1]) == (1.0, 1 / 16)
    assert (ratio.diff() <= 1e-6).all()


def test_nape_gives_half_of_the_heads_slopes_and_the_rest_none():
    torch.testing.assert_close(
        alibi_slopes(replace(TINY, q_heads=8)), torch.tensor([1, 1 / 2, 1 / 3, 1 / 4, 0, 0, 0, 0])
    )
    torch.testing.assert_close(alibi_slopes(replace(TINY, positions="alibi")), torch.tensor([1, 1 / 2, 1 / 3, 1 / 4]))
    assert alibi_slopes(replace(TINY, positions="rope")) is None
    # the slopes follow from the number of heads
    assert not [name for name in tiny(positions="alibi").state_dict() if "slopes" in name]


def test_the_position_bias_is_slope_times_key_minus_query():
    attention = EagerAttention(TINY, record=True)
    query = torch.zeros(1, 4, 4, 8)
    attention(0, query, query[:, :, :2], query[:, :, :2], None, alibi_slopes(TINY))
    biases = torch.tensor([[-3.0, -2.0, -1.0, 0.0]]) * torch.tensor([1, 1 / 2, 0, 0]).unsqueeze(-1)
    torch.testing.assert_close(attention.weights[0][0, :, 3], biases.softmax(-1))


def test_heads_without_position_see_a_set():
    model = tiny(layers=1, positions="none")
    first = tokens(1, 9)
    second = torch.cat([first[:, torch.tensor([3, 1, 0, 2, 4, 7, 5, 6])], first[:, 8:]], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(first)[:, -1], model(second)[:, -1])
        assert not torch.allclose(tiny(layers=1)(first)[:, -1], tiny(layers=1)(second)[:, -1])


def test_length_scale_applies_to_the_heads_without_position_only():
    seen = []

    def attention(layer, query, key, value, head_params, alibi_slopes, _options):
        seen.append(query)
        return query

    without, with_scale = tiny(norm="entmax"), tiny(norm="sentmax")
    with_scale.load_state_dict(without.state_dict(), strict=False)
    for model in (without, with_scale):
        model.hidden_states(tokens(1, 5), attention=attention)
    plain, scaled = seen[0], seen[TINY.layers]  # the queries of the first layer
    torch.testing.assert_close(scaled[..., :2, :], plain[..., :2, :])
    assert (scaled[..., 2:, :].abs() > plain[..., 2:, :].abs()).all()


def test_attention_can_be_replaced_and_sees_every_layer():
    model = tiny(norm="ssa")
    layers = []

    def attention(layer, query, key, value, head_params, alibi_slopes, _options):
        layers.append(layer)
        assert query.shape == (2, 5, 4, 8)
        assert key.shape == value.shape == (2, 5, 2, 8)
        assert head_params.shape == (4, 2)
        assert alibi_slopes.shape == (4,)
        return EagerAttention(model.config)(layer, query, key, value, head_params, alibi_slopes)

    input_ids = tokens(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids, attention=attention), model(input_ids))
        torch.testing.assert_close(model.lm_head(model.hidden_states(input_ids)), model(input_ids))
    assert layers == [0, 1]


def test_recorded_weights_give_the_entropy_of_every_head():
    model = tiny(norm="entmax")
    attention = EagerAttention(model.config, record=True)
    with torch.no_grad():
        model(tokens(2, 6), attention=attention)
        model(tokens(2, 6), attention=attention)
    assert [weights.shape for weights in attention.weights] == [(2, 4, 6, 6)] * 2
    for weights in attention.weights:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
        assert (entropy(weights)[:, :, 0] == 0).all()


@pytest.mark.parametrize(("norm", "positions"), [("ssa", "nape"), ("asentmax", "rope")])
def test_torch_export_takes_any_number_of_tokens(norm, positions):
    model = tiny(norm=norm, positions=positions)

    class Head(torch.nn.Module):
        """The model's body and head around an attention function that stands for the exporter's op."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids, positions):
            return self.model(input_ids, positions, lambda layer, query, *_: query)

    tokens_dim = torch.export.Dim("tokens", min=1, max=256)
    example = (tokens(1, 7), torch.arange(7)[None])
    program = torch.export.export(Head(), example, dynamic_shapes=({1: tokens_dim}, {1: tokens_dim}), strict=False)
    for length in (1, 11):
        arguments = (tokens(1, length), torch.arange(length)[None])
        torch.testing.assert_close(program.module()(*arguments), Head()(*arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"positions": "learned"}, "positions is 'learned'.*nape"),
        ({"positions": "rope", "head_dim": 7}, "even"),
        ({"q_heads": 1, "kv_heads": 1}, "at least 2"),
        ({"norm": "softmin"}, "softmin"),
        ({"norm": "entmax", "alpha": 1.0}, "alpha is 1.0"),
        ({"max_context": 16}, "max_context is 16"),
        ({"temperature_coefficients": ()}, "temperature_coefficients"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_factor": 0.5}, "rope_factor is 0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'.*llama3"),
        ({"causal": 1}, "causal is 1"),
        ({"tokenizer": "words"}, "tokenizer is 'words'.*bytes"),
        ({"tokenizer": "bytes"}, "vocab_size is 50.*257"),
        ({"eos_token_ids": (50,)}, "special token 50"),
    ],
)
def test_a_configuration_that_no_model_can_have_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        replace(TINY, **changes)


def test_alpha_comes_from_the_norm_unless_it_is_given():
    assert replace(TINY, norm="sparsemax", alpha=0.0).alpha == 2.0
    assert replace(TINY, norm="entmax", alpha=1.25).alpha == 1.25
