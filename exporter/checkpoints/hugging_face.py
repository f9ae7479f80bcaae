"""The reader of Hugging Face folders and GGUF files, for the architectures in `architectures.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.quantization_config import Mxfp4Config

from sharp.core.errors import InputError
from sharp.core.manifest import PositionScheme, SamplingDefaults
from sharp.core.vocabulary import check_embeddings
from sharp.exporter.checkpoints.architectures import ARCHITECTURES, Architecture
from sharp.exporter.checkpoints.authors_models import prepare_configuration
from sharp.exporter.checkpoints.differential import join_calls
from sharp.exporter.checkpoints.encoder_heads import (
    HEADS,
    LOADERS,
    Head,
    head_of,
    loading_options,
    longest_text,
    read_classification,
    read_embedding,
)
from sharp.exporter.checkpoints.gguf.keys import check_unused
from sharp.exporter.checkpoints.gguf.model import read_gguf
from sharp.exporter.checkpoints.hooked_model import HookedDecoder, HookedEncoder
from sharp.exporter.checkpoints.hugging_face_checks import (
    check_finite,
    check_own_attention,
    check_shards,
    check_size,
    find_architecture,
    fix_longrope,
    fix_mrope,
    quantization_of,
    reason,
)
from sharp.exporter.checkpoints.hugging_face_keys import (
    check_class,
    check_config,
    check_generation,
    check_metadata,
    check_weights,
    recorded_reads,
)
from sharp.exporter.checkpoints.hugging_face_tokenizer import other_templates, read_tokenizer, special_tokens
from sharp.exporter.checkpoints.json_files import check_config_file, check_generation_file
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt, read_ssa_nano_gpt
from sharp.exporter.checkpoints.sentence_keys import check_sentence_files
from sharp.exporter.checkpoints.stored_weights import check_files, check_types, left_out
from sharp.exporter.checkpoints.tokenizer_keys import check_tokenizer
from sharp.exporter.checkpoints.trained_norm import TrainedNorm, read_trained_norm, stored_norm
from sharp.exporter.checkpoints.trained_weights import attach_trained_norm
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.hook import HeadShape, probe_heads
from sharp.exporter.sources.imported_config import ImportedConfig
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions
from sharp.exporter.sources.source import Source, sha256
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.exporter.sources.unknown_keys import UnusedKeys
from sharp.models.adapted_config import AdaptedConfig
from sharp.models.adapted_model import AdaptedNorm, read_adapted_norm
from sharp.models.config import SharpConfig
from sharp.models.gated_qwen3 import GatedQwen3ForCausalLM, has_gates
from sharp.models.norms import get_norm
from sharp.models.trained_attention import ENTRY
from sharp.plugins.op.attributes import has_place_for_sink

# In transformers' other implementations of experts, shapes depend on which experts the tokens are routed to.
EXPERTS = "batched_mm"


@dataclass(frozen=True)
class TransformersModel:
    """A model of transformers with its configuration `facts`, its tokenizer and what else was read from the checkpoint.

    `head` is the head of an encoder. `longest` is the largest number of tokens of a text, if the checkpoint limits it
    below the number of positions. `unused_weights` are weights that the model has no place for, `unused` the unused
    keys of other files. `given` is the trained norm if the user described it. Only GGUF files have `sampling`.
    """

    model: PreTrainedModel
    facts: PreTrainedConfig
    architecture: Architecture
    tokenizer: Any | None
    sha256: str
    unused_weights: tuple[str, ...]  # names of weights that the model has no place for
    unused: tuple[UnusedKeys, ...]  # unused keys of the files other than weights
    given: AdaptedNorm | None = None  # the trained norm, if the user described it
    head: Head = "masked-lm"
    longest: int | None = None
    sampling: SamplingDefaults | None = None  # only GGUF files have them in the same file
    warnings: tuple[str, ...] = ()

    @property
    def adapted(self) -> AdaptedNorm | None:
        """The norm that the model was trained with; None for softmax.

        Raises:
            InputError: the entry of `config.json` that describes the norm is damaged or of an old version.
        """
        if self.given is not None:
            return self.given
        content = getattr(self.facts, "sharp", None) or getattr(self.facts, ENTRY, None)
        return None if content is None else read_adapted_norm(content)


def read_hugging_face(
    path: Path,
    norm: str | None,
    options: NormOptions,
    trained_norm: Path | None = None,
    head: str | None = None,
    *,
    ignore: Sequence[str] = (),
) -> Source:
    """Read a Hugging Face folder (safetensors) or a GGUF file for an export.

    Args:
        path: The folder or the file.
        norm: The norm to export with; None means the norm that the checkpoint says that it was trained with, and
            softmax for one that says none, as its architecture computes it.
        options: The options of `norm`.
        trained_norm: A file that says which weights the norm has learned (`sharp.exporter.checkpoints.trained_norm`).
        head: One of `HEADS`, for an encoder; None means the head that the encoder was saved with.
        ignore: Unknown keys that the user says change nothing.

    Raises:
        NotFoundError: the file `trained_norm`, or a file of temperature coefficients, does not exist.
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported, or it has keys or
            weights that may change numbers, or it lacks parameters that the norm needs.
    """
    stored = stored_norm(path) if trained_norm is None else read_trained_norm(trained_norm)
    nano = read_ssa_nano_gpt(path, norm, ignore) if is_ssa_nano_gpt(path) else None
    trained = "softmax" if stored is None else stored.norm
    if nano is not None and nano.described is not None:
        trained = nano.described.norm
    if norm is None:
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
    if nano is not None:
        gpt2 = ARCHITECTURES["gpt2"]
        opened = TransformersModel(
            nano.model, nano.model.config, gpt2, None, sha256([path]), (), nano.unused, nano.described
        )
    else:
        opened = open_model(path, head, ignore, None if trained_norm is None else getattr(stored, "alpha", None))
    if isinstance(stored, TrainedNorm):
        q_heads = _heads_of(path, opened.model).q_heads
        described, unused = attach_trained_norm(path, opened.model, q_heads, stored, opened.unused_weights)
        opened = replace(opened, given=described, unused_weights=unused)
        ignore = (*ignore, *stored.ignore)
    weights = check_weights(path, opened.unused_weights, opened.head, opened.architecture.kind, ignore)
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
        unused=(*opened.unused, weights),
        sampling=opened.sampling or SamplingDefaults(),
        sampling_source=None if opened.sampling in (None, SamplingDefaults()) else "general.sampling of the GGUF file",
        warnings=opened.warnings,
    )


def open_model(
    path: Path, head: str | None = None, ignore: Sequence[str] = (), alpha: float | None = None
) -> TransformersModel:
    """Read a Hugging Face folder (safetensors) or a GGUF file as a model of transformers, in float32.

    `head` is one of `HEADS`, for an encoder. `ignore` has unknown keys that the user says change nothing. `alpha` is
    that of a trained norm that the user described; it explains keys of `config.json` with the same value. The logging
    and the progress bars of transformers are turned off in the whole process.

    Raises:
        InputError: the checkpoint is damaged, incomplete or of an architecture that is not supported, or it has keys
            that may change numbers.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if path.is_file():
        return _open_gguf(path, head, ignore)
    with recorded_reads() as reads:
        opened = _open_folder(path, head)
        _heads_of(path, opened.model)  # runs the model, which reads the rest of its configuration
    check_class(path, opened.facts, type(opened.model), opened.architecture.kind, ignore)
    config = check_config(path, opened.facts, opened.model, reads, ignore, alpha)
    unused = [config, check_generation(path, ignore), check_metadata(path, ignore)]
    if opened.architecture.kind == "encoder" and opened.head != "masked-lm":
        unused += check_sentence_files(path, opened.facts, ignore)
    if opened.tokenizer is not None:
        unused.append(check_tokenizer(path, opened.tokenizer, ignore))
    warnings = () if opened.tokenizer is None else other_templates(path)
    return replace(opened, unused=(*opened.unused, *unused), warnings=warnings)


