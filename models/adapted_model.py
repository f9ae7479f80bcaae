"""Another norm than softmax in the attention of a transformers model, and the functions that attach the norm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sharp.core.errors import InputError
from sharp.models.config import check_gamma, check_length_onset, check_norm_options
from sharp.models.normalized_attention import normalized_attention
from sharp.models.norms import NormDefinition, get_norm
from sharp.models.positions import slopes_of
from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SsaParameters, SsaValues
from sharp.plugins.op.schema import DEFAULT_ENTROPY_THRESHOLD
from sharp.plugins.op.torch_normalizers import DEFAULT_TEMPERATURE

MODEL_TYPE = "sharp_adapted"  # also the name of the attention implementation
PROBE = "sharp_probe"
NORM_MODULE = "sharp_norm"
Positions = Literal["own", "none", "alibi", "nape"]
VERSION = 2  # version 1 had other forms of the length scales


@dataclass(frozen=True)
class AdaptedNorm:
    """The entry "sharp" of `config.json`: the norm of every layer.

    `attention_modules` are the modules that call transformers' attention interface, by layer. `scaled_queries` says
    that each head's query has a learned factor that is not yet part of the weights. `trained_context` is the longest
    sequence of the adaptation. `positions` other than "own" replace the rotary embedding of the model; `softcap` and
    `scale` replace those of the model unless None. Only the last `scaled_heads` heads have a length scale.
    `length_onset` is the length from which log-power and llama4 scale; None means `trained_context`. `softmax_heads`
    are the query heads of every layer that keep softmax, without a factor or a length scale; the tuple is empty if no
    head does.

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
    softmax_heads: tuple[tuple[int, ...], ...] = ()
    version: int = 1  # version of the meaning of the norm's parameters; entries without a version are of version 1

    def __post_init__(self) -> None:
        for name in ("attention_modules", "temperature_coefficients"):  # JSON has lists, not tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "softmax_heads", tuple(tuple(heads) for heads in self.softmax_heads))
        get_norm(self.norm)
        check_norm_options(self.alpha, 1.0, self.temperature_coefficients, self.entropy_threshold)
        check_gamma(self.gamma, self.norm)
        if self.positions not in get_args(Positions):
            raise InputError(f"positions is {self.positions!r}, but must be one of: {', '.join(get_args(Positions))}")
        check_length_onset(self.length_onset, self.norm)
        if self.scaled_heads is not None and not 1 <= self.scaled_heads <= self.q_heads:
            raise InputError(f"scaled_heads is {self.scaled_heads}, but must be from 1 to q_heads ({self.q_heads})")
        if self.softmax_heads and len(self.softmax_heads) != len(self.attention_modules):
            raise InputError(
                f"softmax_heads has {len(self.softmax_heads)} layers, but must have {len(self.attention_modules)}"
            )
        if outside := [head for heads in self.softmax_heads for head in heads if not 0 <= head < self.q_heads]:
            raise InputError(f"softmax_heads names head {outside[0]}, but heads are from 0 to {self.q_heads - 1}")

    @property
    def scheme(self) -> NormDefinition:
        """The norm's entry in the registry."""
        return get_norm(self.norm)

    def heads_of(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the query heads of a layer (0-based) that have the norm, and the query heads that keep softmax."""
        kept = self.softmax_heads[layer] if self.softmax_heads else ()
        return tuple(head for head in range(self.q_heads) if head not in kept), kept


def read_adapted_norm(content: object) -> AdaptedNorm:
    """Parse the entry "sharp" of a `config.json`, given as parsed JSON.

    Raises:
        InputError: the entry is missing, damaged, or of a version whose parameters had another meaning.
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


# observer(query heads, their query, key and value, options of normalized_attention), once for each norm of a layer
Observer = Callable[[tuple[int, ...], Tensor, Tensor, Tensor, dict[str, Any]], None]


class AttentionNorm(nn.Module):
    """The norm of one attention module: its learned parameters, and the factors that it gives to the query.

    `active` is False while the module attends with plain softmax. `observer`, if set, is called once for each norm of
    the layer in every attention call, with the query heads, their query, key and value [batch, heads, tokens, dim], and
    the keyword arguments of `normalized_attention`. `mixing`, if set, multiplies each head's output.
    """

    def __init__(self, described: AdaptedNorm, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.describe(described)
        self.active = True  # False means plain softmax, as in the model without the norm
        self.observer: Observer | None = None
        self.mixing: Tensor | None = None  # [q_heads, value_dim, value_dim]; only while `sharp adapt` runs
        self._input: list[Tensor] = []  # a list, because torch.export allows no tensor to be set on a module

    def describe(self, described: AdaptedNorm) -> None:
        """Replace the parameters by those of the norm `described`, with start values, on the default device."""
        self.described = described
        layer = self.layer
        scheme, q_heads = described.scheme, described.q_heads
        self.log_scale = nn.Parameter(torch.zeros(q_heads)) if described.scaled_queries else None
        self.head_parameters: SsaParameters | SsaValues | None = None
        if scheme.head_parameters:
            self.head_parameters = SsaParameters(q_heads)
        self.query_scale = None
        if scheme.scale_kind != "none":
            scaled = q_heads if described.scaled_heads is None else described.scaled_heads
            own, _ = described.heads_of(layer)
            self.query_scale = QueryScale(
                scheme.scale_kind,
                described.hidden_size,
                tuple(head in own and head >= q_heads - scaled for head in range(q_heads)),
                max(2, described.trained_context),
                described.gamma,
            )
            if described.length_onset is not None:
                self.query_scale.onset = described.length_onset

    def see_input(self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the input of the attention module, as its forward pre-hook, for the next call of `scale_query`.

        Only scales that depend on the token read the input.
        """
        self._input[:] = [named["hidden_states"] if "hidden_states" in named else arguments[0]]

    def scale_query(self, query: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply the query [batch, tokens, q_heads, head_dim] with its learned factors.

        The second result is the length scale [batch, tokens, q_heads], which is one of the factors, or None.
        `positions` [batch, tokens] are one less than the number of keys that a token sees. A scale that depends on the
        token needs a call of `see_input` before.
        """
        if self.log_scale is not None:
            query = query * torch.exp(self.log_scale).to(query.dtype).unsqueeze(-1)
        if self.query_scale is None:
            return query, None
        hidden = self._input.pop() if self._input else query  # other scales than those by token read no values of it
        factor: Tensor = self.query_scale(hidden, positions)
        return query * factor.unsqueeze(-1).to(query.dtype), factor

    def head_params(self) -> Tensor | None:
        """Return b and n of ssa [q_heads, 2]; None for other norms."""
        return None if self.head_parameters is None else self.head_parameters()

    def alibi_slopes(self) -> Tensor | None:
        """Return ALiBi's slopes [q_heads] if ALiBi or NAPE replaces the model's positions; otherwise None."""
        return slopes_of(self.described.positions, self.described.q_heads)

    def logit_options(self, scale: float | None, softcap: float) -> tuple[float | None, float]:
        """Return the scale and the cap of the logits: those of the norm, or else the model's `scale` and `softcap`.

        A scale of None means head_dim^-0.5, a cap of 0 none.
        """
        described = self.described
        return (
            scale if described.scale is None else described.scale,
            softcap if described.softcap is None else described.softcap,
        )


def is_local(module: nn.Module) -> bool:
    """Whether `module`, an attention module, is an encoder's attention to near tokens on both sides.

    Such attention keeps softmax under any norm.
    """
    window = getattr(module, "sliding_window", None)
    # A decoder's attention that is configured to look both ways does not count; the exporter judges the whole model.
    both_ways = getattr(getattr(module, "config", None), "use_bidirectional_attention", False)
    return isinstance(window, int) and getattr(module, "is_causal", True) is False and not both_ways


def adapted_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface, with the norm that `attach` gave to `module`.

    `query` is [batch, q_heads, tokens, head_dim], `key` and `value` are [batch, kv_heads, keys, dim], with rotary
    positions applied. `attention_mask` is bool [batch, 1 or q_heads, tokens, keys], True where a key is visible; None
    means that the module is causal, with its window, or not. Of `kwargs`, scaling, softcap, sliding_window, s_aux
    (sinks) and position_ids are read. The output is [batch, tokens, q_heads, value_dim]; no weights are returned.
    """
    if is_local(module):
        # The mask hides keys that are not near. There is no mask if all keys are near.
        softmax = normalized_attention(query, key, value, scale=kwargs.get("scaling"), mask=attention_mask)
        return softmax.transpose(1, 2).contiguous(), None
    norm: AttentionNorm = module.sharp_norm  # type: ignore[assignment]  # `attach` has added this module
    described, window = norm.described, kwargs.get("sliding_window")
    causal = getattr(module, "is_causal", True)
    scale, softcap = norm.logit_options(kwargs.get("scaling"), kwargs.get("softcap") or 0.0)
    options: dict[str, Any] = {
        "sinks": kwargs.get("s_aux"),
        "scale": scale,
        "softcap": softcap,
        "causal": causal and attention_mask is None,  # a mask includes causality
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
    own, kept = described.heads_of(norm.layer) if norm.active else (tuple(range(query.shape[1])), ())
    if not kept:
        if norm.observer is not None:
            norm.observer(own, query, key, value, options)
        return _finished(norm, normalized_attention(query, key, value, **options)), None
    output = query.new_empty(*query.shape[:3], value.shape[3])
    for heads, changed in ((own, {}), (kept, {"norm": "softmax", "head_params": None})):
        if heads:
            part = [_of_heads(tensor, heads, query.shape[1]) for tensor in (query, key, value)]
            given = _options_of(heads, options | changed)
            if norm.observer is not None:
                norm.observer(heads, *part, given)
            output[:, list(heads)] = normalized_attention(*part, **given)
    return _finished(norm, output), None


def _finished(norm: AttentionNorm, output: Tensor) -> Tensor:
    """Return an attention output as [batch, tokens, q_heads, value_dim], with the corrections of `norm` if it has them.

    `output` is [batch, q_heads, tokens, value_dim].
    """
    if norm.active and norm.mixing is not None:
        output = output @ norm.mixing.to(output.dtype)
    return output.transpose(1, 2).contiguous()


def _of_heads(tensor: Tensor, heads: tuple[int, ...], q_heads: int) -> Tensor:
    """Select query, key or value [batch, heads, tokens, dim] of some query heads.

    KV heads are taken once if the query heads are whole groups, and otherwise once per query head.
    """
    group = q_heads // tensor.shape[1]
    chosen = [head // group for head in heads]
    whole = len(heads) == group * len(set(chosen)) and list(heads) == sorted(heads)
    return tensor[:, list(dict.fromkeys(chosen)) if whole else chosen]


def _options_of(heads: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with sinks, head_params, slopes and mask reduced to the query heads `heads`."""
    of_head = ("sinks", "head_params", "alibi_slopes")
    given = {name: options[name][list(heads)] for name in of_head if options.get(name) is not None}
    mask = options["mask"]
    if mask is not None and mask.shape[1] > 1:
        given["mask"] = mask[:, list(heads)]
    return options | given


transformers.AttentionInterface.register(MODEL_TYPE, adapted_attention)
AttentionMaskInterface.register(MODEL_TYPE, sdpa_mask)


def find_attention(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the modules that call transformers' attention interface, in the order of their calls.

    The model runs once over two tokens, without gradients. Modules for which `is_local` holds are left out.
    """
    found: list[nn.Module] = []

    def probe(
        module: nn.Module, query: Tensor, _key: Tensor, value: Tensor, *_arguments: Any, **_named: Any
    ) -> tuple[Tensor, None]:
        found.append(module)
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None

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
    """Give every attention module of `model` that `described` names the norm, with start values, in place.

    The norm is in use once the model's attention implementation is `MODEL_TYPE` (`set_attn_implementation`).

    Raises:
        InputError: the model does not have a module, or has no rotary embedding that other positions could replace.
    """
    for layer, name in enumerate(described.attention_modules):
        try:
            attention = model.get_submodule(name)
        except AttributeError as error:
            raise InputError(f"the entry 'sharp' of config.json names {name}, which the model does not have") from error
        with torch.device("cpu"):  # transformers makes models on the meta device
            norm = AttentionNorm(described, layer)
        attention.add_module(NORM_MODULE, norm)
        if described.positions != "own":
            remove_rotary_embedding(model)
        if described.scheme.scale_kind == "token":
            attention.register_forward_pre_hook(norm.see_input, with_kwargs=True)


def remove_rotary_embedding(model: nn.Module) -> None:
    """Make every rotary embedding of `model` rotate by no angle, in place.

    Raises:
        InputError: the model has no rotary embedding.
    """
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not found:
        raise InputError("its positions cannot be replaced, as it has no rotary embedding; choose positions own")
    for module in found:
        module.register_forward_hook(
            lambda _module, _arguments, angles: (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
        )


def attention_norms(model: nn.Module) -> list[AttentionNorm]:
    """Return the norms of all layers, in the order of the model's modules; empty if the model has none."""
    return [module for module in model.modules() if isinstance(module, AttentionNorm)]


@contextmanager
def plain_softmax(model: nn.Module) -> Iterator[None]:
    """Let `model` attend with plain softmax inside the context, as without its norm; the weights stay as they are.

    Afterwards all norms are active, even those that were not before.
    """
    norms = attention_norms(model)
    for norm in norms:
        norm.active = False
    try:
        yield
    finally:
        for norm in norms:
            norm.active = True
