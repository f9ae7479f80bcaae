"""Sharp's models as Hugging Face models. Importing this module registers the model type "sharp" with `AutoModel...`.

    import sharp.models.hugging_face
    to_hugging_face(model).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder).generate(input_ids)

In `config.json`, the entry "sharp" holds the description that our other checkpoints have. The other entries are derived
from the description, for other tools. `sharp.models.checkpoint` reads these folders, too, without transformers.
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    initialization,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

import sharp.models.adapted_config
import sharp.models.trained_attention  # noqa: F401 - registers the implementations of attention
from sharp.core.errors import InputError
from sharp.models.attention import DEFAULT_OPTIONS, EagerAttention, LayerOptions
from sharp.models.byte_tokenizer import END_OF_TEXT, byte_tokenizer
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import VERSION, describe, parse_description
from sharp.models.checkpoint_files import MODEL_TYPE
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.norms import NORMS
from sharp.models.transformer import Transformer


class HuggingFaceConfig(PreTrainedConfig):
    """`SharpConfig` in the form that transformers stores, made by `HuggingFaceConfig(sharp=describe(model))`."""

    model_type = MODEL_TYPE

    sharp: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.sharp is not None:  # transformers makes empty configurations to read the defaults
            config = self.sharp_config
            self.vocab_size = config.vocab_size
            self.hidden_size = config.hidden_size
            self.intermediate_size = config.intermediate_size
            self.num_hidden_layers = config.layers
            self.num_attention_heads = config.q_heads
            self.num_key_value_heads = config.kv_heads
            self.head_dim = config.head_dim
            self.max_position_embeddings = config.max_context
            self.tie_word_embeddings = config.tie_embeddings
            self.bos_token_id = config.bos_token_id
            self.eos_token_id = list(config.eos_token_ids) or None
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def sharp_config(self) -> SharpConfig:
        """The configuration that the model is made from.

        Raises:
            InputError: the entry "sharp" is missing, of another version, or describes no possible model.
        """
        path = self.name_or_path or "the configuration"
        content = dict(self.sharp or {})
        if content.get("version") == 1:  # a norm's weights may have another form, and cannot be upgraded here
            norm = content["config"].get("norm") if isinstance(content.get("config"), dict) else None
            if norm in NORMS and NORMS[norm].scale_kind != "none":
                raise InputError(
                    f"{path} was saved by an earlier Sharp, whose {norm} had other parameters; read it with "
                    "sharp.models.checkpoint.read_checkpoint and save it again"
                )
            content["version"] = VERSION
        _, config = parse_description(path, content)
        if not isinstance(config, SharpConfig):
            raise InputError(f"{path} describes a model that has no Hugging Face form; give a decoder or an encoder")
        return config


class SharpPreTrainedModel(PreTrainedModel):
    """The base class of both wrappers; `model` has the names of our checkpoints, prefixed with "model."."""

    config_class = HuggingFaceConfig
    config: HuggingFaceConfig
    model: Transformer
    _tied_weights_keys = {"model.lm_head.weight": "model.embedding.weight"}  # noqa: RUF012 - transformers' own form
    _no_split_modules = ["Block"]  # noqa: RUF012

    def initialize_weights(self) -> None:
        """Set start values for all that no file holds: new parameters, and buffers, which are never saved."""
        with torch.device("cpu"):  # transformers makes models on the meta device
            fresh = type(self.model)(self.model.config)
        start = {**dict(fresh.named_parameters(remove_duplicate=False)), **dict(fresh.named_buffers())}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            initialization.copy_(tensor, start[name])  # does not change what was loaded

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the module that embeds token ids, as transformers asks for it."""
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the linear layer that turns hidden states into logits, as transformers asks for it."""
        return self.model.lm_head

    def save_pretrained(self, save_directory: str | os.PathLike[Any], *args: Any, **kwargs: Any) -> None:
        """Save the model as transformers does, and with it the tokenizer that the configuration names, if any.

        The arguments are those of transformers.

        Raises:
            InputError: the configuration describes no possible model.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        config = self.config.sharp_config
        if config.tokenizer == "bytes":
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=byte_tokenizer(),
                bos_token=END_OF_TEXT,
                eos_token=END_OF_TEXT,
                pad_token=END_OF_TEXT,
                padding_side="left" if config.causal else "right",  # generation continues at the end of the row
            )
            tokenizer.save_pretrained(save_directory)


