"""Hugging Face folders and GGUF files of Llama-type models, through `transformers.AttentionInterface`."""

import contextlib
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from sharp.exporter.decoder import Decoder
from sharp.exporter.digest import sha256
from sharp.exporter.source import Source
from sharp.models.attention import AttentionFunction
from sharp.models.config import SharpConfig
from sharp.models.normalizers import SsaParameters, get_norm
from sharp.models.positions import scaled_heads
from sharp.models.query_scale import QueryScale
from sharp.plugins.errors import InputError

# Architectures whose attention is what the op computes and whose every attention call goes through the hook.
MODEL_TYPES = ("llama",)
# RoPE variants whose angles depend on the position alone; the others change with the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
HOOK = "sharp"


def hooked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query [batch, q_heads, tokens, head_dim], already rotated -> [batch, tokens, ...]."""
    del attention_mask  # transformers builds none for an implementation that it does not know
    attention: AttentionFunction = kwargs["sharp_attention"]
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention(layer, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None), None


transformers.AttentionInterface.register(HOOK, hooked_attention)


class HuggingFaceDecoder(Decoder):
    """A Llama-type `PreTrainedModel` with a norm that has parameters of start values, or none."""

    def __init__(self, model: PreTrainedModel, config: SharpConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.head_parameters = SsaParameters(config.q_heads) if config.scheme.head_parameters else None
        self.query_scale = (
            QueryScale(config.scheme.scale_kind, config.hidden_size, scaled_heads(config), config.trained_context)
            if config.scheme.scale_kind != "none"
            else None
        )

    def hidden_states(self, input_ids: Tensor, positions: Tensor, attention: AttentionFunction) -> Tensor:
        """See `Decoder`."""
        # Only scales without projections have start values, so the hidden states that others project are not needed.
        scale = None if self.query_scale is None else self.query_scale(positions, positions).unsqueeze(-1)
        head_params = None if self.head_parameters is None else self.head_parameters()

        def with_norm(
            layer: int, query: Tensor, key: Tensor, value: Tensor, _params: Tensor | None, _slopes: Tensor | None
        ) -> Tensor:
            return attention(layer, query if scale is None else query * scale, key, value, head_params, None)

        self.model.set_attn_implementation(HOOK)
        output = self.model.base_model(
            input_ids=input_ids, position_ids=positions, use_cache=False, sharp_attention=with_norm
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def own_logits(self, input_ids: Tensor) -> Tensor | None:
        """By transformers' own attention, which has softmax only."""
        if self.config.norm != "softmax":
            return None
        self.model.set_attn_implementation("sdpa")
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def read_hugging_face(path: Path, norm: str, norm_options: Mapping[str, Any]) -> Source:
    """Read a Hugging Face folder (safetensors) or a GGUF file, to be exported with `norm` and `norm_options`.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported, or the norm
            needs parameters that it cannot have.
    """
    if norm == "fixed-temperature" and "temperature" not in norm_options:
        raise InputError(f"{path} was not trained with a fixed temperature; say which with --temperature")
    if get_norm(norm).scale_kind in ("head", "token"):
        raise InputError(
            f"{path} has no parameters for --norm {norm} (its scale is learned); "
            "choose a norm without learned projections, or train the model with it first"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The GGUF reader draws a bar of its own that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        return _read(path, norm, norm_options)


def _read(path: Path, norm: str, norm_options: Mapping[str, Any]) -> Source:
    gguf = path.is_file()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent if gguf else path)}
    where |= {"gguf_file": path.name if gguf else None, "local_files_only": True, "trust_remote_code": False}
    try:
        facts = AutoConfig.from_pretrained(**where)
        _check(path, facts)
        model: PreTrainedModel
        loading: dict[str, Any]
        model, loading = AutoModelForCausalLM.from_pretrained(
            **where, dtype="float32", use_safetensors=True, output_loading_info=True
        )  # type: ignore[misc]  # a pair, with output_loading_info
    except InputError:
        raise
    except Exception as error:  # transformers, gguf and safetensors raise almost anything for a damaged file
        kind = "GGUF file" if gguf else "Hugging Face folder with safetensors weights"
        raise InputError(f"{path} cannot be read as a {kind}: {_reason(error)}") from error
    if loading["missing_keys"] or loading["mismatched_keys"]:
        first = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))[0]
        raise InputError(f"{path} is incomplete: the weights of {first} are missing or have another shape")
    tokenizer = _read_tokenizer(path, where)
    return Source(
        name=path.stem if gguf else path.resolve().name,
        architecture=type(model).__name__,
        sha256=sha256([path] if gguf else [*sorted(path.glob("*.safetensors")), path / "config.json"]),
        model=HuggingFaceDecoder(model.eval(), replace(_config(model, norm), **norm_options)),
        trained=norm == "softmax",
        write_tokenizer=None if tokenizer is None else lambda folder: tokenizer.save_pretrained(folder),
    )


def _reason(error: Exception) -> str:
    """The first line of what a library says, which may be a page."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check(path: Path, facts: PreTrainedConfig) -> None:
    if facts.model_type not in MODEL_TYPES:
        raise InputError(
            f"{path} is a {facts.model_type} model, which sharp-export does not support yet; "
            f"supported are: {', '.join(MODEL_TYPES)}"
        )
    rope_type = (getattr(facts, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise InputError(
            f"{path} uses RoPE of type {rope_type}, whose angles change with the length; "
            f"supported are: {', '.join(ROPE_TYPES)}"
        )


def _config(model: PreTrainedModel, norm: str) -> SharpConfig:
    facts = model.config
    generation = model.generation_config
    eos = (generation.eos_token_id if generation is not None else None) or facts.eos_token_id
    return SharpConfig(
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        layers=facts.num_hidden_layers,
        q_heads=facts.num_attention_heads,
        kv_heads=facts.num_key_value_heads,
        head_dim=getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads,
        norm=norm,
        positions="rope",
        trained_context=facts.max_position_embeddings,
        max_context=facts.max_position_embeddings,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _read_tokenizer(path: Path, where: dict[str, Any]) -> Any | None:
    """The fast tokenizer of the checkpoint; None where a folder has none, and the model then serves token ids only."""
    if path.is_dir() and not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        raise InputError(f"the tokenizer of {path} cannot be read: {_reason(error)}") from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {path} has no fast form (tokenizer.json); convert it with transformers first"
        )
    return tokenizer
