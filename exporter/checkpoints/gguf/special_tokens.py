"""The special tokens of a GGUF file's vocabulary, and those that end a generation, by the rules of llama-vocab.cpp."""

from collections.abc import Mapping
from dataclasses import dataclass

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile

NO_TOKEN = 2**32 - 1  # -1 as uint32: some writers store it if a model has no such token
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
# Tokens with these texts end a generation in every vocabulary.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# Infilling tokens: the key of the file, and the texts by which the token is found if the file lacks the key.
INFILLING = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
ENDING_INFILLING = ("fim_pad", "fim_rep", "fim_sep")
# Older names of these keys.
OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
# gpt-oss separates its channels with these tokens, so a completion must show them.
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a vocabulary, by id; None for a token that it does not have.

    `ends` are the tokens that end a generation, the EOS token first if the file names one. `types` has the type of
    every token: 1 normal, 2 unknown, 3 control, 4 user-defined, as in `tokenizer.ggml.token_type`.
    """

    bos: int | None
    ends: tuple[int, ...]
    unknown: int | None
    padding: int | None
    types: tuple[int, ...]


def read_special_tokens(file: GgufFile, kind: str) -> SpecialTokens:
    """Return the special tokens of a file whose `tokenizer.ggml.model` is `kind`, as llama.cpp would find them.

    Raises:
        InputError: the vocabulary has a token twice, or `tokenizer.ggml.token_type` is shorter than the vocabulary.
    """
    texts = file.tokens
    ids = {text: token for token, text in enumerate(texts)}
    if len(ids) < len(texts):
        twice = next(text for token, text in enumerate(texts) if ids[text] != token)
        raise InputError(f"{file.path} has the token {twice!r} twice in tokenizer.ggml.tokens; convert the model again")
    types = list(file.value("tokenizer.ggml.token_type", [NORMAL] * len(texts)))
    if len(types) < len(texts):
        raise InputError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} types for {len(texts)} tokens; convert the "
            "model again"
        )
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    found = {
        name: _token(file, name, defaults.get(name)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    ends = {ids[text] for text in END_TEXTS if text in ids}
    for name, named in INFILLING.items():
        token = _token(file, name, _token(file, OLD_KEYS[name]) if name in OLD_KEYS else None)
        if token is None:
            token = next((ids[text] for text in named if text in ids), None)
            if token is not None:
                types[token] = CONTROL
        if token is not None and name in ENDING_INFILLING:
            ends.add(token)
    for token in ends:
        if texts[token] in END_TEXTS:
            types[token] = CONTROL
    for text in SHOWN:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    ends |= {token for name in ("eos", "eot", "eom") if (token := found[name]) is not None}
    _remove_ordinary(ids, ends, types)
    order = [token for name in ("eos", "eot", "eom") if (token := found[name]) in ends and token is not None]
    return SpecialTokens(
        bos=found["bos"],
        ends=tuple(dict.fromkeys([*order, *sorted(ends)])),
        unknown=found["unknown"],
        padding=found["padding"],
        types=tuple(types[: len(texts)]),
    )


def tokens_outside(file: GgufFile) -> tuple[str, ...]:
    """Return a sentence for each of the keys of the bos, eos, eot and eom tokens that names no token of the vocabulary.

    Keys of other special tokens are not checked.
    """
    found = {_key(name): file.value(_key(name)) for name in ("bos", "eos", "eot", "eom")}
    return tuple(
        f"{file.path.name}: {key} is {token!r}, but its vocabulary has {len(file.tokens)} tokens; the key is left "
        "out, as in llama.cpp"
        for key, token in found.items()
        if token not in (None, NO_TOKEN) and not _is_token(file, token)
    )


def _token(file: GgufFile, name: str, default: int | None = None) -> int | None:
    """Return the token that a key names; like llama.cpp, return `default` for a token outside the vocabulary.

    The default is None, also for a key that the file does not have.
    """
    token = file.value(_key(name), default)
    return token if _is_token(file, token) else default


def _key(name: str) -> str:
    """Return the metadata key of a special token's id; `name` is "bos", "eos", ..."""
    return f"tokenizer.ggml.{name}_token_id"


def _is_token(file: GgufFile, token: object) -> bool:
    """Whether `token` is the id of a token in the file's vocabulary."""
    return isinstance(token, int) and 0 <= token < len(file.tokens)


def _remove_ordinary(ids: Mapping[str, int], ends: set[int], types: list[int]) -> None:
    """Remove "<|end|>" and "</s>" from `ends` if other tokens in `ends` show that these do not end a completion.

    Their entries in `types`, by id, change too.
    """
    present = {text for text, token in ids.items() if token in ends}
    calls = not present.isdisjoint(("<|call|>", "<|calls|>"))
    if "<|end|>" in present and calls and not present.isdisjoint(("<|return|>", "<|flush|>")):
        ends.discard(ids["<|end|>"])  # ends one of several messages in a completion
        types[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in present and not present.isdisjoint(("<|tool_response>", "<|plamo:eos|>")):
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = NORMAL
