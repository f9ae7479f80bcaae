"""`Transformer`, the base of decoder and encoder: pre-norm blocks of grouped-query attention and SwiGLU."""

from torch import Tensor, nn
from torch.nn import functional

from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.positions import RotaryEmbedding, alibi_slopes, rotate, scaled_heads
from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SsaParameters

INITIAL_STD = 0.02


class Attention(nn.Module):
    """The attention of a block: projections, positions and length scale around the attention function."""

    slopes: Tensor | None

    def __init__(self, config: SharpConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.q_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.q_heads * config.head_dim, config.hidden_size, bias=False)
        self.head_parameters = SsaParameters(config.q_heads) if config.scheme.head_parameters else None
        self.query_scale = (
            None
            if config.scheme.scale_kind == "none"
            else QueryScale(
                config.scheme.scale_kind,
                config.hidden_size,
                scaled_heads(config),
                config.trained_context,
                config.gamma,
            )
        )
        self.register_buffer("slopes", alibi_slopes(config), persistent=False)

    def forward(
        self, hidden: Tensor, last_visible: Tensor, rotary: tuple[Tensor, Tensor] | None, attention: AttentionFunction
    ) -> Tensor:
        """Apply attention to `hidden` [batch, tokens, hidden_size]; the result has the same shape.

        `last_visible` int64 [batch, tokens] is one less than the number of keys that a token sees. `rotary` is the
        result of `RotaryEmbedding`, None without RoPE. `attention` computes the attention of this layer.
        """
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, q_heads, head_dim]
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, kv_heads, head_dim]
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        options = DEFAULT_OPTIONS
        if self.query_scale is not None:
            factor = self.query_scale(hidden, last_visible)
            query, options = query * factor.unsqueeze(-1).to(query.dtype), LayerOptions(query_factor=factor)
        head_params = None if self.head_parameters is None else self.head_parameters()
        mixed = attention(self.layer, query, key, value, head_params, self.slopes, options)
        projected: Tensor = self.o_proj(mixed.flatten(-2))
        return projected


class FeedForward(nn.Module):
    """The feed-forward part of a block: SwiGLU, down(silu(gate x) * up x)."""

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply SwiGLU: [..., hidden_size] -> [..., hidden_size]."""
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


class Block(nn.Module):
    """One layer: attention, then feed-forward, each applied after an RMSNorm and added to its input."""

    def __init__(self, config: SharpConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, hidden: Tensor, last_visible: Tensor, rotary: tuple[Tensor, Tensor] | None, attention: AttentionFunction
    ) -> Tensor:
        """Apply the block: [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `last_visible` is the last position that each token sees, `rotary` are cos and sin of RoPE or None, and
        `attention` computes attention.
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), last_visible, rotary, attention)
        output: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Transformer(nn.Module):
    """Embedding, blocks, last norm and output layer; decoder and encoder differ in the visible tokens."""

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config) if config.positions == "rope" else None
        self.reset_parameters()
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Initialize matrices with deviation 0.02, divided by sqrt(2 layers) if they write to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INITIAL_STD / (2 * self.config.layers) ** 0.5 if residual else INITIAL_STD
                nn.init.normal_(parameter, std=std)

    def last_hidden(
        self, input_ids: Tensor, positions: Tensor, last_visible: Tensor, attention: AttentionFunction
    ) -> Tensor:
        """Return the hidden states [batch, tokens, hidden_size] after the last norm, which `lm_head` turns into logits.

        Args:
            input_ids: int64 [batch, tokens].
            positions: int64 [batch, tokens], 0-based, for RoPE.
            last_visible: int64 [batch, tokens], one less than the number of keys that a token sees, for length scales.
            attention: computes the attention of every layer.
        """
        hidden: Tensor = self.embedding(input_ids)
        rotary = None if self.rotary is None else self.rotary(positions)
        for block in self.blocks:
            hidden = block(hidden, last_visible, rotary, attention)
        output: Tensor = self.norm(hidden)
        return output