class HuggingFaceForCausalLM(SharpPreTrainedModel, GenerationMixin):
    """`SharpForCausalLM` for `AutoModelForCausalLM`, with `generate()` over transformers' `DynamicCache`."""

    model: SharpForCausalLM

    def __init__(self, config: HuggingFaceConfig) -> None:
        super().__init__(config)
        self.model = SharpForCausalLM(config.sharp_config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits [batch, tokens, vocab_size], and the cache of all tokens so far.

        Args:
            input_ids: int64 [batch, tokens]; with a cache, the tokens that follow the cached tokens.
            attention_mask: [batch, tokens including those in the cache], 0 at padding, on either side.
            position_ids: int64 [batch, tokens]; if None, counted from the first token that is not padding.
            past_key_values: the cache, which is extended in place.
            labels: int64 [batch, tokens], mostly `input_ids`: the labels are shifted here, so each is predicted from
                the tokens before it; -100 is left out of the loss. Needs the logits of all tokens.
            use_cache: make a cache if none is given.
            logits_to_keep: return only the logits of this many last tokens; 0 means all.
            return_dict: return an object with named fields; otherwise a tuple.

        Raises:
            InputError: the cache is of another kind, or the mask of another form.
        """
        past, mask = past_key_values, attention_mask
        if past is None and use_cache:
            past = DynamicCache()
        if past is not None and (not isinstance(past, DynamicCache) or past.is_compileable):
            raise InputError(f"past_key_values is a {type(past).__name__}, but Sharp's models take a DynamicCache only")
        before = 0 if past is None else past.get_seq_length()
        tokens = input_ids.shape[1]
        if mask is not None and mask.shape != (len(input_ids), before + tokens):
            raise InputError(
                f"attention_mask has shape {list(mask.shape)}, but must have {[len(input_ids), before + tokens]}: "
                "one value per token, those in the cache included"
            )
        if position_ids is None:
            seen = torch.ones_like(input_ids[:1, :1]).expand(1, before + tokens) if mask is None else mask.long()
            position_ids = (seen.cumsum(-1) - 1).clamp(min=0)[:, before:].expand_as(input_ids)
        eager = EagerAttention(self.model.config, attention_mask=mask)

        def attention(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            head_params: Tensor | None,
            alibi_slopes: Tensor | None,
            options: LayerOptions = DEFAULT_OPTIONS,
        ) -> Tensor:
            """Compute attention of a layer over cached and new keys, by the model's norm."""
            if past is not None:  # a cache layer holds [batch, kv_heads, tokens, head_dim]
                key, value = past.update(key.transpose(1, 2), value.transpose(1, 2), layer)
                key, value = key.transpose(1, 2), value.transpose(1, 2)
            return eager(layer, query, key, value, head_params, alibi_slopes, options)

        hidden = self.model.hidden_states(input_ids, position_ids, attention)
        logits: Tensor = self.model.lm_head(hidden[:, -logits_to_keep:])  # -0 keeps all
        loss = None if labels is None else _cross_entropy(logits[:, :-1], labels[:, 1:])
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)
        return output if return_dict else output.to_tuple()


class HuggingFaceForMaskedLM(SharpPreTrainedModel):
    """`SharpForMaskedLM` in the form that `AutoModelForMaskedLM` loads."""

    model: SharpForMaskedLM

    def __init__(self, config: HuggingFaceConfig) -> None:
        super().__init__(config)
        self.model = SharpForMaskedLM(config.sharp_config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Compute logits [batch, tokens, vocab_size]; `input_ids`, `attention_mask` and `labels` are [batch, tokens].

        `attention_mask` is 0 at padding. The loss, None without labels, is the mean cross entropy in nats over
        positions whose label is not -100. The result is a tuple if `return_dict` is False.
        """
        logits = self.model(input_ids, attention_mask)
        loss = None if labels is None else _cross_entropy(logits, labels)
        output = MaskedLMOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()


def to_hugging_face(model: SharpForCausalLM | SharpForMaskedLM) -> HuggingFaceForCausalLM | HuggingFaceForMaskedLM:
    """Return `model` as a Hugging Face model that contains it, so that both share weights and mode."""
    config = HuggingFaceConfig(sharp=describe(model))
    if isinstance(model, SharpForCausalLM):
        causal_lm = HuggingFaceForCausalLM(config)
        causal_lm.model = model
        causal_lm.train(model.training)
        return causal_lm
    masked_lm = HuggingFaceForMaskedLM(config)
    masked_lm.model = model
    masked_lm.train(model.training)
    return masked_lm


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of logits [batch, tokens, vocab_size], without labels of -100."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


AutoConfig.register(MODEL_TYPE, HuggingFaceConfig)
AutoModelForCausalLM.register(HuggingFaceConfig, HuggingFaceForCausalLM)
AutoModelForMaskedLM.register(HuggingFaceConfig, HuggingFaceForMaskedLM)
