"""Another norm than softmax in the attention of a model of transformers, and how it is attached."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sharp.models.config import check_gamma, check_length_onset, check_norm_options
from sharp.models.normalized_attention import normalized_attention
from sharp.models.norms import Norm, SsaParameters, SsaValues, get_norm
from sharp.models.positions import slopes_of
from sharp.models.query_scale import QueryScale
from sharp.plugins.errors import InputError
from sharp.plugins.ops.schema import DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.ops.torch_normalizers import DEFAULT_TEMPERATURE

MODEL_TYPE = "sharp_adapted"  # also the name of the attention implementation
PROBE = "sharp_probe"
NORM_MODULE = "sharp_norm"
Positions = Literal["own", "none", "alibi", "nape"]
VERSION = 2  # 1 had other forms of the length scales


@dataclass(frozen=True)
class AdaptedNorm:
    """The entry "sharp" of `config.json`: the norm of every layer.

    `attention_modules` are the modules that call transformers' attention interface, by layer. With `scaled_queries`
    each head's query has a learned factor of its own; it is false where that factor is part of the weights.
    `trained_context` is the longest sequence of the adaptation. `positions` other than "own" are in place of the rotary
    embedding of the model, `softcap` and `scale` in place of its own. Only the last `scaled_heads` have a length scale.
    `length_onset` is where log-power and llama4 begin; None is `trained_context`.

    Raises:
        InputError: no model can have this norm; the message names the field.
    """

    norm: str
    attention_modules: tuple[str, ...]
    q_heads: int
    hidden_size: int
    trained_context: int
    alpha: float = 1.5
    temperature_coefficients: tuple[float, ...] = DEFAULT_TEMPERATURE
    entropy_threshold: float = DEFAULT_ENTROPY_THRESHOLD
    scaled_queries: bool = False
    gamma: float | None = None
    positions: Positions = "own"
    softcap: float | None = None
    scale: float | None = None
    scaled_heads: int | None = None
    length_onset: int | None = None
    version: int = 1  # of what the norm's parameters mean; content without it is of the first

    def __post_init__(self) -> None:
        for name in ("attention_modules", "temperature_coefficients"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        get_norm(self.norm)
        check_norm_options(self.alpha, 1.0, self.temperature_coefficients, self.entropy_threshold)
        check_gamma(self.gamma, self.norm)
        if self.positions not in get_args(Positions):
            raise InputError(f"positions is {self.positions!r}, but must be one of: {', '.join(get_args(Positions))}")
        check_length_onset(self.length_onset, self.norm)
        if self.scaled_heads is not None and not 1 <= self.scaled_heads <= self.q_heads:
            raise InputError(f"scaled_heads is {self.scaled_heads}, but must be from 1 to q_heads ({self.q_heads})")

    @property
    def scheme(self) -> Norm:
        """The registry's entry."""
        return get_norm(self.norm)


def read_adapted_norm(content: object) -> AdaptedNorm:
    """The entry "sharp" of a `config.json`.

    Raises:
        InputError: it is missing or damaged.
    """
    if not isinstance(content, dict):
        raise InputError("config.json has no entry 'sharp', which says the norm of an adapted model; copy it again")
    try:
        read = AdaptedNorm(**content)
    except TypeError as error:
        raise InputError(f"the entry 'sharp' of config.json is damaged: {error}; copy the model again") from error
    if read.version != VERSION and read.scheme.scale_kind != "none":
        raise InputError(
            f"the model has norm {read.norm} of version {read.version}, whose parameters are others than those of this "
            f"Sharp's version {VERSION}; adapt its base model again with sharp adapt"
        )
    return read


