"""Hugging Face folders and GGUF files of the architectures in `sharp.exporter.checkpoints.architectures`."""

import contextlib
import io
import json
import math
import os
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from sharp.exporter.checkpoints.architectures import ARCHITECTURES, ROPE_TYPES, Architecture
from sharp.exporter.checkpoints.authors_models import prepare_configuration
from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.gguf_file import check_gguf_header, one_reader
from sharp.exporter.checkpoints.hook import HeadShape, probe_heads
from sharp.exporter.checkpoints.hooked_model import HookedDecoder, HookedEncoder
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt, read_ssa_nano_gpt
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.checkpoints.source import Source, sha256
from sharp.exporter.checkpoints.trained_norm import TrainedNorm, read_trained_norm, stored_norm
from sharp.exporter.checkpoints.trained_weights import attach_trained_norm, look_like_a_norm
from sharp.exporter.checkpoints.uncached_model import UncachedDecoder, UncachedModel
from sharp.models.adapted_model import AdaptedConfig, AdaptedNorm, find_attention, read_adapted_norm
from sharp.models.attention import EagerAttention
from sharp.models.config import MOST_LAYERS, SharpConfig
from sharp.models.normalizers import get_norm
from sharp.models.safetensors_header import check_header
from sharp.models.trained_attention import ENTRY
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import PositionScheme
from sharp.plugins.tokenizer_trial import check_tokenizer_file

# Of transformers' implementations of experts the one whose shapes do not depend on where tokens are routed to.
EXPERTS = "batched_mm"
PROBED_TOKENS = 24
# The files that transformers makes a tokenizer of: the fast one's own, SentencePiece's, GPT-2's and Qwen's, BERT's.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MOST_TENSORS = 100_000  # of all files
MOST_DIFFERENCE = 1e-2  # another attention moves logits by far more, rounding by far less


@dataclass(frozen=True)
class OpenedModel:
    """A model of transformers as it was read, and what describes it; `facts` is its configuration."""

    model: PreTrainedModel
    facts: PreTrainedConfig
    architecture: Architecture
    tokenizer: Any | None
    sha256: str
    unused_weights: tuple[str, ...]
    given: AdaptedNorm | None = None  # by the user

    @property
    def adapted(self) -> AdaptedNorm | None:
        """The norm that it was trained with, where it is another than softmax."""
        if self.given is not None:
            return self.given
        content = getattr(self.facts, "sharp", None) or getattr(self.facts, ENTRY, None)
        return None if content is None else read_adapted_norm(content)


def read_hugging_face(path: Path, norm: str, options: NormOptions, trained_norm: Path | None = None) -> Source:
    """Read a Hugging Face folder (safetensors) or a GGUF file, to be exported with `norm`, set up with `options`.

    The file `trained_norm` says what its norm has learned, see `sharp.exporter.checkpoints.trained_norm`.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported, or the norm
            needs parameters that it cannot have.
    """
    stored = stored_norm(path) if trained_norm is None else read_trained_norm(trained_norm)
    trained = "ssa" if is_ssa_nano_gpt(path) else "softmax" if stored is None else stored.norm
    if norm == "fixed-temperature" and options.temperature is None:
        raise InputError(f"{path} was not trained with a fixed temperature; say which with --temperature")
    if get_norm(norm).scale_kind in ("head", "token") and norm != trained:
        raise InputError(
            f"{path} has no parameters for --norm {norm} (its scale is learned); "
            "choose a norm without learned projections, train the model with it first (sharp adapt), or say where its "
            "parameters are (--trained-norm)"
        )
    if is_ssa_nano_gpt(path):
        model, described = read_ssa_nano_gpt(path)
        opened = OpenedModel(model, model.config, ARCHITECTURES["gpt2"], None, sha256([path]), (), described)
    else:
        opened = open_model(path)
    if isinstance(stored, TrainedNorm):
        q_heads = _heads_of(path, opened.model).q_heads
        described, unused = attach_trained_norm(path, opened.model, q_heads, stored, opened.unused_weights)
        opened = replace(opened, given=described, unused_weights=unused)
    elif opened.unused_weights and (names := look_like_a_norm(opened.unused_weights, find_attention(opened.model), [])):
        raise InputError(
            f"{path} has weights that a {type(opened.model).__name__} has no place for and that look like those of a "
            f"norm ({len(names)}, the first is {names[0]}), so it was not trained with softmax; say what they are with "
            "--trained-norm FILE, or list them there under ignore"
        )
    exported = hooked_model(path, opened, norm, options)
    if norm == trained:
        original = exported
    else:
        if opened.adapted is not None and opened.adapted.positions != "own":
            raise InputError(f"{path} was trained with norm {trained} and its own positions; export it with that norm")
        original = hooked_model(path, opened, trained, NO_OPTIONS)
    check_own_attention(path, original)
    tokenizer = opened.tokenizer
    return Source(
        name=path.stem if path.is_file() else path.resolve().name,
        architecture=type(opened.model).__name__,
        sha256=opened.sha256,
        model=exported,
        original=original,
        write_tokenizer=None if tokenizer is None else lambda folder: tokenizer.save_pretrained(folder),
        write_config=opened.facts.save_pretrained,
        unused_weights=opened.unused_weights,
    )


