"""Keys and tensors of a checkpoint that an export does not use: refused if they may change numbers, reported otherwise.

Every name that a reader finds in a file belongs to one of three groups:

- *used*: the reader or the model reads the value.
- *harmless*: a table says why the key changes nothing.
- *unknown*: nobody reads the value. A name of the kind that changes what a model computes (a norm, a scale, RoPE, ...)
  ends the export, unless the user names it with `--ignore-key`. Other unknown names go into the report.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sharp.core.errors import InputError

# Words of names that change what a model computes, or which tokens it sees.
MODEL_WORDS = """
    ln eps epsilon qk act activation gate gated glu swiglu clip clamp cap limit
    alpha beta gamma lambda lambdas tau temp theta base freq freqs ntk yarn mscale longrope mup mix
    scale scales scaled scaler scalar scaling factor factors multiplier mult offset shift
    rope ropes xpos rot nope nape pos position positions slope slopes window windows
    sink sinks mask causal decoder local global chunk chunked block blocks head heads dim dims size width depth poly
    embed embedding embeddings logit logits query key keys value values kv proj ffn mlp hidden layer layers
    bias biases residual parallel skip tie tied share shared loop loops repeat repeats recurrent recurrence
    ssa topk expert experts moe router lora adapter conv canon smear state ssm memory
    emb rpe encoding bos eos eot eom prefix suffix lowercase layer_types
    gain gains divisor exponent exponents power powers coef coefs coefficient coefficients decay threshold thresholds
    sparse sparsity relu sigmoid tanh elu square squared signed score scores scoring cosine similarity logn
    distance span lookback radius stride register registers swa nsa mla kda gdn dca diff differential quiet
    center centered centering standardize damping amplitude sharpness averaging weighting retention forget forgetting
    altup ngram engram
"""
# Parts of words that are long enough to mean nothing else.
MODEL_PARTS = """
    norm softmax entmax sparsemax ssmax softpick temperature attn attention
    alibi rotary softcap capping sliding quant interleave dilat compress direction
"""
NORM_WORDS = "norm alpha beta gamma tau temp temperature scale ssa a b n attn attention logit proj"
NORM_PARTS = ("max", "temperature", "attn", "attention")
WORDS, PARTS, OF_NORMS = (frozenset(words.split()) for words in (MODEL_WORDS, MODEL_PARTS, NORM_WORDS))
# Parts between dots of a tensor's name that say where the tensor is, not what it is.
PLACES = frozenset(
    ("model", "transformer", "decoder", "encoder", "layers", "layer", "h", "blk", "blocks", "mlp", "ffn")
)
# Names of the parameters that any module computes with.
PARAMETERS = ("*weight", "*weights", "*bias", "*kernel")
# Names, or parts of names between dots, that count only as a whole.
SEGMENTS = frozenset(("pre", "layer_types", "auto_map", "architectures", "model_type"))

IGNORE = "--ignore-key"


@dataclass(frozen=True)
class UnusedKeys:
    """Names in one place of a checkpoint (`config.json`, `weights`, ...) that an export does not use.

    `unknown` names are not of a kind that changes numbers. The user named `ignored` names with `--ignore-key`.
    """

    place: str
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def check_keys(
    where: object,
    place: str,
    found: Iterable[str],
    *,
    used: Iterable[str] = (),
    harmless: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    refused: Iterable[str] = (),
    tensors: bool = False,
    hint: str = "",
) -> UnusedKeys:
    """Return the names in `found` that are neither `used` nor `harmless`, sorted, as unknown or ignored.

    `used`, `harmless`, `ignore` and `refused` have names or patterns of fnmatch.

    Args:
        where: The file or folder, for the message.
        place: The part of the checkpoint, for message and report.
        found: The names to check.
        used: Names that the export uses.
        harmless: Names that change nothing, and why.
        ignore: Names that the user gave with `--ignore-key`.
        refused: Names that may change numbers, whatever words they have.
        tensors: Whether all of `found` are names of tensors.
        hint: What else the user can do than ignore the name, if it may belong to a norm.

    Raises:
        InputError: an unknown name may change numbers, and the user did not ignore it.
    """
    known = (*used, *(harmless or {}))
    exact = {name for name in known if not _is_pattern(name)}
    patterns = [name for name in known if _is_pattern(name)]
    left = sorted({name for name in found if name not in exact and not matches(name, patterns)})
    ignored = tuple(name for name in left if matches(name, ignore))
    unknown = tuple(name for name in left if name not in ignored)
    changes = tensor_changes_numbers if tensors else changes_numbers
    changing = [name for name in unknown if matches(name, refused) or changes(name)]
    if changing:
        others = f" (and {', '.join(changing[1:4])}{' ...' if len(changing) > 4 else ''})" if len(changing) > 1 else ""
        if not _of_a_norm(changing[0]):
            hint = ""
        raise InputError(
            f"{where}: {place} has {changing[0]!r}{others}, which Sharp does not use and which may change what the "
            f"model computes; if it changes nothing, say {IGNORE} {shlex.quote(changing[0])}{hint}"
        )
    return UnusedKeys(place, unknown, ignored)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` equals one of `patterns`, or matches one as a pattern of fnmatch."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def tensor_changes_numbers(name: str) -> bool:
    """Whether a tensor of this name may change what a model computes: a parameter, or a buffer with a telling name."""
    kept = [part for part in name.split(".") if part not in PLACES and not part.isdigit()]
    return matches(name, PARAMETERS) or changes_numbers(".".join(kept))


def changes_numbers(name: str) -> bool:
    """Whether a key or tensor of this name may change what a model computes, or which tokens it sees."""
    segments = re.split(r"[./:\[\]]", name.lower())
    words = _words(name)
    return (
        not SEGMENTS.isdisjoint(segments)
        or not WORDS.isdisjoint(words)
        or any(part in word for part in PARTS for word in words)
    )


def _of_a_norm(name: str) -> bool:
    """Whether a key or tensor of this name may be an option or a learned parameter of an attention norm."""
    words = _words(name)
    return not OF_NORMS.isdisjoint(words) or any(part in word for part in NORM_PARTS for word in words)


def _words(name: str) -> list[str]:
    """Split a key at capitals and punctuation into lower-case words without digits at the end."""
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return [word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", split)]


def _is_pattern(name: str) -> bool:
    """Whether the name has a wildcard of fnmatch."""
    return any(character in name for character in "*?[")