class AttentionNorm(nn.Module):
    """What one attention module's norm has learned, and where the query's position and the module's input reach it."""

    def __init__(self, described: AdaptedNorm) -> None:
        super().__init__()
        self.described = described
        scheme, q_heads = described.scheme, described.q_heads
        self.log_scale = nn.Parameter(torch.zeros(q_heads)) if described.scaled_queries else None
        self.head_parameters: SsaParameters | SsaValues | None = None
        if scheme.head_parameters:
            self.head_parameters = SsaParameters(q_heads)
        self.query_scale = None
        if scheme.scale_kind != "none":
            scaled = q_heads if described.scaled_heads is None else described.scaled_heads
            self.query_scale = QueryScale(
                scheme.scale_kind,
                described.hidden_size,
                (False,) * (q_heads - scaled) + (True,) * scaled,
                max(2, described.trained_context),
                described.gamma,
            )
            if described.length_onset is not None:
                self.query_scale.onset = described.length_onset

        self.active = True  # False: plain softmax, as the model was before
        self.observer: Callable[[Tensor, Tensor, dict[str, Any]], None] | None = None
        self._input: list[Tensor] = []  # a list, as torch.export allows no tensor to be set on a module

    def see_input(self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The forward pre-hook of the attention module: scales that depend on the token read its input."""
        self._input[:] = [named["hidden_states"] if "hidden_states" in named else arguments[0]]

    def scale_query(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Query [batch, tokens, q_heads, head_dim] with its learned factors, and the length scale among them.

        `positions` and the scale are [batch, tokens] and [batch, tokens, q_heads].
        """
        if self.log_scale is not None:
            query = query * torch.exp(self.log_scale).to(query.dtype).unsqueeze(-1)
        if self.query_scale is None:
            return query, None
        hidden = self._input.pop() if self._input else query  # of which only scales by token read values
        factor: Tensor = self.query_scale(hidden, positions)
        return query * factor.unsqueeze(-1).to(query.dtype), factor

    def head_params(self) -> Tensor | None:
        """Of ssa, [q_heads, 2]."""
        return None if self.head_parameters is None else self.head_parameters()

    def alibi_slopes(self) -> Tensor | None:
        """[q_heads] where the model has ALiBi in place of its own positions."""
        return slopes_of(self.described.positions, self.described.q_heads)

    def logit_options(self, scale: float | None, softcap: float) -> tuple[float | None, float]:
        """The scale and the cap of the logits, given those of the model."""
        described = self.described
        return (
            scale if described.scale is None else described.scale,
            softcap if described.softcap is None else described.softcap,
        )


def is_local(module: nn.Module) -> bool:
    """Whether `module` is attention of an encoder to near tokens on either side: softmax, whatever the model's norm."""
    window = getattr(module, "sliding_window", None)
    # A decoder's attention that was told to look both ways is none: the exporter says so of the whole model.
    both_ways = getattr(getattr(module, "config", None), "use_bidirectional_attention", False)
    return isinstance(window, int) and getattr(module, "is_causal", True) is False and not both_ways


def adapted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query [batch, q_heads, tokens, head_dim], already rotated -> [batch, tokens, ...]."""
    if is_local(module):
        # The mask says what is near; there is none where everything is.
        softmax = normalized_attention(query, key, value, scale=kwargs.get("scaling"), mask=attention_mask)
        return softmax.transpose(1, 2), None
    norm: AttentionNorm = module.sharp_norm  # type: ignore[assignment]  # modules have any attribute
    described, window = norm.described, kwargs.get("sliding_window")
    causal = getattr(module, "is_causal", True)
    scale, softcap = norm.logit_options(kwargs.get("scaling"), kwargs.get("softcap") or 0.0)
    options: dict[str, Any] = {
        "sinks": kwargs.get("s_aux"),
        "scale": scale,
        "softcap": softcap,
        "causal": causal and attention_mask is None,  # a mask says all
        "window": -1 if window is None or attention_mask is not None else window,
        "mask": attention_mask,
    }
    if norm.active:
        tokens, keys = query.shape[2], key.shape[2]
        positions = kwargs.get("position_ids")
        if not causal:
            seen = query.new_full((1, tokens), keys) if attention_mask is None else attention_mask[:, 0].sum(-1)
            positions = (seen - 1).clamp(min=0)
        elif positions is None:
            positions = torch.arange(keys - tokens, keys, device=query.device)[None]
        query = norm.scale_query(query.transpose(1, 2), positions)[0].transpose(1, 2)
        options |= {
            "norm": described.norm,
            "alpha": described.alpha,
            "head_params": norm.head_params(),
            "temperature_coefficients": described.temperature_coefficients,
            "entropy_threshold": described.entropy_threshold,
            "alibi_slopes": norm.alibi_slopes(),
        }
    if norm.observer is not None:
        norm.observer(query, key, options)
    return normalized_attention(query, key, value, **options).transpose(1, 2), None


transformers.AttentionInterface.register(MODEL_TYPE, adapted_attention)
AttentionMaskInterface.register(MODEL_TYPE, sdpa_mask)


def find_attention(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the modules that call transformers' attention interface, in the order of their calls."""
    found: list[nn.Module] = []

    def probe(module: nn.Module, query: Tensor, *_arguments: Any, **_named: Any) -> tuple[Tensor, None]:
        found.append(module)
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register(PROBE, probe)
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    with torch.no_grad():
        device = next(model.parameters()).device
        model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    model.set_attn_implementation(before or "eager")
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(names[id(module)] for module in found if not is_local(module))


def attach(model: PreTrainedModel, described: AdaptedNorm) -> None:
    """Give every attention module of `model` the norm, with start values.

    Raises:
        InputError: the model has no such modules.
    """
    for name in described.attention_modules:
        try:
            attention = model.get_submodule(name)
        except AttributeError as error:
            raise InputError(f"the entry 'sharp' of config.json names {name}, which the model does not have") from error
        with torch.device("cpu"):  # transformers makes models on the meta device
            norm = AttentionNorm(described)
        attention.add_module(NORM_MODULE, norm)
        if described.positions != "own":
            remove_rotary_embedding(model)
        if described.scheme.scale_kind == "token":
            attention.register_forward_pre_hook(norm.see_input, with_kwargs=True)


def remove_rotary_embedding(model: nn.Module) -> None:
    """Make every rotary embedding of `model` one that rotates by nothing.

    Raises:
        InputError: it has none.
    """
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not found:
        raise InputError("its positions cannot be replaced, as it has no rotary embedding; choose positions own")
    for module in found:
        module.register_forward_hook(
            lambda _module, _arguments, angles: (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
        )


def attention_norms(model: nn.Module) -> list[AttentionNorm]:
    """The norms of all layers."""
    return [module for module in model.modules() if isinstance(module, AttentionNorm)]


@contextmanager
def plain_softmax(model: nn.Module) -> Iterator[None]:
    """Inside, `model` attends as before it got its norm; its weights are what they are."""
    norms = attention_norms(model)
    for norm in norms:
        norm.active = False
    try:
        yield
    finally:
        for norm in norms:
            norm.active = True