def _open_gguf(path: Path, head: str | None, ignore: Sequence[str]) -> TransformersModel:
    """Open a GGUF file as a transformers model; `ignore` lists patterns of unused tensors to accept.

    `head` must be None for decoders.

    Raises:
        InputError: the file is damaged or not supported, or has tensors that nothing uses.
    """
    try:
        read = read_gguf(path)
        architecture = find_architecture(path, read.config)
        _loader(path, read.config, architecture, head)  # raises if the user named a head, which decoders do not have
        check_finite(path, read.model)
        fix_longrope(read.model)
        unused = check_unused(read.file, ignore)
    except InputError:
        raise
    except Exception as error:  # gguf, tokenizers and transformers raise almost anything for a damaged file
        said = f"{path} cannot be read as a GGUF file; copy it again if it may be cut off or damaged: {reason(error)}"
        raise InputError(said) from error
    if read.model._can_set_experts_implementation():
        read.model.set_experts_implementation(EXPERTS)
    return TransformersModel(
        model=read.model.eval(),
        facts=read.config,
        architecture=architecture,
        tokenizer=read.tokenizer,
        sha256=sha256([path]),
        unused_weights=(),
        unused=unused,
        sampling=read.sampling,
        warnings=read.warnings,
    )


def _open_folder(path: Path, given: str | None) -> TransformersModel:
    """Open a Hugging Face folder as a transformers model, without running code of the folder.

    `given` is the head that the user chose; None chooses by the folder.

    Raises:
        InputError: files are missing or damaged, or the architecture is not supported.
    """
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json, which a Hugging Face folder has; give another folder")
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"{path} has an adapter (adapter_config.json), which is not exported; merge it into the weights first "
            "(merge_and_unload of peft) and save the model, or move the file away to export the model without it"
        )
    check_shards(path)
    check_config_file(path)
    check_generation_file(path)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    where |= {"local_files_only": True, "trust_remote_code": False}
    try:
        stored = AutoConfig.from_pretrained(**where)
        prepare_configuration(stored, str(path))
        facts = stored.base_config() if isinstance(stored, AdaptedConfig) else stored
        architecture = find_architecture(path, facts)
        loader, head, making = _loader(path, facts, architecture, given)
        if has_gates(stored):  # an adapted model has a `model_type` of its own, whose class finds the gates
            loader = GatedQwen3ForCausalLM
        check_size(path, loader, facts, making)
        check_files(path)
        if quantization_of(facts) is None:
            check_types(path)
        if quantization_of(facts) == "mxfp4":
            making["quantization_config"] = Mxfp4Config(dequantize=True)
        model: PreTrainedModel
        loading: dict[str, Any]
        model, loading = loader.from_pretrained(
            **where, **making, config=stored, dtype="float32", use_safetensors=True, output_loading_info=True
        )
    except InputError:
        raise
    except Exception as error:  # transformers and safetensors raise almost anything for a damaged file
        raise InputError(
            f"{path} cannot be read as a Hugging Face folder with safetensors weights; copy it again if it may be cut "
            f"off or damaged: {reason(error)}"
        ) from error
    if "quantization_config" in making:
        del facts.quantization_config  # the file is quantized, the model that was loaded is not
    if loading["missing_keys"] or loading["mismatched_keys"]:
        first = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))[0]
        raise InputError(
            f"{path} is incomplete: the weights of {first} are missing or have another shape; copy the checkpoint "
            "again, or correct config.json"
        )
    if model._can_set_experts_implementation():
        model.set_experts_implementation(EXPERTS)
    beside = left_out(path, model, sorted(map(str, loading["unexpected_keys"])))
    check_finite(path, model)
    fix_longrope(model)
    fix_mrope(model)
    join_calls(model)
    return TransformersModel(
        model=model.eval(),
        facts=facts,
        architecture=architecture,
        tokenizer=read_tokenizer(path, where),
        sha256=sha256([*sorted(path.glob("*.safetensors")), path / "config.json"]),
        unused_weights=beside.refused,
        unused=(UnusedKeys("weights of other parts", beside.parts),) if beside.parts else (),
        head=head,
        longest=longest_text(path, head),
    )


