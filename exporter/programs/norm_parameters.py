"""Learned parameters of a program's norm, given by the user as `norm_parameters` of `sharp.export`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.sources.hook import check_uncapped
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SSA_START

NAMES = {
    "ssa": ("b", "n"),
    "ssmax": ("s",),
    "ssmax-bias": ("s", "b"),
    "sentmax": ("beta", "gamma"),
    "assmax": ("w_beta", "w_gamma", "c_beta", "c_gamma"),
    "asentmax": ("w_beta", "w_gamma", "c_beta", "c_gamma"),
    "log-power": ("gamma",),
    "llama4": ("beta",),
}
BIASES = ("c_beta", "c_gamma")  # 0 unless given
# Names of parameters in QueryScale, where they differ from the names that users give.
PARAMETERS = {
    "gamma": "gamma_exponent",
    "w_beta": "w_beta.weight",
    "w_gamma": "w_gamma.weight",
    "c_beta": "w_beta.bias",
    "c_gamma": "w_gamma.bias",
}
NO_START = ("head", "token")  # kinds of scales that have no start values


class ProgramAttention(Protocol):
    """An `AttentionFunction` that also takes the attention block's input, `hidden` [batch, tokens, hidden_size]."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_params: Tensor | None,
        alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
        /,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute attention as an `AttentionFunction` does; `hidden` is given if `NormParameters.reads_hidden`."""
        ...


class NormParameters(nn.Module):
    """The parameters of the norm `config.norm` in every layer: the given values, or else the norm's start values.

    `given` maps a name of a parameter (of ssa b and n; of ssmax s; of ssmax-bias s and b; of sentmax beta and gamma; of
    assmax and asentmax w_beta, w_gamma, c_beta and c_gamma; of log-power gamma; of llama4 beta) to a number, a tensor
    [heads] or [layers, heads], or the name of a tensor [heads] of the module, in which {layer} stands for the layer's
    number. w_beta and w_gamma multiply the input of the attention block, so their last dimension, after the heads, is
    hidden_size. `tensors` are the module's, by name.

    Raises:
        InputError: the norm has no parameter of a given name, a value has another shape, or a parameter without a start
            value is missing.
    """

    ssa: Tensor | None

    def __init__(self, config: SharpConfig, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.own = False
        self.norm = config.norm
        self.reads_hidden = config.scheme.scale_kind == "token"
        names = NAMES.get(config.norm, ())
        for name in given:
            if name not in names:
                known = f"has {' and '.join(names)}" if names else "has none"
                raise InputError(f"norm_parameters names {name!r}, but norm {config.norm} {known}")
        kind = config.scheme.scale_kind
        missing = [name for name in names if name not in given and name not in BIASES]
        if kind in NO_START and missing:
            raise InputError(
                f"it has no parameters for norm {config.norm} (its scale is learned): give {' and '.join(missing)} "
                "with norm_parameters (--norm-parameter), or choose another norm"
            )
        values = {
            name: _per_head(name, value, config, tensors, (config.hidden_size,) if name.startswith("w_") else ())
            for name, value in given.items()
        }
        self.given = bool(values)
        self.register_buffer("ssa", None, persistent=False)
        self.scales = nn.ModuleList()
        if config.scheme.head_parameters:
            shape = (config.layers, config.q_heads)
            b, n = (values.get(name, torch.full(shape, start)) for name, start in zip(names, SSA_START, strict=True))
            if not (b > 0).all() or not (n > 0).all():
                raise InputError("norm_parameters of ssa must have b and n above 0 in every head")
            self.ssa = torch.stack([b, n], dim=-1)  # [layers, heads, 2]
        if kind != "none":
            everywhere = (True,) * config.q_heads
            for layer in range(config.layers):
                scale = QueryScale(kind, config.hidden_size, everywhere, config.trained_context)
                for name, value in values.items():
                    scale.get_parameter(PARAMETERS.get(name, name)).data = value[layer].clone()
                self.scales.append(scale.requires_grad_(False))

    @classmethod
    def of_program(cls, config: SharpConfig) -> "NormParameters":
        """Return empty parameters for a program that keeps its own norm."""
        found = cls(replace(config, norm="softmax"), {}, {})
        found.own = True
        return found

    def fill(self, b: float | None, n: float | None) -> None:
        """Give all heads of ssa the same b and n, in place; None keeps the present values. Other norms ignore both."""
        if self.ssa is not None:
            for column, value in enumerate((b, n)):
                if value is not None:
                    self.ssa[..., column] = value

    def around(self, attention: AttentionFunction, positions: Tensor | None = None) -> ProgramAttention:
        """Return a function that calls `attention` with these parameters and with the query times the length scale.

        A causal query is at its position in `positions` [batch, tokens]; None counts from 0. The function raises
        InputError if a layer caps its logits and the norm has a length scale.
        """

        def with_norm(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
            hidden: Tensor | None = None,
        ) -> Tensor:
            """Compute attention with the norm's head parameters and scales, at the positions of the queries."""
            if self.scales:
                check_uncapped(self.norm, options)
                last = _last_visible(query, key, options, positions)
                factor = self.scales[layer](last if hidden is None else hidden, last)
                query, options = query * factor.unsqueeze(-1).to(query.dtype), replace(options, query_factor=factor)
            if not self.own:
                head_params = None if self.ssa is None else self.ssa[layer]
            return attention(layer, query, key, value, head_params, alibi_slopes, options)

        return with_norm


def _last_visible(query: Tensor, key: Tensor, options: LayerOptions, positions: Tensor | None) -> Tensor:
    """Return the position of the last key that each query sees [batch, queries]."""
    batch, queries = query.shape[:2]
    if options.causal:
        if positions is not None:
            return positions
        return torch.arange(queries, device=query.device).expand(batch, queries)
    if options.total_lens is not None:
        return (options.total_lens[:, None].long() - 1).clamp(min=0).expand(batch, queries)
    return torch.full((batch, queries), 1, device=query.device) * (key.shape[1] - 1)


def _per_head(
    name: str, value: Any, config: SharpConfig, tensors: Mapping[str, Tensor], last: tuple[int, ...]
) -> Tensor:
    """Return a parameter as float32 [layers, heads, *last], from a number, a tensor or the names of tensors.

    Raises:
        InputError: a tensor is missing, has another shape or has numbers that are not finite.
    """
    shape = (config.layers, config.q_heads, *last)
    described = f"{[config.q_heads, *last]} or {list(shape)} (layers, heads{', hidden size' if last else ''})"
    if isinstance(value, str):
        names = [value.format(layer=layer) for layer in range(config.layers)]
        missing = next((tensor_name for tensor_name in names if tensor_name not in tensors), None)
        if missing is not None:
            raise InputError(
                f"norm_parameters names the tensor {missing!r}, which the module does not have; correct the name"
            )
        try:
            value = torch.stack([tensors[tensor_name].detach().float().squeeze() for tensor_name in names])
            value = value.reshape(config.layers, -1, *last).expand(shape)  # one value may stand for all heads
        except RuntimeError as error:
            has = list(tensors[names[0]].shape)
            raise InputError(f"{names[0]!r} of norm_parameters {name!r} has shape {has}, not {described}") from error
    try:
        found = torch.as_tensor(value, dtype=torch.float32).detach().clone().expand(shape).contiguous()
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"norm_parameters {name!r} must be a number or of shape {described}") from error
    if not found.isfinite().all():
        raise InputError(f"norm_parameters {name!r} has numbers that are not finite")
    return found
