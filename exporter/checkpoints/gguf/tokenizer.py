"""The tokenizer of a GGUF file, built with the library `tokenizers`: byte-level BPE, or the BPE of SentencePiece."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.gguf.file import GgufFile
from sharp.exporter.checkpoints.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, REFUSED, PreTokenizer
from sharp.exporter.checkpoints.gguf.special_tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SpecialTokens,
    read_special_tokens,
    tokens_outside,
)

SPACE = "▁"
MOST_TRIED = 500  # tokens of the same score, and texts in which they overlap
LONGEST_TRIED = 64  # characters of such a token
TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer, its special tokens and warnings for the user. `tokenizer` is None if the file has no vocabulary."""

    tokenizer: PreTrainedTokenizerFast | None
    special: SpecialTokens
    warnings: tuple[str, ...] = ()


def read_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Return the tokenizer of a file.

    Raises:
        InputError: the tokenizer is of a kind that Sharp does not have, or damaged.
    """
    kind = file.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return GgufTokenizer(None, SpecialTokens(None, (), None, None, ()))
    if kind not in ("gpt2", "llama"):
        raise InputError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; Sharp reads gpt2 (byte-level BPE) and llama "
            "(SentencePiece) from GGUF. Export the Hugging Face folder of the model instead"
        )
    for key in ("tokenizer.ggml.suppress_tokens", "tokenizer.ggml.add_sep_token"):
        if file.value(key):
            raise InputError(
                f"{file.path}: {key} asks for what Sharp does not do; export the Hugging Face folder instead"
            )
    special = read_special_tokens(file, kind)
    warnings: tuple[str, ...] = ()
    if kind == "gpt2":
        pre, warnings = _pre_tokenizer(file)
        tokenizer, adds_bos = _byte_level(file, pre), pre.adds_bos
    else:
        tokenizer, adds_bos = _sentence_piece(file, special), True
    _add_special_tokens(tokenizer, file, special)
    _add_ends(tokenizer, file, special, adds_bos)
    names = {"bos_token": special.bos, "unk_token": special.unknown, "pad_token": special.padding}
    names["eos_token"] = special.ends[0] if special.ends else None
    return GgufTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            chat_template=_chat_templates(file),
            clean_up_tokenization_spaces=False,
            **{name: file.tokens[token] for name, token in names.items() if token is not None},
        ),
        special,
        (*warnings, *tokens_outside(file)),
    )


def _pre_tokenizer(file: GgufFile) -> tuple[PreTokenizer, tuple[str, ...]]:
    """Return the file's pre-tokenizer, and notes for the user: one if the file does not name its own.

    Raises:
        InputError: Sharp does not have the pre-tokenizer.
    """
    name = file.text("tokenizer.ggml.pre", "")
    if not name:
        said = "the file does not say how its texts are split (tokenizer.ggml.pre); as in llama.cpp, 'default' is taken"
        return PRE_TOKENIZERS[DEFAULT], (said,)
    if name not in PRE_TOKENIZERS:
        why = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise InputError(
            f"{file.path}: Sharp does not have the pre-tokenizer {name!r} of tokenizer.ggml.pre{why}; export the "
            "Hugging Face folder of the model instead"
        )
    return PRE_TOKENIZERS[name], ()


def _byte_level(file: GgufFile, pre: PreTokenizer) -> Tokenizer:
    """Return byte-level BPE with the file's merges.

    Raises:
        InputError: the file has no merges, or a merge of texts that are no tokens.
    """
    vocabulary = {text: token for token, text in enumerate(file.tokens)}
    listed = file.value("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise InputError(
            f"{file.path} has no tokenizer.ggml.merges, which its tokenizer needs; convert the model again"
        )
    merges = []
    for merge in listed:
        left, space, right = str(merge)[1:].partition(" ")  # a part may begin with a space
        pair = (str(merge)[:1] + left, right)
        if not space or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise InputError(
                f"{file.path}: tokenizer.ggml.merges has {merge!r}, whose tokens are not in the vocabulary; "
                "convert the model again"
            )
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, special: SpecialTokens) -> Tokenizer:
    """Return SentencePiece's BPE, which first joins the neighbours that form the token of the highest score.

    Raises:
        InputError: the file has no score for each token, or its tokens and scores give no order of merges.
    """
    texts = file.tokens
    scores = file.value("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(texts):
        raise InputError(f"{file.path} has no tokenizer.ggml.scores for all its tokens; convert the model again")
    vocabulary = {text: token for token, text in enumerate(texts)}
    merges = _merges(file.path, texts, scores, special.types, vocabulary)
    unknown = None if special.unknown is None else texts[special.unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(
    path: Path, texts: Sequence[str], scores: Sequence[float], types: Sequence[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form a token, in descending order of the scores of the tokens that they form.

    `types` are llama.cpp's token types by id, and `vocabulary` has the ids by text.

    Raises:
        InputError: a token is made of a text that is no token, or two normal tokens have the same score.
    """
    merges: list[tuple[str, str]] = []
    same_score: dict[float, list[str]] = {}  # normal tokens by score, in the order of their merges
    for token in sorted(range(len(texts)), key=lambda token: -scores[token]):
        text, before = texts[token], len(merges)
        for cut in range(1, len(text)):
            parts = (text[:cut], text[cut:])
            lacking = [part for part in parts if part not in vocabulary]
            if not lacking:
                merges.append(parts)
            elif types[token] == NORMAL and all(len(part) == 1 or part in vocabulary for part in parts):
                raise InputError(
                    f"{path}: the token {text!r} is made of {lacking[0]!r}, which is no token; llama.cpp joins it all "
                    "the same, and Sharp cannot. Export the Hugging Face folder of the model instead"
                )
        if len(merges) > before and types[token] == NORMAL:  # other tokens are found in a text before it is split
            same_score.setdefault(scores[token], []).append(text)
    by_score = {pair: -scores[vocabulary["".join(pair)]] for pair in merges}
    by_rank = {pair: float(rank) for rank, pair in enumerate(merges)}
    for score, tied in same_score.items():
        for joined in _overlaps(tied) if len(tied) > 1 else ():
            if joined is None or _joined(joined, by_score) != _joined(joined, by_rank):
                raise InputError(
                    f"{path}: tokenizer.ggml.scores has {score:g} for {tied[1]!r} and another token, which llama.cpp "
                    "joins by their place in the text, and Sharp cannot. Export the Hugging Face folder of the model "
                    "instead"
                )
    return merges