def open_model(path: Path) -> OpenedModel:
    """Read a Hugging Face folder (safetensors) or a GGUF file as a model of transformers, in float32.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The GGUF reader draws a bar of its own that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()), one_reader():
        return _open(path)


def _open(path: Path) -> OpenedModel:
    one_file = path.is_file()
    if one_file:
        check_gguf_header(path)
    _check_shards(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent if one_file else path)}
    where |= {"gguf_file": path.name if one_file else None, "local_files_only": True, "trust_remote_code": False}
    try:
        stored = AutoConfig.from_pretrained(**where)
        prepare_configuration(stored)
        facts = stored.base_config() if isinstance(stored, AdaptedConfig) else stored
        architecture = _architecture(path, facts)
        loader = AutoModelForCausalLM if architecture.kind == "decoder" else AutoModelForMaskedLM
        _check_size(path, loader, facts)
        model: PreTrainedModel
        loading: dict[str, Any]
        model, loading = loader.from_pretrained(
            **where, config=stored, dtype="float32", use_safetensors=True, output_loading_info=True
        )  # type: ignore[misc]  # a pair, with output_loading_info
    except InputError:
        raise
    except Exception as error:  # transformers, gguf and safetensors raise almost anything for a damaged file
        kind = "GGUF file" if one_file else "Hugging Face folder with safetensors weights"
        raise InputError(f"{path} cannot be read as a {kind}: {_reason(error)}") from error
    if loading["missing_keys"] or loading["mismatched_keys"]:
        first = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))[0]
        raise InputError(f"{path} is incomplete: the weights of {first} are missing or have another shape")
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"{path}: the weights of {name} are not all finite; copy the checkpoint again")
    return OpenedModel(
        model=model.eval(),
        facts=facts,
        architecture=architecture,
        tokenizer=_read_tokenizer(path, where),
        sha256=sha256([path] if one_file else [*sorted(path.glob("*.safetensors")), path / "config.json"]),
        unused_weights=tuple(sorted(map(str, loading["unexpected_keys"]))),
    )


@torch.no_grad()
def check_own_attention(path: Path, original: Decoder | UncachedModel) -> None:
    """Refuse a model whose attention is not what the hook makes of it: of another direction, say.

    Verification under another norm would not show it, as transformers has only softmax to compare with.
    """
    model = UncachedDecoder(original) if isinstance(original, Decoder) else original
    inputs = model.draw(1, min(PROBED_TOKENS, model.config.max_context), torch.Generator().manual_seed(0))
    own = model.own_output(*inputs)
    assert own is not None  # of softmax, which transformers has
    attention = EagerAttention(model.config, attention_mask=model.attention_mask(*inputs))
    error = (model.compute(attention, *inputs) - own).abs().max() / own.abs().max()
    if not error <= MOST_DIFFERENCE:
        sides = "to both sides" if model.kind == "encoder" else "backwards"
        raise InputError(
            f"{path} cannot be exported: with softmax attention that looks {sides} its logits differ from "
            f"transformers' own by {error:.0e} of the largest, so it attends in another way"
        )


def _check_shards(path: Path) -> None:
    """Refuse an index that names weights outside the folder; links are allowed, transformers' own cache has them."""
    for index in path.glob("*.safetensors.index.json"):  # none in a file
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{index} is damaged: it has no weight_map; copy or save the checkpoint again") from error
        for shard in shards:
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise InputError(f"{index} keeps weights in {shard!r}, which is not in the folder; do not use it")
    tensors = sum(check_header(shard) for shard in path.glob("*.safetensors"))
    if tensors > MOST_TENSORS:
        raise InputError(f"{path} has {tensors} tensors in its files; the limit is {MOST_TENSORS}")


def _check_size(path: Path, loader: Any, facts: PreTrainedConfig) -> None:
    """Refuse a configuration of a larger model than the weights are of, before memory is taken for it."""
    with torch.device("meta"):
        described_size = sum(parameter.numel() for parameter in loader.from_config(facts).parameters())
    if path.is_file():
        described, holders = "its header", "it holds"
        # int, as numpy's sums are of 64 bits; and named as transformers names it, for `one_reader`.
        tensors = gguf.GGUFReader(os.path.join(path.parent, path.name)).tensors  # noqa: PTH118
        stored = sum(int(tensor.n_elements) for tensor in tensors)
    else:
        described, holders = "its config.json", "its safetensors files hold"
        stored = 0
        shards = list(path.glob("*.safetensors"))
        if not shards:
            raise InputError(f"{path} has no .safetensors files; save the model in them with transformers first")
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                names = file.keys()
                stored += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    if described_size > stored:
        raise InputError(
            f"{path} is incomplete: {described} describes {described_size:,} weights, and {holders} {stored:,}"
        )