def _loader(
    path: Path, facts: PreTrainedConfig, architecture: Architecture, given: str | None
) -> tuple[Any, Head, dict[str, Any]]:
    """Return the class of transformers that loads a model, the head, and the arguments for the model's constructor.

    Raises:
        InputError: a head is given for a decoder.
    """
    if architecture.kind == "decoder":
        if given is not None:
            raise InputError(f"--head is for encoders, and {path} is a {architecture.model_type} model; leave it out")
        return AutoModelForCausalLM, "masked-lm", {}
    head = next((name for name in HEADS if name == given), None) or head_of(path, facts)
    return LOADERS[head], head, loading_options(head, facts)


def hooked_model(path: Path, opened: TransformersModel, norm: str, options: NormOptions) -> Decoder | UncachedModel:
    """Return the model in `opened`, which was read from `path`, with `norm` in its attention.

    Models of one `opened` share its weights. Options that are no fields of the configuration, such as b and n of ssa,
    are not set here; see `NormOptions.apply`.

    Raises:
        NotFoundError: the file of temperature coefficients does not exist.
        InputError: the attention of the model cannot be replaced, or its sinks have no place in the norm.
    """
    model, architecture, adapted = opened.model, opened.architecture, opened.adapted
    heads = _heads_of(path, model)
    if heads.sinks and not has_place_for_sink(get_norm(norm).normalizer):
        raise InputError(
            f"{path} has attention sinks, which compete with its keys, and --norm {norm} has no place for them; "
            "choose another norm"
        )
    config = _config(path, opened, heads, norm)
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
    """Return the numbers and sizes of the model's heads, by running two tokens through it.

    Raises:
        InputError: the model cannot run, or its heads are not supported.
    """
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    try:
        return probe_heads(model, lambda attention: model(input_ids=tokens, sharp_attention=attention))
    except InputError as error:
        raise InputError(f"{path} cannot be exported: {error}") from error
    except Exception as error:  # a configuration may hold any value, so transformers may raise any error
        raise InputError(f"{path} cannot be exported, as transformers cannot run it: {reason(error)}") from error


