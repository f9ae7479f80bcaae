"""The heads of Hugging Face encoders (`--head`), and the settings by which sentence-transformers pools and scores."""

import inspect
import json
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from sharp.core.errors import InputError
from sharp.core.manifest import Activation, Classification, Embedding, Pooling

Head = Literal["masked-lm", "embedding", "classification"]
HEADS: tuple[Head, ...] = get_args(Head)
LOADERS: dict[Head, Any] = {
    "masked-lm": AutoModelForMaskedLM,
    "embedding": AutoModel,
    "classification": AutoModelForSequenceClassification,
}
MODULES, TRANSFORMER_SETTINGS, OWN_SETTINGS = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
TOKENIZER_SETTINGS, LONGEST, UNLIMITED = "tokenizer_config.json", "model_max_length", 1e9
# The names of poolings in sentence-transformers: values of "pooling_mode", and flags "pooling_mode_*".
POOLINGS: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
POOLINGS |= {"lasttoken": "last", "last_token": "last", "last": "last"}
ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def head_of(path: Path, facts: PreTrainedConfig) -> Head:
    """Return the head that the encoder in folder `path` was saved with; masked-lm if its files name no other."""
    names = [str(name) for name in facts.architectures or ()]
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "classification"
    bare = bool(names) and all(name.endswith("Model") for name in names)
    return "embedding" if bare or (path / MODULES).is_file() else "masked-lm"


def loading_options(head: Head, facts: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments for transformers that leave out the pooling layer of an encoder exported for embeddings.

    The dictionary is empty for other heads, and for classes without such an argument.
    """
    if head != "embedding":
        return {}
    model: Any = MODEL_MAPPING[type(facts)]
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(model).parameters else {}


def longest_text(path: Path, head: Head) -> int | None:
    """Return the number of tokens to which sentence-transformers cuts a text.

    None if the folder does not say it, and for the head masked-lm in any case.

    Raises:
        InputError: a settings file is damaged.
    """
    if head == "masked-lm":  # decoders have this value, too, and their path may be a .gguf file
        return None
    stated = [_read(path / TRANSFORMER_SETTINGS).get("max_seq_length"), _read(path / TOKENIZER_SETTINGS).get(LONGEST)]
    lengths = [int(length) for length in stated if isinstance(length, int | float) and 1 <= length < UNLIMITED]
    return lengths[0] if lengths else None


def read_embedding(path: Path, facts: PreTrainedConfig) -> Embedding:
    """Return how the hidden states of `path` become an embedding, from sentence-transformers' files.

    Without these files the embedding is the mean of the tokens.

    Raises:
        InputError: the files are damaged, or name a module, a pooling or a setting that Sharp does not have.
    """
    if _read(path / TRANSFORMER_SETTINGS).get("do_lower_case"):
        raise InputError(f"{path / TRANSFORMER_SETTINGS} has do_lower_case, which belongs into the tokenizer; set it")
    pooling: Pooling = "mean"
    normalize = False
    for module in _read_list(path / MODULES):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            pooling = _pooling(path / str(module.get("path", "")) / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise InputError(f"{path / MODULES} has a module {name}; Transformer, Pooling and Normalize are supported")
    sizes = getattr(facts, "matryoshka_dimensions", None) or ()
    return Embedding(
        size=facts.hidden_size,
        pooling=pooling,
        normalize=normalize,
        matryoshka=bool(sizes) or bool(getattr(facts, "is_matryoshka", False)),
        matryoshka_dimensions=tuple(sizes),
    )


def read_classification(path: Path, facts: PreTrainedConfig) -> Classification:
    """Return the labels of a classification head, and the activation by which sentence-transformers scores them.

    If the files name no activation, it is sigmoid for a single label and otherwise softmax.

    Raises:
        InputError: Sharp does not have the activation, or a settings file is damaged.
    """
    labels = tuple(map(str, (facts.id2label or {}).values()))
    settings = [getattr(facts, "sentence_transformers", None), _read(path / OWN_SETTINGS)]
    named = [content.get("activation_fn") for content in settings if isinstance(content, dict)]
    named.append(getattr(facts, "sbert_ce_default_activation_function", None))
    name = next((str(path_of_class).rpartition(".")[2] for path_of_class in named if path_of_class), None)
    if name is None:
        return Classification(labels=labels, activation="sigmoid" if len(labels) == 1 else "softmax")
    if name not in ACTIVATIONS:
        raise InputError(f"{path} scores with {name}, which Sharp does not have; it has {' and '.join(ACTIVATIONS)}")
    return Classification(labels=labels, activation=ACTIVATIONS[name])


def _pooling(path: Path) -> Pooling:
    """Return how a sentence-transformers Pooling module pools, from its config.json.

    Raises:
        InputError: the file names no mode, several modes, or a mode that Sharp does not have.
    """
    content = _read(path)
    flags = {name.removeprefix("pooling_mode_") for name, on in content.items() if on and "pooling_mode_" in name}
    mode = content.get("pooling_mode")
    names = {str(name) for name in (mode if isinstance(mode, list) else [mode])} if mode else flags
    pooling = POOLINGS.get(next(iter(names))) if len(names) == 1 else None
    if pooling is None:
        how = " and ".join(sorted(names)) or "nothing that it names"
        raise InputError(f"{path} pools by {how}; Sharp has the mean of all tokens, the first and the last")
    return pooling


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file is missing or holds something else."""
    content = _json(path, {})
    return content if isinstance(content, dict) else {}


def _read_list(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file's JSON list; empty if the file is missing or holds no list."""
    content = _json(path, [])
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _json(path: Path, missing: Any) -> Any:
    """Return the JSON value of a file, or `missing` if it does not exist. InputError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}; copy or save the checkpoint again") from error
