"""Hugging Face folders and GGUF files of the architectures in `sharp.exporter.checkpoints.architectures`."""

import contextlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.quantization_config import Mxfp4Config

from sharp.exporter.checkpoints.architectures import ARCHITECTURES, Architecture
from sharp.exporter.checkpoints.authors_models import prepare_configuration
from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.encoder_heads import (
    HEADS,
    LOADERS,
    OTHER_HEADS,
    Head,
    head_of,
    loading_options,
    longest_text,
    read_classification,
    read_embedding,
)
from sharp.exporter.checkpoints.gguf_file import check_gguf_header, one_reader
from sharp.exporter.checkpoints.hook import HeadShape, probe_heads
from sharp.exporter.checkpoints.hooked_model import HookedDecoder, HookedEncoder
from sharp.exporter.checkpoints.hugging_face_checks import (
    check_own_attention,
    check_shards,
    check_size,
    find_architecture,
    quantization_of,
    reason,
)
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt, read_ssa_nano_gpt
from sharp.exporter.checkpoints.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.checkpoints.source import Source, sha256
from sharp.exporter.checkpoints.trained_norm import TrainedNorm, read_trained_norm, stored_norm
from sharp.exporter.checkpoints.trained_weights import attach_trained_norm, look_like_a_norm
from sharp.exporter.checkpoints.uncached_model import UncachedModel
from sharp.models.adapted_config import AdaptedConfig
from sharp.models.adapted_model import AdaptedNorm, find_attention, read_adapted_norm
from sharp.models.config import SharpConfig
from sharp.models.norms import get_norm
from sharp.models.trained_attention import ENTRY
from sharp.plugins.errors import InputError
from sharp.plugins.manifest import PositionScheme
from sharp.plugins.ops.attributes import has_place_for_sink
from sharp.plugins.tokenizer_trial import check_tokenizer_file

# Of transformers' implementations of experts the one whose shapes do not depend on where tokens are routed to.
EXPERTS = "batched_mm"
# The files that transformers makes a tokenizer of: the fast one's own, SentencePiece's, GPT-2's and Qwen's, BERT's.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class OpenedModel:
    """A model of transformers as it was read, and what describes it; `facts` is its configuration.

    `head` is what stands on an encoder, `longest` the most tokens of a text where that is less than it has positions.
    """

    model: PreTrainedModel
    facts: PreTrainedConfig
    architecture: Architecture
    tokenizer: Any | None
    sha256: str
    unused_weights: tuple[str, ...]
    given: AdaptedNorm | None = None  # by the user
    head: Head = "masked-lm"
    longest: int | None = None

    @property
    def adapted(self) -> AdaptedNorm | None:
        """The norm that it was trained with, where it is another than softmax."""
        if self.given is not None:
            return self.given
        content = getattr(self.facts, "sharp", None) or getattr(self.facts, ENTRY, None)
        return None if content is None else read_adapted_norm(content)


def read_hugging_face(
    path: Path, norm: str | None, options: NormOptions, trained_norm: Path | None = None, head: str | None = None
) -> Source:
    """Read a Hugging Face folder (safetensors) or a GGUF file, to be exported with `norm`, set up with `options`.

    A `norm` of None is the one that it says that it was trained with.

    The file `trained_norm` says what its norm has learned, see `sharp.exporter.checkpoints.trained_norm`. `head` is one
    of `HEADS`, for an encoder; None is the one that it was saved with.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported, or the norm
            needs parameters that it cannot have, or none is given and it says none.
    """
    stored = stored_norm(path) if trained_norm is None else read_trained_norm(trained_norm)
    trained = "ssa" if is_ssa_nano_gpt(path) else "softmax" if stored is None else stored.norm
    if norm is None:
        if stored is None and trained == "softmax":
            raise InputError(f"{path} does not say which norm it was trained with; say it with --norm")
        norm = trained
        options.check(norm)
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
        opened = open_model(path, head)
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
        token_types=tokenizer is not None and "token_type_ids" in tokenizer.model_input_names,
        embedding=read_embedding(path, opened.facts) if opened.head == "embedding" else None,
        classification=read_classification(path, opened.facts) if opened.head == "classification" else None,
        unused_weights=opened.unused_weights,
    )


