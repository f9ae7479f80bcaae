"""`MaxRetrieval`, the set model of Velickovic et al., "softmax is not enough" (ICML 2025), appendix A.

One attention head with one query attends to a set of items, and its output is classified. The normalizer is any of the
registry, so the same model shows how each normalizer keeps or loses the maximum as sets grow.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sharp.core.errors import InputError
from sharp.models.attention import AttentionFunction, LayerOptions
from sharp.models.config import MOST_SIZE, check_gamma, check_norm_options
from sharp.models.norms import NormDefinition, get_norm
from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SsaParameters
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE, attention_weights


@dataclass(frozen=True)
class MaxRetrievalConfig:
    """The sizes of App. A.2-A.3 and the attention scheme.

    `alpha` 0 means the norm's default. `temperature` is that of norm fixed-temperature. `gamma` fixes the exponent of
    learned length scales (`QueryScale`). `trained_items` is the largest set seen in training, at which SSMax starts
    near plain softmax.

    Raises:
        InputError: a field has a value that no model can have; the message names field, value and limit.
    """

    classes: int = 10
    hidden_size: int = 128
    norm: str = "softmax"
    trained_items: int = 16
    alpha: float = 0.0
    gamma: float | None = None
    temperature: float = 1.0
    temperature_coefficients: tuple[float, ...] = DEFAULT_TEMPERATURE
    entropy_threshold: float = 0.5

    def __post_init__(self) -> None:
        norm = get_norm(self.norm)
        if self.alpha == 0.0:
            object.__setattr__(self, "alpha", norm.alpha)
        object.__setattr__(
            self, "temperature_coefficients", tuple(self.temperature_coefficients)
        )  # JSON has lists, not tuples
        for field, least in (("classes", 2), ("hidden_size", 1), ("trained_items", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_SIZE:
                raise InputError(f"{field} is {value!r}, but must be a whole number from {least} to {MOST_SIZE}")
        check_gamma(self.gamma, self.norm)
        check_norm_options(self.alpha, self.temperature, self.temperature_coefficients, self.entropy_threshold)

    @property
    def scheme(self) -> NormDefinition:
        """The entry of `norm` in the registry."""
        return get_norm(self.norm)

    @property
    def scale(self) -> float:
        """The factor of the logits q k: hidden_size^-0.5, divided by the temperature under norm fixed-temperature."""
        return float(self.hidden_size**-0.5) / (self.temperature if self.norm == "fixed-temperature" else 1.0)


class MaxRetrieval(nn.Module):
    """The model of Eq. 9-14, which embeds items and query, attends once, and classifies.

    psi_x, psi_q and phi are two-layer MLPs with (tanh) GELU, as in the paper's Flax listing: psi_x ends in an
    activation, psi_q does not, and the attention has biases and an output projection. Logits are divided by
    sqrt(hidden_size), as in the Flax module of the listing. The theta of the ASEntmax paper's Table 5 is this divisor,
    sqrt(hidden_size) times our temperature.

    With `adaptive-temperature`, training uses plain softmax, as the paper adapts the temperature at inference only.
    """

    def __init__(self, config: MaxRetrievalConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        gelu = nn.GELU(approximate="tanh")
        self.embed_item = nn.Sequential(
            nn.Linear(1 + config.classes, size), gelu, nn.Linear(size, size), gelu
        )  # psi_x, Eq. 9
        self.embed_query = nn.Sequential(nn.Linear(1, size), gelu, nn.Linear(size, size))  # psi_q, Eq. 10
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.o_proj = nn.Linear(size, size)
        self.classify = nn.Sequential(nn.Linear(size, size), gelu, nn.Linear(size, config.classes))  # phi, Eq. 14
        scheme = config.scheme
        self.head_parameters = SsaParameters(1) if scheme.head_parameters else None
        self.query_scale = (
            None
            if scheme.scale_kind == "none"
            else QueryScale(scheme.scale_kind, size, (True,), config.trained_items, config.gamma)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as Flax does: normal with variance 1 / inputs, truncated at two standard deviations; biases 0."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("query_scale."):
                std = module.in_features**-0.5 / 0.87962566  # corrects for the variance that truncation removes
                nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
                nn.init.zeros_(module.bias)

    def projected_query(self, items: Tensor, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return Q q with its length scale [sets, hidden_size], and the scale [sets, 1 query, 1 head] or None.

        `items` are [sets, items, 1 + classes], of which only the number matters; `query` is [sets, 1].
        """
        embedded_query = self.embed_query(query)  # [sets, hidden_size]
        asked: Tensor = self.q_proj(embedded_query)
        if self.query_scale is None:
            return asked, None
        last = torch.full((items.shape[0], 1), items.shape[1] - 1, device=items.device)  # the query sees all items
        factor: Tensor = self.query_scale(embedded_query.unsqueeze(1), last)
        return asked * factor.squeeze(1).to(asked.dtype), factor

    def attention_logits(self, items: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return scaled logits e (Eq. 11), float32 [sets, items], and embedded items [sets, items, hidden_size]."""
        hidden = self.embed_item(items)  # [sets, items, hidden_size]
        asked, _ = self.projected_query(items, query)
        # K is linear: (Q q) (K h + b) = (K^T Q q) h + (Q q) b, so the query is projected instead of every item.
        logits = torch.einsum("sd,snd->sn", asked @ self.k_proj.weight, hidden) + asked @ self.k_proj.bias[:, None]
        return logits.float() * self.config.scale, hidden

    def attention(self, items: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights alpha (Eq. 12) [sets, items], float32, and embedded items [sets, items, hidden_size]."""
        logits, hidden = self.attention_logits(items, query)
        normalizer = self.config.scheme.normalizer
        learned = None if self.head_parameters is None else self.head_parameters()
        weights = attention_weights(
            "softmax" if self.training and normalizer == "adaptive_softmax" else normalizer,
            logits[:, None, None, :],  # [sets, 1 head, 1 query, items]
            torch.ones((), dtype=torch.bool, device=logits.device),
            head_params=self.config.scheme.own_params(learned, 1),
            alpha=self.config.alpha,
            temperature_coefficients=self.config.temperature_coefficients,
            entropy_threshold=self.config.entropy_threshold,
        )
        return weights[:, 0, 0], hidden

    def forward(self, items: Tensor, query: Tensor, attention: AttentionFunction | None = None) -> Tensor:
        """Return class logits [sets, classes].

        Args:
            items: float [sets, items, 1 + classes]: the priority, then the class as a one-hot vector.
            query: float [sets, 1], which carries no information.
            attention: replaces the attention of this class; it is called with one query and one head.
        """
        if attention is not None:
            hidden = self.embed_item(items).unsqueeze(2)  # [sets, items, 1 head, hidden_size]
            asked, factor = self.projected_query(items, query)
            asked = asked[:, None, None]  # [sets, 1 query, 1 head, hidden_size]
            head_params = None if self.head_parameters is None else self.head_parameters()
            options = LayerOptions(query_factor=factor)
            mixed = attention(0, asked, self.k_proj(hidden), self.v_proj(hidden), head_params, None, options)
            answers: Tensor = self.classify(self.o_proj(mixed[:, 0, 0]))
            return answers
        weights, hidden = self.attention(items, query)
        # V is linear, too, so the weighted mean of the items is projected instead of every item.
        mixed = torch.einsum("sn,snd->sd", weights.to(hidden.dtype), hidden)
        mixed = functional.linear(mixed, self.v_proj.weight) + weights.sum(-1, keepdim=True) * self.v_proj.bias
        outputs: Tensor = self.classify(self.o_proj(mixed))
        return outputs
