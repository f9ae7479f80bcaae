"""Checks of the keys in sentence-transformers' files, which say how an encoder's output becomes embedding or score."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.encoder_heads import MODULES, OWN_SETTINGS, TRANSFORMER_SETTINGS
from sharp.exporter.checkpoints.json_files import read_json
from sharp.exporter.sources.unknown_keys import UnusedKeys, check_keys, matches

ORDER = ("Transformer", "Pooling", "Normalize")
LIBRARY = "sentence_transformers."
OF_REQUESTS = "requests bring their prompts, and compare embeddings as they like"
HARMLESS = {
    **dict.fromkeys(("__version__", "model_type"), "says where the file comes from"),
    **dict.fromkeys(("prompts", "similarity_fn_name"), OF_REQUESTS),
    **dict.fromkeys(("transformer_task", "modality_config", "module_output_name"), "as sentence-transformers makes it"),
}
USED = ("max_seq_length", "do_lower_case", "activation_fn", "default_prompt_name")
ARGUMENTS = ("*_args", "*_kwargs")  # passed on to transformers' model, configuration and tokenizer; may be anything
POOLING = ("pooling_mode*", "word_embedding_dimension", "embedding_dimension", "include_prompt")


def check_sentence_files(path: Path, facts: PreTrainedConfig, ignore: Sequence[str]) -> tuple[UnusedKeys, ...]:
    """Return the keys of sentence-transformers' files in folder `path` that nobody reads.

    Raises:
        InputError: a key may change embeddings, or the modules stand in another order than Sharp computes them.
    """
    found: list[UnusedKeys] = []
    for name in (OWN_SETTINGS, TRANSFORMER_SETTINGS):
        if (file := path / name).is_file():
            content = read_json(file)
            prompt = _default_prompt(content)
            if prompt and not matches("default_prompt_name", ignore):
                raise InputError(
                    f"{file} has default_prompt_name, so that every text begins with {prompt!r}, and servers put "
                    "nothing before a text; put it there in requests, and say --ignore-key default_prompt_name"
                )
            given = [key for key, value in content.items() if value not in (None, {}, [])]
            found.append(check_keys(file, name, given, used=USED, harmless=HARMLESS, ignore=ignore, refused=ARGUMENTS))
    own = getattr(facts, "sentence_transformers", None)
    if isinstance(own, dict):
        where = path / "config.json"
        used = ("activation_fn", "version")
        found.append(check_keys(where, "sentence_transformers of config.json", own, used=used, ignore=ignore))
    if (path / MODULES).is_file():
        found += _check_modules(path, facts, ignore)
    return tuple(found)


def _default_prompt(content: Mapping[str, Any]) -> str:
    """Return the prompt that sentence-transformers puts before every text; empty if there is none."""
    prompts, name = content.get("prompts"), content.get("default_prompt_name")
    return str(prompts.get(name) or "") if isinstance(prompts, dict) and isinstance(name, str) else ""


def _check_modules(path: Path, facts: PreTrainedConfig, ignore: Sequence[str]) -> list[UnusedKeys]:
    """Check that modules.json lists modules that Sharp computes, in a supported order, with settings that it supports.

    Return the unused settings of Pooling, without those that match a pattern of `ignore`.

    Raises:
        InputError: a module, its order or one of its settings is not supported.
    """
    file = path / MODULES
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged: it is no JSON; copy the checkpoint again") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{file} is damaged: it is no list of modules; copy the checkpoint again")
    kinds = [str(module.get("type", "")) for module in modules]
    for kind in kinds:
        if not kind.startswith(LIBRARY):
            raise InputError(
                f"{file} has a module {kind}, whose code is not sentence-transformers' own, and Sharp computes "
                f"{', '.join(ORDER)}; leave modules.json out to export the encoder with the mean of its tokens"
            )
    names = [kind.rpartition(".")[2] for kind in kinds]
    numbered = [module.get("idx", index) for index, module in enumerate(modules)] == [*range(len(modules))]
    if names != [name for name in ORDER if name in names] or not numbered:
        raise InputError(
            f"{file} has the modules {', '.join(names)}; Sharp computes {', '.join(ORDER)}, each once, in this order"
        )
    pooling: list[UnusedKeys] = []
    for module, name in zip(modules, names, strict=True):
        settings = path / str(module.get("path", "")) / "config.json"
        if name == "Pooling" and settings.is_file():
            content = read_json(settings)
            for key in ("word_embedding_dimension", "embedding_dimension"):
                if (size := content.get(key, facts.hidden_size)) != facts.hidden_size:
                    raise InputError(
                        f"{settings} is for embeddings of {size} numbers, and the model has {facts.hidden_size}"
                    )
            if content.get("include_prompt") is False:
                raise InputError(
                    f"{settings} has include_prompt false, so that prompts are read and not pooled, which Sharp does "
                    "not do"
                )
            pooling.append(check_keys(settings, "the settings of Pooling", content, used=POOLING, ignore=ignore))
    return pooling
