"""The decoder and the encoder made from a model of transformers whose attention goes through the hook."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sharp.core import manifest
from sharp.core.manifest import ModelKind, Port, PositionScheme
from sharp.exporter.checkpoints.encoder_heads import Head
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.head_parts import HeadPart, split
from sharp.exporter.sources.hook import HOOK, check_uncapped
from sharp.exporter.sources.norm_options import NO_OPTIONS, norm_parameters
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.models.adapted_model import MODEL_TYPE as ADAPTED
from sharp.models.adapted_model import AttentionNorm, attention_norms, is_local
from sharp.models.attention import DEFAULT_OPTIONS, AttentionFunction, HeadGroup, LayerOptions
from sharp.models.config import SharpConfig
from sharp.models.positions import scaled_heads
from sharp.models.query_scale import QueryScale
from sharp.models.ssa_parameters import SSA_START, SsaValues


class StartParameters(nn.Module):
    """The start values of the parameters of a norm that the checkpoint was not trained with; many norms have none.

    Norms that learn projections or exponents have no start values and must not be given.
    """

    def __init__(self, config: SharpConfig) -> None:
        super().__init__()
        self.norm = config.norm
        self.head_parameters = (
            SsaValues(torch.tensor([SSA_START] * config.q_heads)) if config.scheme.head_parameters else None
        )
        self.query_scale = (
            QueryScale(config.scheme.scale_kind, config.hidden_size, scaled_heads(config), config.trained_context)
            if config.scheme.scale_kind != "none"
            else None
        )

    def around(self, attention: AttentionFunction, last_visible: Tensor) -> AttentionFunction:
        """Return a function that calls `attention` with these parameters and with the query times the length scale.

        `last_visible` int64 [batch, tokens] has the position of the last key that each token sees, for length scales.
        The function raises InputError if a layer caps its logits and the norm has a length scale.
        """
        # QueryScale takes hidden states first. Scales that project them have no start values and do not occur here, so
        # any tensor will do.
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
            """Compute attention with the norm's start values as head parameters and scales of queries."""
            if scale is not None:
                check_uncapped(self.norm, options)
                query, options = query * scale.unsqueeze(-1).to(query.dtype), replace(options, query_factor=scale)
            return attention(layer, query, key, value, head_params, None, options)

        return with_norm