def _reason(error: Exception) -> str:
    """The beginning of what a library says, which may be a page, in one line."""
    return textwrap.shorten(str(error).strip() or type(error).__name__, 200, placeholder=" ...")


def _architecture(path: Path, facts: PreTrainedConfig) -> Architecture:
    if facts.model_type not in ARCHITECTURES:
        raise InputError(
            f"{path} is a {facts.model_type} model, which Sharp does not support yet; "
            f"supported are: {', '.join(ARCHITECTURES)}"
        )
    if path.is_dir() and getattr(facts, "quantization_config", None) is not None:
        raise InputError(f"{path} is quantized; export the model that it was made from, with --quantize int8 or int4")
    if not 1 <= facts.num_hidden_layers <= MOST_LAYERS:
        raise InputError(
            f"{path} says that it has {facts.num_hidden_layers} layers, but must have from 1 to {MOST_LAYERS}; "
            "copy the checkpoint again"
        )
    for rope_type in _rope_types(getattr(facts, "rope_parameters", None) or {}):
        if rope_type not in ROPE_TYPES:
            raise InputError(
                f"{path} uses RoPE of type {rope_type}, whose angles change with the length; "
                f"supported are: {', '.join(ROPE_TYPES)}"
            )
    return ARCHITECTURES[facts.model_type]


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """The types in `rope_parameters`, which some models have one of for every kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", "default")) for one in nested or [parameters]}


def hooked_model(path: Path, opened: OpenedModel, norm: str, options: NormOptions) -> Decoder | UncachedModel:
    """`opened`, read from `path`, with `norm` as its attention.

    Raises:
        InputError: its attention cannot be replaced.
    """
    model, architecture, adapted = opened.model, opened.architecture, opened.adapted
    config = _config(model, _heads_of(path, model), architecture, norm)
    positions: PositionScheme = architecture.positions
    learned = adapted is not None and adapted.norm == norm
    if adapted is not None and learned:
        config = replace(
            config,
            alpha=adapted.alpha,
            temperature_coefficients=adapted.temperature_coefficients,
            entropy_threshold=adapted.entropy_threshold,
            gamma=adapted.gamma,
        )
        if adapted.positions != "own":
            positions = adapted.positions
            config = replace(config, positions=positions)
    config = replace(config, **options.config_fields())
    if architecture.kind == "encoder":
        return HookedEncoder(model, config, positions, learned=learned)
    return HookedDecoder(model, config, positions, learned=learned)


def _heads_of(path: Path, model: PreTrainedModel) -> HeadShape:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    try:
        return probe_heads(model, lambda attention: model(input_ids=tokens, sharp_attention=attention))
    except InputError as error:
        raise InputError(f"{path} cannot be exported: {error}") from error
    except Exception as error:  # its configuration may hold anything
        raise InputError(f"{path} cannot be exported, as transformers cannot run it: {_reason(error)}") from error


def _config(model: PreTrainedModel, heads: HeadShape, architecture: Architecture, norm: str) -> SharpConfig:
    facts = model.config
    generation = getattr(model, "generation_config", None)  # encoders have none
    length = facts.max_position_embeddings - (facts.pad_token_id + 1 if architecture.positions_after_padding else 0)
    own_eos = None if generation is None else generation.eos_token_id  # 0 is a token, too
    eos = facts.eos_token_id if own_eos in (None, []) else own_eos
    # What transformers' configurations have by default may be outside, and then nothing can say it.
    vocabulary = range(model.get_output_embeddings().weight.shape[0])
    return SharpConfig(
        vocab_size=len(vocabulary),
        hidden_size=facts.hidden_size,
        intermediate_size=getattr(facts, "intermediate_size", None) or 4 * facts.hidden_size,
        layers=heads.layers,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        norm=norm,
        positions="rope" if architecture.positions == "rope" else "none",
        trained_context=length,
        max_context=length,
        causal=architecture.kind == "decoder",
        bos_token_id=facts.bos_token_id if facts.bos_token_id in vocabulary else None,
        eos_token_ids=tuple(token for token in (eos if isinstance(eos, list) else [eos]) if token in vocabulary),
    )


def _read_tokenizer(path: Path, where: dict[str, Any]) -> Any | None:
    """The fast tokenizer of the checkpoint; None where a folder has none, and the model then serves token ids only."""
    if path.is_dir() and not any((path / name).exists() for name in VOCABULARIES):
        return None
    if (path / "tokenizer.json").is_file():
        check_tokenizer_file(path / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        raise InputError(f"the tokenizer of {path} cannot be read: {_reason(error)}") from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {path} has no fast form (tokenizer.json); convert it with transformers first"
        )
    return tokenizer
