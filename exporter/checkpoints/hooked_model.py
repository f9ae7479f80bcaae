"""Models of transformers whose attention goes through the hook, as the decoder or encoder that is exported."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.encoder_heads import Head
from sharp.exporter.checkpoints.hook import HOOK, check_uncapped
from sharp.exporter.checkpoints.uncached_model import UncachedModel
from sharp.models.adapted_model import MODEL_TYPE as ADAPTED
from sharp.models.adapted_model import AttentionNorm, attention_norms, is_local
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.norms import SsaParameters
from sharp.models.positions import scaled_heads
from sharp.models.query_scale import QueryScale
from sharp.plugins.manifest import ModelKind, Port, PositionScheme


class StartParameters(nn.Module):
    """The parameters of a norm that the checkpoint was not trained with, at their start values; none for most norms."""

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.norm = config.norm
        self.head_parameters = SsaParameters(config.q_heads) if config.scheme.head_parameters else None
        self.query_scale = (
            QueryScale(config.scheme.scale_kind, config.hidden_size, scaled_heads(config), config.trained_context)
            if config.scheme.scale_kind != "none"
            else None
        )

    def around(self, attention: AttentionFunction, last_visible: Tensor) -> AttentionFunction:
        """`attention` with these parameters; `last_visible` [batch, tokens] is what length scales grow with."""
        # Only scales without projections have start values, so the hidden states that others project are not needed.
        scale = None if self.query_scale is None else self.query_scale(last_visible, last_visible)
        head_params = None if self.head_parameters is None else self.head_parameters()

        def with_norm(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            _head_params: Tensor | None,
            _alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            if scale is not None:
                check_uncapped(self.norm, options)
                query, options = query * scale.unsqueeze(-1).to(query.dtype), replace(options, query_factor=scale)
            return attention(layer, query, key, value, head_params, None, options)

        return with_norm


class LearnedParameters(nn.Module):
    """The parameters of the norm that `sharp adapt` gave a model; they are in the model itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.norms = nn.ModuleList(attention_norms(model))

    def around(self, attention: AttentionFunction, positions: Tensor) -> AttentionFunction:
        """`attention` with these parameters, for tokens at `positions` [batch, tokens]."""

        def with_norm(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            _head_params: Tensor | None,
            _alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            norm = self.norms[layer]
            assert isinstance(norm, AttentionNorm)
            scale, softcap = norm.logit_options(options.scale, options.softcap)
            query, factor = norm.scale_query(query, positions)
            options = replace(options, scale=scale, softcap=softcap, query_factor=factor)
            return attention(layer, query, key, value, norm.head_params(), norm.alibi_slopes(), options)

        return with_norm


class HookedDecoder(Decoder):
    """A causal language model of transformers; `learned` says that its norm is the one that it was adapted to."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: SharpConfig,
        positions: PositionScheme,
        *,
        learned: bool = False,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self.learned = learned
        self.has_sinks = has_sinks
        self.routed = model._can_set_experts_implementation()
        self.norm_name = config.norm
        self.model = model
        self.config = config
        self.positions = positions
        self.parameters_of_norm = LearnedParameters(model) if learned else StartParameters(config)

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """See `Decoder`."""
        self.model.set_attn_implementation(HOOK)
        output = self.model.base_model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            sharp_attention=self.parameters_of_norm.around(attention, positions),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config
        factor = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)  # Cohere's, Granite's
        if factor != 1:
            logits = logits * factor
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma's
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """By transformers' own attention, which has softmax only, or the one that an adapted model is loaded with."""
        if self.config.norm != "softmax" and not self.learned:
            return None
        # "eager" is the only one of transformers' own that has Gemma 2's soft cap.
        self.model.set_attn_implementation(ADAPTED if self.learned else "eager")
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


class HookedEncoder(UncachedModel):
    """An encoder of transformers with one of its heads; `learned` as for `HookedDecoder`."""

    kind: ModelKind = "encoder"

    def __init__(
        self,
        model: PreTrainedModel,
        config: SharpConfig,
        positions: PositionScheme,
        *,
        learned: bool = False,
        head: Head = "masked-lm",
    ) -> None:
        super().__init__()
        self.learned = learned
        self.head = head
        self.model = model
        self.config = config
        self.positions = positions
        self.parameters_of_norm = LearnedParameters(model) if learned else StartParameters(config)
        modules = [one for one in model.modules() if isinstance(getattr(one, "layer_idx", None), int)]
        local = {one.layer_idx for one in modules if is_local(one)}
        # The numbers of the layers that are the op's, where others are not.
        self.order = [layer for layer in range(model.config.num_hidden_layers) if layer not in local] if local else []
        shape = ("batch", "length")
        self.inputs = (
            Port(name="input_ids", dtype="int64", shape=shape, doc="token ids"),
            Port(
                name="attention_mask", dtype="int64", shape=shape, doc="1 at tokens, then 0 at the padding behind them"
            ),
        )
        self.token_types = getattr(model.config, "type_vocab_size", 1)
        if self.token_types > 1:
            self.inputs += (Port(name="token_type_ids", dtype="int64", shape=shape, doc="0 for the first sentence"),)
        outputs: dict[Head, tuple[str, tuple[str | int, ...], str]] = {
            "masked-lm": ("logits", (*shape, config.vocab_size), "of the token at each position"),
            "embedding": ("hidden_states", (*shape, config.hidden_size), "of the last layer"),
            "classification": ("logits", ("batch", len(model.config.id2label or ())), "of the labels of the text"),
        }
        name, sizes, doc = outputs[head]
        self.output = Port(name=name, dtype="float32", shape=sizes, doc=doc)

    @property
    def queries(self) -> int | str:
        """See `UncachedModel`."""
        return "length"

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """See `UncachedModel`."""
        input_ids, mask, *token_types = inputs
        last_visible = (mask.sum(-1, keepdim=True) - 1).clamp(min=0).expand_as(input_ids)
        self.model.set_attn_implementation(HOOK)
        named: dict[str, object] = {"token_type_ids": token_types[0]} if token_types else {}
        around = self.parameters_of_norm.around(attention, last_visible)
        if self.positions == "rope":  # of every row, as ONNX's RotaryEmbedding has no batch of 1 for all
            named["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if self.order:
            named["sharp_mask"] = mask
            in_order = around

            def around(layer: int, *arguments: Any) -> Tensor:
                return in_order(self.order.index(layer), *arguments)

        if self.head == "classification":  # the mean of some models leaves padding out
            named["attention_mask"] = mask
        return self._output(input_ids=input_ids, sharp_attention=around, **named)

    def _output(self, **inputs: Any) -> Tensor:
        output = self.model(**inputs)
        tensor: Tensor = output.last_hidden_state if self.head == "embedding" else output.logits
        return tensor

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """By transformers' own attention, which has softmax only, or the one of a model's trained norm."""
        if self.config.norm != "softmax" and not self.learned:
            return None
        self.model.set_attn_implementation(ADAPTED if self.learned else "eager")
        return self._output(**dict(zip([port.name for port in self.inputs], inputs, strict=True)))

    def attention_mask(self, *inputs: Tensor) -> Tensor | None:
        """See `UncachedModel`."""
        return inputs[1]

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """See `UncachedModel`; the first sequence has no padding, the others any amount."""
        padding = self.model.config.pad_token_id
        input_ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        if padding is not None:  # RoBERTa counts positions without padding tokens
            input_ids = torch.where(input_ids == padding, (padding + 1) % self.config.vocab_size, input_ids)
        tokens = torch.randint(1, length + 1, (batch, 1), generator=generator)
        tokens[0] = length
        mask = (torch.arange(length) < tokens).long()
        if padding is not None:
            input_ids = torch.where(mask.bool(), input_ids, padding)
        if self.token_types == 1:
            return input_ids, mask
        return input_ids, mask, torch.randint(self.token_types, (batch, length), generator=generator)