def open_model(path: Path, head: str | None = None) -> OpenedModel:
    """Read a Hugging Face folder (safetensors) or a GGUF file as a model of transformers, in float32.

    `head` is for encoders, see `read_hugging_face`.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The GGUF reader draws a bar of its own that no setting turns off.
    with contextlib.redirect_stderr(io.StringIO()), one_reader():
        return _open(path, head)


def _open(path: Path, given: str | None) -> OpenedModel:
    one_file = path.is_file()
    if one_file:
        check_gguf_header(path)
    elif not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json, which a Hugging Face folder has; give another folder")
    check_shards(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent if one_file else path)}
    where |= {"gguf_file": path.name if one_file else None, "local_files_only": True, "trust_remote_code": False}
    try:
        stored = AutoConfig.from_pretrained(**where)
        prepare_configuration(stored)
        facts = stored.base_config() if isinstance(stored, AdaptedConfig) else stored
        architecture = find_architecture(path, facts)
        loader, head, making = _loader(path, facts, architecture, given)
        check_size(path, loader, facts, making)
        if not one_file and quantization_of(facts) == "mxfp4":
            making["quantization_config"] = Mxfp4Config(dequantize=True)
        model: PreTrainedModel
        loading: dict[str, Any]
        model, loading = loader.from_pretrained(
            **where, **making, config=stored, dtype="float32", use_safetensors=True, output_loading_info=True
        )
    except InputError:
        raise
    except Exception as error:  # transformers, gguf and safetensors raise almost anything for a damaged file
        kind = "GGUF file" if one_file else "Hugging Face folder with safetensors weights"
        said = f"{path} cannot be read as a {kind}; copy it again if it may be cut off or damaged: {reason(error)}"
        raise InputError(said) from error
    if "quantization_config" in making:
        del facts.quantization_config  # of the file, not of the model
    if loading["missing_keys"] or loading["mismatched_keys"]:
        first = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))[0]
        raise InputError(f"{path} is incomplete: the weights of {first} are missing or have another shape")
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    unused = sorted(map(str, loading["unexpected_keys"]))
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise InputError(f"{path}: the weights of {name} are not all finite; copy the checkpoint again")
    return OpenedModel(
        model=model.eval(),
        facts=facts,
        architecture=architecture,
        tokenizer=_read_tokenizer(path, where),
        sha256=sha256([path] if one_file else [*sorted(path.glob("*.safetensors")), path / "config.json"]),
        unused_weights=tuple(name for name in unused if head != "embedding" or not OTHER_HEADS.search(name)),
        head=head,
        longest=longest_text(path, head),
    )


def _loader(
    path: Path, facts: PreTrainedConfig, architecture: Architecture, given: str | None
) -> tuple[Any, Head, dict[str, Any]]:
    """What loads a model, its head, and how transformers makes it."""
    if architecture.kind == "decoder":
        if given is not None:
            raise InputError(f"--head is for encoders, and {path} is a {architecture.model_type} model; leave it out")
        return AutoModelForCausalLM, "masked-lm", {}
    head = next((one for one in HEADS if one == given), None) or head_of(path, facts)
    return LOADERS[head], head, loading_options(head, facts)


def hooked_model(path: Path, opened: OpenedModel, norm: str, options: NormOptions) -> Decoder | UncachedModel:
    """`opened`, read from `path`, with `norm` as its attention.

    Raises:
        InputError: its attention cannot be replaced.
    """
    model, architecture, adapted = opened.model, opened.architecture, opened.adapted
    heads = _heads_of(path, model)
    if heads.sinks and not has_place_for_sink(get_norm(norm).normalizer):
        raise InputError(
            f"{path} has attention sinks, which compete with its keys, and --norm {norm} has no place for them; "
            "choose another norm"
        )
    config = _config(opened, heads, norm)
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
        return HookedEncoder(model, config, positions, learned=learned, head=opened.head)
    return HookedDecoder(model, config, positions, learned=learned, has_sinks=heads.sinks)


def _heads_of(path: Path, model: PreTrainedModel) -> HeadShape:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    try:
        return probe_heads(model, lambda attention: model(input_ids=tokens, sharp_attention=attention))
    except InputError as error:
        raise InputError(f"{path} cannot be exported: {error}") from error
    except Exception as error:  # its configuration may hold anything
        raise InputError(f"{path} cannot be exported, as transformers cannot run it: {reason(error)}") from error


def _config(opened: OpenedModel, heads: HeadShape, norm: str) -> SharpConfig:
    model, architecture = opened.model, opened.architecture
    facts = model.config
    generation = getattr(model, "generation_config", None)  # encoders have none
    length = facts.max_position_embeddings - (facts.pad_token_id + 1 if architecture.positions_after_padding else 0)
    length = min(length, opened.longest or length)
    own_eos = None if generation is None else generation.eos_token_id  # 0 is a token, too
    eos = facts.eos_token_id if own_eos in (None, []) else own_eos
    # What transformers' configurations have by default may be outside, and then nothing can say it.
    tokens: Any = model.get_output_embeddings() if opened.head == "masked-lm" else model.get_input_embeddings()
    vocabulary = range(tokens.weight.shape[0])
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
        raise InputError(f"the tokenizer of {path} cannot be read: {reason(error)}") from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {path} has no fast form (tokenizer.json); convert it with transformers first"
        )
    return tokenizer