def _config(path: Path, opened: TransformersModel, heads: HeadShape, norm: str) -> SharpConfig:
    """Return Sharp's description of an opened model: vocabulary, heads, contexts, special tokens and `norm`."""
    model, architecture = opened.model, opened.architecture
    facts = model.config
    generation = getattr(model, "generation_config", None)  # encoders have none
    length = facts.max_position_embeddings - (facts.pad_token_id + 1 if architecture.positions_after_padding else 0)
    length = min(length, opened.longest or length)
    tokens: Any = model.get_output_embeddings() if opened.head == "masked-lm" else model.get_input_embeddings()
    vocab_size = tokens.weight.shape[0]
    embeddings: Any = model.get_input_embeddings()
    check_embeddings(str(path), vocab_size, embeddings.weight.shape[0])
    ends = getattr(opened.tokenizer, "eos_token_id", None) if architecture.kind == "decoder" else None
    special = special_tokens(path, facts, generation, vocab_size, ends)
    return ImportedConfig(
        vocab_size=vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=getattr(facts, "intermediate_size", None) or 4 * facts.hidden_size,
        layers=heads.layers,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        value_size=heads.value_dim,
        norm=norm,
        positions="rope" if architecture.positions == "rope" else "none",
        trained_context=length,
        max_context=length,
        causal=architecture.kind == "decoder",
        bos_token_id=special.bos,
        eos_token_ids=special.eos,
    )