def _overlaps(tokens: Sequence[str]) -> Iterator[str | None]:
    """Yield the texts in which two of `tokens` overlap, and runs of a character that `tokens` repeat.

    Such texts show whether the order of merges matters. None comes last if there are too many or too long ones to try.
    """
    if len(tokens) > MOST_TRIED or max(map(len, tokens)) > LONGEST_TRIED:
        yield None
        return
    runs = {text[0]: len(text) for text in sorted(tokens, key=len) if len({*text}) == 1}
    texts = (character * length for character, longest in runs.items() for length in range(2, 3 * longest + 3))
    pairs = (
        first + second[shared:]
        for first in tokens
        for second in tokens
        if {*first} != {*second} or len({*first}) > 1
        for shared in range(1, min(len(first), len(second)))
        if first.endswith(second[:shared])
    )
    found = [*islice(chain(texts, pairs), MOST_TRIED + 1)]
    yield from found[:MOST_TRIED]
    if len(found) > MOST_TRIED:
        yield None


def _joined(text: str, order: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the tokens of a text: the pair of the lowest `order` is joined first, and of equal pairs the left one."""
    parts = [*text]
    while True:
        pairs = [(order[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in order]
        if not pairs:
            return parts
        _, place = min(pairs)
        parts[place : place + 2] = ["".join(parts[place : place + 2])]


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, special: SpecialTokens) -> None:
    """Add control, unknown and user-defined tokens, which are found in a text before the text is split."""
    name = file.value("general.name", "")
    phi3 = isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))
    plain = ("<unk>", "<s>", "<|endoftext|>")
    control, user_defined = [], []
    for text, kind in zip(file.tokens, special.types, strict=True):
        # llama.cpp drops the space after Phi-3's special tokens, and recognizes these models by their names.
        strips = phi3 and text not in plain and (kind in (CONTROL, UNKNOWN, USER_DEFINED) or text == "</s>")
        if kind in (CONTROL, UNKNOWN):
            control.append(AddedToken(text, normalized=False, special=True, rstrip=strips))
        elif kind == USER_DEFINED:
            user_defined.append(AddedToken(text, normalized=False, special=False, rstrip=strips))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_ends(tokenizer: Tokenizer, file: GgufFile, special: SpecialTokens, adds_bos: bool) -> None:
    """Make the tokenizer begin and end a text with the tokens that the file's flags say."""
    bos = special.bos if file.value("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.ends[0] if special.ends and file.value("tokenizer.ggml.add_eos_token", False) else None
    before, after = ([] if token is None else [file.tokens[token]] for token in (bos, eos))
    if before or after:
        single = [*(f"{text}:0" for text in before), "$A:0", *(f"{text}:0" for text in after)]
        pair = [*single, *(f"{text}:1" for text in before), "$B:1", *(f"{text}:1" for text in after)]
        tokens = [(file.tokens[token], token) for token in (bos, eos) if token is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _chat_templates(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template, or a dictionary of all templates by name if the file has named ones; None without."""
    file.value("tokenizer.chat_templates")  # marks the key as used; it has only the names of the templates
    names = {key: key.removeprefix(f"{TEMPLATE}.") for key in file.keys if key.startswith(f"{TEMPLATE}.")}
    named = {name: file.text(key) for key, name in names.items()}
    default = file.value(TEMPLATE)
    if not named:
        return default if isinstance(default, str) else None
    return {"default": default, **named} if isinstance(default, str) else named
