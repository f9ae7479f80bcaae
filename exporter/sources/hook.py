"""The attention hook, through which a model of transformers calls an `AttentionFunction`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from sharp.core.errors import InputError
from sharp.models.adapted_model import is_local
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions

HOOK = "sharp"
# The arguments that a model may give its attention. The hook obeys HONORED. IGNORED have no effect on a model that is
# not trained here and has no cache of its own.
HONORED = ("scaling", "sliding_window", "softcap", "s_aux", "sharp_attention", "sharp_mask")
IGNORED = (
    *("dropout", "deterministic", "is_causal", "position_ids", "use_cache", "encoder_hidden_states"),
    *("output_attentions", "output_router_logits"),
)


def hooked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of transformers with `kwargs["sharp_attention"]`.

    `query` is [batch, q_heads, tokens, head_dim] and already rotated; `key` and `value` have KV heads. A layer that
    attends to near tokens on either side, as in some encoders, is computed by `local_attention` instead, with the
    padding mask `kwargs["sharp_mask"]`.

    Returns:
        The output [batch, tokens, q_heads, value_dim], and None for the weights.

    Raises:
        InputError: the layer gives its attention an argument that Sharp's op does not have, or is local and has sinks.
    """
    del attention_mask  # transformers builds no mask for an attention implementation that it does not know
    attention: AttentionFunction = kwargs["sharp_attention"]
    layer: int = module.layer_idx  # type: ignore[assignment]  # modules have any attribute
    window = kwargs.get("sliding_window")
    options = LayerOptions(
        scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap") or 0.0,
        window=-1 if window is None else window,
        sinks=kwargs.get("s_aux"),
    )
    unknown = sorted(name for name, given in kwargs.items() if name not in (*HONORED, *IGNORED) and given is not None)
    if unknown or kwargs.get("dropout"):
        raise InputError(f"its attention uses {(unknown or ['dropout'])[0]}, which Sharp's attention op does not have")
    if is_local(module):
        if options.sinks is not None:
            raise InputError(
                "its attention to near tokens on either side has sinks, which Sharp does not support there"
            )
        scale = kwargs["scaling"] if options.scale is not None else query.shape[-1] ** -0.5
        return local_attention(query, key, value, scale, options.window, kwargs.get("sharp_mask")), None
    heads = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    # transformers' own implementations return contiguous tensors, and Arcee AFM's gate takes a view of the output.
    return attention(layer, *heads, None, None, options).contiguous(), None


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, mask: Tensor | None
) -> Tensor:
    """Compute softmax attention to the keys less than `window` tokens away on either side.

    The op has windows to one side only, so an encoder's local layers are standard ops, without statistics. `query`,
    `key` and `value` are [batch, heads, tokens, dim]. `mask` [batch, tokens] is 0 at padding, where the output has no
    meaning.

    Returns:
        The output [batch, tokens, heads, value_dim].
    """
    positions = torch.arange(query.shape[2], device=query.device)
    hidden = (positions[:, None] - positions).abs() >= window
    if mask is not None:
        hidden = hidden | (mask == 0)[:, None, None, :]
    logits = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, torch.finfo(query.dtype).min)
    return (logits.softmax(-1) @ value).transpose(1, 2)


def check_uncapped(norm: str, options: LayerOptions) -> None:
    """Refuse a layer whose logits are capped, because `norm` lets logits grow with the length, up to the cap only.

    Raises:
        InputError: the layer has a soft cap.
    """
    if options.softcap > 0:
        raise InputError(f"its logits are capped, and norm {norm} would scale them before that; choose another --norm")


transformers.AttentionInterface.register(HOOK, hooked_attention)


@dataclass(frozen=True)
class HeadShape:
    """The sizes that the attention of all layers shares, and the number of these layers."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layers: int  # without the local layers of an encoder
    sinks: bool = False  # whether any layer has attention sinks


def probe_heads(model: PreTrainedModel, run: Callable[[AttentionFunction], object]) -> HeadShape:
    """Run the model once with `run` and return the sizes of the tensors that reach the hook.

    The attention implementation of `model` is set to the hook and stays so. `run` gets an attention function, which
    returns zeros, and must call the model with it as `sharp_attention`.

    Raises:
        InputError: a layer does not call the hook exactly once, or layers differ in their sizes, or a layer uses what
            the op does not have.
    """
    local = sum(is_local(module) for module in model.modules())
    layers = model.config.num_hidden_layers - local
    calls: list[int] = []
    shapes: set[HeadShape] = set()
    with_sinks: set[bool] = set()

    def attention(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _head_params: Tensor | None,
        _alibi_slopes: Tensor | None,
        options: LayerOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        """Record the shape of a layer's heads and return zeros. InputError if values and keys differ in size."""
        calls.append(layer)
        with_sinks.add(options.sinks is not None)
        shapes.add(HeadShape(query.shape[2], key.shape[2], key.shape[3], value.shape[3], layers))
        return value.new_zeros(*query.shape[:3], value.shape[3])

    model.set_attn_implementation(HOOK)
    with torch.no_grad():
        run(attention)
    if len(calls) != layers or (not local and sorted(calls) != list(range(layers))):
        raise InputError(
            f"only {len(set(calls))} of its {layers} layers call transformers' attention interface once, "
            "so their attention cannot be replaced"
        )
    if len(shapes) > 1:
        raise InputError("its layers differ in the number or size of their heads, which the exporter does not support")
    return replace(shapes.pop(), sinks=True in with_sinks)
