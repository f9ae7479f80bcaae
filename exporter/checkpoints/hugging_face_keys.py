"""Checks that find the keys in the files of a Hugging Face folder that neither transformers nor the export uses.

A key of `config.json` is used if transformers' code for the architecture reads the key while the model is made and run,
or if the export reads it. A key that nobody reads is harmless if its value is the default of transformers' class.
"""

import copy
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import transformers
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

from sharp.core.errors import InputError
from sharp.core.manifest import SamplingDefaults
from sharp.exporter.checkpoints.authors_models import is_class_of_authors, keys_of_authors
from sharp.exporter.checkpoints.encoder_heads import Head
from sharp.exporter.checkpoints.neutral_keys import check_other_names, is_neutral
from sharp.exporter.sources.unknown_keys import IGNORE, UnusedKeys, check_keys, matches
from sharp.models.adapted_model import MODEL_TYPE as ADAPTED
from sharp.models.trained_attention import ENTRY as ATTENTION_ENTRY

# A key counts as used if these modules read it: transformers' models and their RoPE. Other modules copy or print whole
# configurations.
READERS = ("transformers.models.", "transformers.modeling_rope_utils")
# Keys that the export reads, or that every class in transformers obeys.
USED = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "id2label", "label2id", "num_labels"),
    "quantization_config",
    *("matryoshka_dimensions", "is_matryoshka", "sentence_transformers", "sbert_ce_default_activation_function"),
    *(ATTENTION_ENTRY, "trained_norm"),
)
ALPHAS = ("alpha", "initial_alpha", "entmax_alpha", "attention_alpha", "attn_alpha")  # names of entmax's alpha
HARMLESS = {
    **dict.fromkeys(
        ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "transformers.js_config*"),
        "says where the model comes from",
    ),
    **dict.fromkeys(("torch_dtype", "dtype"), "the export reads the weights as float32"),
    **dict.fromkeys(
        ("*dropout*", "*_pdrop", "layerdrop", "initializer_*", "*init_std", "init_std", "init_method*", "z_loss*"),
        "for training only",
    ),
    **dict.fromkeys(
        ("weight_decay", "ema_decay"),
        "for training only",
    ),
    **dict.fromkeys(
        ("*aux_loss*", "output_router_logits", "gradient_checkpointing", "problem_type", "deterministic_flash_attn"),
        "for training only",
    ),
    **dict.fromkeys(("repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"), "for training only"),
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "return_dict*"),
        "says what a call returns, not what it computes",
    ),
    **dict.fromkeys(
        (
            "reference_compile",
            "attn_implementation",
            "_attn_implementation*",
            "_experts_implementation*",
            "use_flash_attn*",
            "use_kernels",
        ),
        "chooses between kernels of the same function",
    ),
    **dict.fromkeys(("pretraining_tp", "chunk_size_feed_forward"), "splits a product, whose sum is the same"),
    **dict.fromkeys(("summary_*", "classifier_*", "task_specific_params", "is_llama_config"), "for other heads"),
    **dict.fromkeys(("sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id"), "the tokenizer has them"),
    **dict.fromkeys(
        ("n_ctx", "max_sequence_length", "model_max_length", "max_seq_len*", "seq_length", "seq_len"),
        "says how long texts may be, and max_position_embeddings says it, too",
    ),
    **dict.fromkeys(("pooler_*", "directionality", "_num_labels"), "for other heads"),
    **dict.fromkeys(("output_past", "pre_allocate_kv_cache", "pad_key_length"), "for a cache of another program"),
    **dict.fromkeys(("inference_runner", "validate_runner_input", "unsloth_*"), "of another program"),
    "reorder_and_upcast_attn": "another order of the same product",
    **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), "the export computes in float32"),
    **dict.fromkeys(("tokenizer_class", "prefix"), "for the tokenizer"),
}
# Keys that describe the layers in short, and the key of the list that each stands for.
PATTERNS = {
    **dict.fromkeys(("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"), "layer_types"),
    **dict.fromkeys(("global_attn_every_n_layers", "full_attn_every_n_layers", "layer_switch"), "layer_types"),
    "no_rope_layer_interval": "no_rope_layers",
}
ROPE = "rope_parameters"
ROPE_NAMES = (ROPE, "rope_scaling", "rope_theta", "partial_rotary_factor")
ROPE_NEUTRAL = {
    **dict.fromkeys(("partial_rotary_factor", "factor", "attention_factor"), (1.0,)),
    "mrope_interleaved": (False, True),  # the order of positions that are equal for text
}
NORM_HINT = ", and if it is of another norm than softmax, say so with --trained-norm FILE"
# Settings that change which tokens are generated, in addition to those that transformers' generate() obeys.
OBEYED = ("presence_penalty", "frequency_penalty", "xtc_*", "mirostat*", "stop*", "forced_*", "custom_generate")
OF_BEAMS = ("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "constraints")
GENERATION = GenerationConfig._get_default_generation_params()  # keys that older versions of transformers kept there
# For each head, the weights of an encoder that belong to other heads.
OTHER_PARTS: dict[Head, tuple[str, ...]] = {
    "masked-lm": ("*pooler.*", "cls.seq_relationship.*", "classifier.*"),
    "classification": ("*pooler.*", "lm_head.*", "cls.*", "head.*", "decoder.*"),
    "embedding": ("*pooler.*", "cls.*", "lm_head.*", "head.*", "classifier.*", "decoder.*", "*.lm_head.*"),
}


class ReadKeys:
    """The keys of the configuration that transformers' models have read, such as "rope_parameters.factor"."""

    def __init__(self) -> None:
        self.names: set[str] = set()


class _RecordedDict(dict[str, Any]):
    """A copy of a dictionary of the configuration that records which of its keys are read."""

    def __init__(self, content: Mapping[str, Any], reads: ReadKeys, path: str) -> None:
        super().__init__(content)
        self._reads, self._path = reads, path

    def __getitem__(self, key: str) -> Any:
        return self.get(key) if key in self else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Record that `key` was read, and return its value or `default`."""
        self._reads.names.add(f"{self._path}.{key}")
        value = super().get(key, default)
        return _RecordedDict(value, self._reads, f"{self._path}.{key}") if isinstance(value, dict) else value


@contextmanager
def recorded_reads() -> Iterator[ReadKeys]:
    """Record, inside the context, which attributes of any configuration the code of transformers' models reads.

    The context replaces a method of `PreTrainedConfig` in the whole process, so contexts must not overlap.
    """
    reads = ReadKeys()
    original: Any = PreTrainedConfig.__getattribute__

    def recording(self: PreTrainedConfig, name: str) -> Any:
        """Return the config's attribute, and record its name if model code reads it."""
        if name.startswith("__"):
            return original(self, name)
        caller = sys._getframe(1)
        value = original(self, name)
        own = caller.f_locals.get("self") is self  # a method of the configuration, which may try any name
        if caller.f_globals.get("__name__", "").startswith(READERS) and (
            not own or name in original(self, "__dataclass_fields__")
        ):
            name = original(self, "attribute_map").get(name, name)
            reads.names.add(name)
            # A configuration's own methods change its dictionaries in place, so they must get the original.
            if name == ROPE and not own and isinstance(value, dict):
                return _RecordedDict(value, reads, name)
        return value

    PreTrainedConfig.__getattribute__ = recording  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        PreTrainedConfig.__getattribute__ = original  # type: ignore[method-assign]


def check_config(
    path: Path,
    facts: PreTrainedConfig,
    model: PreTrainedModel,
    reads: ReadKeys,
    ignore: Sequence[str],
    alpha: float | None = None,
) -> UnusedKeys:
    """Return the keys of the `config.json` in folder `path` that neither transformers nor the export uses.

    `facts` is transformers' configuration of that folder, `model` the model that it describes. `alpha` is the alpha of
    the norm of `--trained-norm`; a key such as `initial_alpha` with this value counts as used.

    Raises:
        InputError: an unused key may change numbers, or two keys give one setting two values.
    """
    content = json.loads((path / "config.json").read_bytes())
    if content.get("model_type") == ADAPTED:
        content = {**content["base"], "model_type": facts.model_type}
    names = {name: facts.attribute_map.get(name, name) for name in content}
    _check_unambiguous(path / "config.json", content, names)
    _check_patterns(path / "config.json", content, facts)
    found = [
        name
        for name, value in content.items()
        if value is not None
        and name not in ROPE_NAMES
        and names[name] not in reads.names
        and not (name in GENERATION and GENERATION[name] == value)
        and not (name in PATTERNS and content.get(PATTERNS[name]) is not None)
        and not is_neutral(facts, model, content, name)
        and not (name == "layer_types" and set(value) == {"full_attention"})
    ]
    if content.get("use_sliding_window") is False:
        if "sliding_window" in reads.names and facts.sliding_window:  # this class does not obey use_sliding_window
            found.append("use_sliding_window")
        else:
            found = [name for name in found if name not in ("sliding_window", "max_window_layers")]
    found = [name for name in found if not _taken_by_class(facts, content, name)]
    for name in found:
        if not matches(name, (*ignore, *HARMLESS)):
            check_other_names(path / "config.json", facts, content, name)
    found += _unused_of_rope(content, facts, reads)
    stated = () if alpha is None else [name for name in ALPHAS if content.get(name) == alpha]
    used = (*USED, *keys_of_authors(content), *stated)
    nested = [name for name in found if isinstance(content.get(name), dict)]
    nested = [name for name in nested if not matches(name, (*used, *HARMLESS, *ignore))]
    found += [f"{name}.{key}" for name in nested for key in content[name]]
    return check_keys(
        path / "config.json", "config.json", found, used=used, harmless=HARMLESS, ignore=ignore, hint=NORM_HINT
    )


def _check_unambiguous(where: Path, content: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse a key that is given under two names with two values, because transformers would silently take one.

    `names` maps each key of `content` to transformers' name of the same setting.

    Raises:
        InputError: there is such a key.
    """
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    pairs = [(name, other) for name in content for other in content if name < other and names[name] == names[other]]
    pairs += [("rope_scaling", "rope_parameters")] if {"rope_scaling", "rope_parameters"} <= content.keys() else []
    for first, other in pairs:
        if None not in (content[first], content[other]) and content[first] != content[other]:
            raise InputError(
                f"{where} has {first} {content[first]!r} and {other} {content[other]!r}, which are two names of one "
                "thing; leave one of them out"
            )
    kinds = [rope[name] for name in ("type", "rope_type") if rope.get(name) is not None]
    if len(set(map(str, kinds))) > 1:
        raise InputError(f"{where} says that RoPE is of type {kinds[0]!r} and {kinds[1]!r}; leave one of them out")
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        values = [part[name] for part in (rope, content) if isinstance(part, dict) and part.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            raise InputError(
                f"{where} has {name} {values[1]!r}, and {values[0]!r} for RoPE's scaling; leave one of them out"
            )


def _check_patterns(where: Path, content: Mapping[str, Any], facts: PreTrainedConfig) -> None:
    """Refuse a key such as `max_window_layers` that contradicts the list of the layers, such as `layer_types`.

    transformers reads the list only.

    Raises:
        InputError: there is such a key.
    """
    for short, full in PATTERNS.items():
        default = getattr(_without(facts, {}, []), short, None)
        if content.get(short) in (None, default) or content.get(full) is None:
            continue
        made = _without(facts, content, [full])
        if made is not None and getattr(made, full, None) != getattr(facts, full, None):
            raise InputError(
                f"{where} has {short} {content[short]!r}, which contradicts its {full}; leave one of them out"
            )


def _unused_of_rope(content: Mapping[str, Any], facts: PreTrainedConfig, reads: ReadKeys) -> list[str]:
    """Return the keys of RoPE, inside and outside of its dictionaries, that the model did not read.

    RoPE of a type of layers that the model does not have is left out.
    """
    rope = {name: content[name] for name in ROPE_NAMES if content.get(name) is not None}
    types = getattr(facts, "layer_types", None)
    absent = set() if types is None else {*ALLOWED_ATTN_LAYER_TYPES} - {*types}
    if ROPE not in reads.names:
        return list(rope)
    found: list[str] = []
    for name, value in rope.items():
        inner = value.items() if isinstance(value, dict) else [(name, value)]
        for key, setting in inner:
            if key in absent:
                continue
            nested = setting.items() if isinstance(setting, dict) else [(None, setting)]
            for last, number in nested:
                path = key if last is None else f"{key}.{last}"
                neutral = (last or key) in ROPE_NEUTRAL and number in ROPE_NEUTRAL[last or key]
                read = _read_of_rope(path, reads) if last is None else f"{ROPE}.{path}" in reads.names
                neutral = neutral or (last or key, number) == ("max_position_embeddings", content.get(last or key))
                if number is not None and not read and not neutral and (last or key) not in ("type", "rope_type"):
                    found.append(path if path == name else f"{name}.{path}")
    return found


def _read_of_rope(key: str, reads: ReadKeys) -> bool:
    """Whether `key` was read for any kind of layer. A flat dictionary has the key for layers of all kinds."""
    return any(name.startswith(f"{ROPE}.") and name.endswith(f".{key}") for name in reads.names)


def _taken_by_class(facts: PreTrainedConfig, content: Mapping[str, Any], name: str) -> bool:
    """Whether the configuration class derives other keys from `name`, or has this value of `name` by default."""
    whole, without = _without(facts, content, []), _without(facts, content, [name])
    if whole is None or without is None:
        return name not in GENERATION
    if getattr(without, name, None) == content[name]:
        return True
    changed = _without(facts, {**content, name: _another(content[name])}, [])
    made = [{key: value for key, value in config.to_dict().items() if key != name} for config in (whole, without)]
    made += [{key: value for key, value in changed.to_dict().items() if key != name}] if changed is not None else []
    return any(other != made[0] for other in made[1:])


def _another(value: Any) -> Any:
    """Return a value of the same type that differs from `value`: numbers, truth values, and non-empty texts and lists.

    Empty texts and lists, and values of other types, are returned unchanged.
    """
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else value + 1
    return value[:-1] if isinstance(value, list | str) else value


def _without(facts: PreTrainedConfig, content: Mapping[str, Any], names: Iterable[str]) -> PreTrainedConfig | None:
    """Return transformers' configuration of `content` without `names`; None if transformers cannot make it."""
    left_out = {*names, "model_type"}
    try:
        return type(facts)(**{name: copy.deepcopy(value) for name, value in content.items() if name not in left_out})
    except Exception:  # without the names, transformers may not understand the rest
        return None


def check_class(
    path: Path,
    facts: PreTrainedConfig,
    loaded: type[PreTrainedModel],
    kind: Literal["decoder", "encoder"],
    ignore: Sequence[str],
) -> None:
    """Refuse a folder that another class than `loaded` has saved, or that names code of its own.

    Raises:
        InputError: another class or code is named, and the user did not ignore `architectures` or `auto_map`.
    """
    where = path / "config.json"
    content = json.loads(where.read_bytes())
    if content.get("auto_map") and not matches("auto_map", ignore):
        raise InputError(
            f"{where} has 'auto_map', which names code of the model's own, and Sharp runs transformers' "
            f"{loaded.__name__}; if that computes the same, say {IGNORE} auto_map"
        )
    if content.get("model_type") == ADAPTED or matches("architectures", ignore):
        return
    for name in content.get("architectures") or ():
        saved = getattr(transformers, str(name), None)
        if is_class_of_authors(str(name), facts.model_type):
            continue
        same = saved is not None and getattr(saved, "config_class", None) is type(facts)
        if name != loaded.__name__ and (not same or kind == "decoder"):
            raise InputError(
                f"{where} says that the model is a {name}, and Sharp would run it as transformers' {loaded.__name__}; "
                f"if that computes the same, say {IGNORE} architectures"
            )


def check_generation(path: Path, ignore: Sequence[str]) -> UnusedKeys:
    """Return the keys of `generation_config.json` that a server does not obey and that differ from their defaults.

    Without this file there are none.

    Raises:
        InputError: such a key may change numbers.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return UnusedKeys("generation_config.json")
    content = json.loads(file.read_bytes())
    defaults = GenerationConfig().to_dict() | GENERATION
    found = {name: value for name, value in content.items() if value is not None and defaults.get(name) != value}
    if found.get("num_beams", 1) == 1:
        found = {name: value for name, value in found.items() if name not in OF_BEAMS}
    used = (*SamplingDefaults.model_fields, "bos_token_id", "eos_token_id", "pad_token_id")
    harmless = {
        "do_sample": "requests say whether tokens are sampled",
        "_from_model_config": "says where the file comes from",
        "max_length": "requests say how many tokens they get",
        "max_new_tokens": "requests say how many tokens they get",
        "transformers_version": "says where the file comes from",
        "cache_implementation": "chooses between caches of the same keys and values",
        **dict.fromkeys(("use_cache", "output_*", "return_dict_in_generate"), "says what a call returns"),
        "decoder_start_token_id": "for pairs of encoder and decoder",
        **dict.fromkeys(
            ("assistant_*", "num_assistant_tokens*", "is_assistant", "prompt_lookup_*"), "drafts change nothing"
        ),
        **dict.fromkeys(("low_memory", "compile_config", "disable_compile", "prefill_chunk_size"), "how, not what"),
        **dict.fromkeys(("chat_format", "max_time"), "requests say it"),
    }
    return check_keys(
        file,
        "generation_config.json",
        found,
        used=used,
        harmless=harmless,
        ignore=ignore,
        refused=(*OBEYED, *defaults),
    )


def check_weights(
    path: Path, names: Sequence[str], head: Head, kind: Literal["decoder", "encoder"], ignore: Sequence[str]
) -> UnusedKeys:
    """Check `names`, the weights of the checkpoint that the model has no place for, and return those for the report.

    Raises:
        InputError: a weight may change numbers, belongs to no other head, and the user does not ignore it.
    """
    others = () if kind == "decoder" else OTHER_PARTS[head]
    harmless = dict.fromkeys(others, "of a part of the model that is not exported")
    hint = ", and if it is what a norm has learned, say so with --trained-norm FILE"
    return check_keys(path, "weights", names, harmless=harmless, ignore=ignore, tensors=True, hint=hint)


def check_metadata(path: Path, ignore: Sequence[str]) -> UnusedKeys:
    """Return the unknown keys in the metadata of the safetensors files in folder `path`.

    Raises:
        InputError: such a key may change numbers.
    """
    found: set[str] = set()
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            found |= (file.metadata() or {}).keys()
    used = {"format": "the framework that wrote the file", "total_size": "the size", "total_parameters": "the size"}
    return check_keys(path, "safetensors metadata", found, harmless=used, ignore=ignore)