class LearnedParameters(nn.Module):
    """The parameters of the norm that a model was trained with, for example by `sharp adapt`; the model holds them."""

    def __init__(self, model: PreTrainedModel, config: SharpConfig) -> None:
        super().__init__()
        self.norms = nn.ModuleList(attention_norms(model))
        softmax = replace(config, norm="softmax", alpha=0.0, gamma=None)
        heads = [norm.described.heads_of(norm.layer) for norm in attention_norms(model)]
        # One tuple for each layer, empty if all heads of the layer have the norm.
        self.head_norms = [
            (*((HeadGroup(own, config),) if own else ()), HeadGroup(kept, softmax)) if kept else ()
            for own, kept in heads
        ]

    def around(self, attention: AttentionFunction, positions: Tensor) -> AttentionFunction:
        """Return `attention` with these parameters, for tokens at `positions` int64 [batch, tokens].

        The options of each layer get the norms of its heads. For encoders, `positions` has the position of the last key
        that each token sees.
        """

        def with_norm(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            _head_params: Tensor | None,
            _alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            """Compute attention with the layer's learned head parameters, sinks and scales."""
            norm = self.norms[layer]
            assert isinstance(norm, AttentionNorm)
            scale, softcap = norm.logit_options(options.scale, options.softcap)
            query, factor = norm.scale_query(query, positions)
            options = replace(options, scale=scale, softcap=softcap, query_factor=factor, norms=self.head_norms[layer])
            return attention(layer, query, key, value, norm.head_params(), norm.alibi_slopes(), options)

        return with_norm


class HookedDecoder(Decoder):
    """A causal language model of transformers; `learned` says that it was trained with the norm that it now has."""

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
        self.parameters_of_norm = LearnedParameters(model, config) if learned else StartParameters(config)

    def layer_parts(self, layer: int) -> tuple[HeadPart, ...]:
        """Return two parts for a layer some of whose heads kept softmax when the model was adapted, else one part."""
        found = self.parameters_of_norm
        norms = found.head_norms[layer] if isinstance(found, LearnedParameters) else ()
        return split(self.config, norms) if norms else super().layer_parts(layer)

    def head_norms(self) -> tuple[manifest.HeadNorm, ...]:
        """Return the manifest's entries for the heads that kept softmax when the model was adapted."""
        found = self.parameters_of_norm
        layers = found.head_norms if isinstance(found, LearnedParameters) else []
        return tuple(
            manifest.HeadNorm(
                layer=layer,
                heads=norm.heads,
                name=norm.config.norm,
                normalizer=norm.config.scheme.normalizer,
                alpha=norm.config.alpha,
                temperature_coefficients=norm.config.temperature_coefficients,
                entropy_threshold=norm.config.entropy_threshold,
                temperature=norm.config.temperature,
                parameters=norm_parameters(norm.config, NO_OPTIONS, trained=True),
            )
            for layer, norms in enumerate(layers)
            for norm in norms
            if norm.config != self.config
        )

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """Return final hidden states [batch, tokens, hidden] by transformers' code, whose layers call `attention`.

        `input_ids` and `positions` are int64 [batch, tokens]. The model's attention implementation is set to the hook.

        Raises:
            InputError: a layer caps its logits, and the norm scales them with the length.
        """
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
        """Return logits [..., vocab] of hidden states, with the factor and soft cap that some architectures have."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config
        factor = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)  # Cohere, Granite
        if factor != 1:
            logits = logits * factor
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """Compute logits with transformers' own attention, or with that of the trained norm; None for other norms.

        transformers' own attention has softmax only. The attention implementation of the model is set to it.
        """
        if self.config.norm != "softmax" and not self.learned:
            return None
        # Of transformers' own attention implementations, only "eager" has Gemma 2's soft cap.
        self.model.set_attn_implementation(ADAPTED if self.learned else "eager")
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


class HookedEncoder(UncachedModel):
    """An encoder of transformers with one head; `learned` says that it was trained with the norm that it now has."""

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
        self.parameters_of_norm = LearnedParameters(model, config) if learned else StartParameters(config)
        modules = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        local = {module.layer_idx for module in modules if is_local(module)}
        # The layers that the op computes, if standard ops compute the local layers; else empty.
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
        """The name of the dimension of queries. Every token is a query in every layer, whatever the head returns."""
        return "length"

    def compute(self, attention: AttentionFunction, *inputs: Tensor) -> Tensor:
        """Compute the head's output by transformers' code, whose attention goes through the hook to `attention`.

        Layers that attend to near tokens only do not call `attention`; the others are numbered without them. The
        attention implementation of the model is set to the hook.

        Raises:
            InputError: a layer caps its logits, and the norm scales them with the length.
        """
        input_ids, mask, *token_types = inputs
        last_visible = (mask.sum(-1, keepdim=True) - 1).clamp(min=0).expand_as(input_ids)
        self.model.set_attn_implementation(HOOK)
        named: dict[str, object] = {"token_type_ids": token_types[0]} if token_types else {}
        around = self.parameters_of_norm.around(attention, last_visible)
        if self.positions == "rope":  # one row per sequence: ONNX's RotaryEmbedding does not broadcast a batch of 1
            named["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if self.order:
            named["sharp_mask"] = mask
            in_order = around

            def around(layer: int, *arguments: Any) -> Tensor:
                """Compute attention of a module by its index in the order of the layers."""
                return in_order(self.order.index(layer), *arguments)

        if self.head == "classification":  # some models pool by the mean of the tokens without padding
            named["attention_mask"] = mask
        return self._output(input_ids=input_ids, sharp_attention=around, **named)

    def _output(self, **inputs: Any) -> Tensor:
        """Return last hidden states [batch, tokens, hidden_size] for embeddings, else the head's logits."""
        output = self.model(**inputs)
        tensor: Tensor = output.last_hidden_state if self.head == "embedding" else output.logits
        return tensor

    def own_output(self, *inputs: Tensor) -> Tensor | None:
        """Compute the output with transformers' own attention, or with that of the trained norm; None for other norms.

        transformers' own attention has softmax only.
        """
        if self.config.norm != "softmax" and not self.learned:
            return None
        self.model.set_attn_implementation(ADAPTED if self.learned else "eager")
        return self._output(**dict(zip([port.name for port in self.inputs], inputs, strict=True)))

    def attention_mask(self, *inputs: Tensor) -> Tensor | None:
        """Return the second input, the mask int64 [batch, length] with 1 at tokens and 0 at padding; never None.

        At least two inputs must be given; otherwise IndexError is raised.
        """
        return inputs[1]

    def random_inputs(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return random token ids, masks and, if the model has several, token types, all int64 [batch, length].

        The first sequence has no padding, the others any amount.
        """
        padding = self.model.config.pad_token_id
        input_ids = torch.randint(self.config.vocab_size, (batch, length), generator=generator)
        if padding is not None:  # RoBERTa does not count padding tokens in positions, so none may be among the tokens
            input_ids = torch.where(input_ids == padding, (padding + 1) % self.config.vocab_size, input_ids)
        tokens = torch.randint(1, length + 1, (batch, 1), generator=generator)
        tokens[0] = length
        mask = (torch.arange(length) < tokens).long()
        if padding is not None:
            input_ids = torch.where(mask.bool(), input_ids, padding)
        if self.token_types == 1:
            return input_ids, mask
        return input_ids, mask, torch.randint(self.token_types, (batch, length), generator=generator)
