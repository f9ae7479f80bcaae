"""The verdict of a comparison: a sentence that says what differs, where, and what the likely cause is."""

from sharp.serving.compare.comparison import Comparison, TextComparison, TokenDifference
from sharp.serving.compare.reading import Token
from sharp.serving.compare.tolerance import LARGEST


def verdict(found: Comparison) -> str:
    """Return "agrees: ..." or "differs: ..." with every kind of difference, causes before their effects."""
    parts = [part for part in (_tokenizer(found), _stops(found), _logprobs(found), _continuation(found)) if part]
    return f"differs: {'; '.join(parts)}" if parts else f"agrees: {', '.join(compared(found))}"


def compared(found: Comparison) -> list[str]:
    """Return phrases about what was compared and is the same."""
    count = len(found.texts)
    same = sum(text.count for text in found.texts if text.tokens_compared)
    parts = [f"the same {same:,} tokens of {count} {'text' if count == 1 else 'texts'}"] if same else []
    if found.mean is not None and found.largest is not None:
        parts.append(
            f"{len(found.differences):,} log-probabilities within {found.largest:.2g} nats (mean {found.mean:.2g})"
        )
    if found.generated:
        parts.append(f"the same {found.generated:,} generated tokens")
    if found.stops is not None:
        parts.append("the same stop tokens")
    return parts


def not_compared(found: Comparison) -> list[str]:
    """Return what the other program did not give, as sentences without their end."""
    missing = [text for text in found.texts if not text.tokens_compared]
    parts = [f"the tokens of {_names(missing)}: {found.other} does not show them"] if missing else []
    without = [text for text in found.texts if text.tokens is None and not text.differences and text.count > 1]
    if without:
        parts.append(f"log-probabilities of {_names(without)}: {found.other} gives none that can be compared")
    lacking: dict[str, list[TextComparison]] = {}
    for text in found.texts:
        for lack in text.lacks if text not in without else ():
            lacking.setdefault(lack, []).append(text)
    parts += [f"{lack} of {_names(texts)}" for lack, texts in lacking.items()]
    if found.stops is None:
        parts.append(f"stop tokens: {found.other} does not say which it has")
    elif not found.stops[1].complete:
        parts.append(f"other stop tokens that {found.other} may have")
    other = [text for text in found.texts if text.tokens is not None and not text.differences and not text.generated]
    if other:
        parts.append(f"numbers of {_names(other)}: {found.other} reads other tokens there")
    return parts


def _tokenizer(found: Comparison) -> str:
    """Return the sentence about the first token that differs; "" if all tokens are equal."""
    wrong = [(text, text.tokens) for text in found.texts if text.tokens is not None]
    if not wrong:
        return ""
    text, first = wrong[0]
    more = f" (in {len(wrong)} texts)" if len(wrong) > 1 else ""
    return f"the tokens of {text.name!r} at position {first.position}: {_pair(first)}{more}: another tokenizer"


def _stops(found: Comparison) -> str:
    """Return the sentence about stop tokens that only one side has; "" if they agree or are unknown."""
    if found.stops is None or not (found.missing or found.extra):
        return ""
    declared, other = found.stops
    parts = []
    if found.missing:
        parts.append(f"{_ids(found.missing)} ends a completion there and not here")
    if found.extra:
        parts.append(f"{_ids(found.extra)} ends a completion here and not there")
    known = f", there {_ids(sorted(other.declared))}" if other.complete else ""
    return f"the stop tokens: {' and '.join(parts)} (here {_ids(sorted(declared))}{known})"


def _logprobs(found: Comparison) -> str:
    """Return the sentence about log-probabilities beyond the tolerance and the likely cause; "" if there are none."""
    if not found.wide or found.mean is None:
        return ""
    limits = f"limits: {found.tolerance.largest:.2g}, mean {found.tolerance.mean:.2g}"
    first = [(text, text.first) for text in found.texts if text.first is not None]
    sizes = f"up to {found.largest:.2g} nats, mean {found.mean:.2g} ({limits})"
    if not first:
        return f"log-probabilities, a little everywhere: {sizes}: weights or numbers of another precision, or a scale"
    text, one = min(first, key=lambda pair: pair[1].position)
    where = f"from position {one.position} of {text.name!r} on, by {one.size:.2g} there"
    # With a single key the weight of attention is 1 for all positions and, except for sigmoid and sinks, for all norms.
    cause = (
        "the weights differ, or how they are read: another model"
        if one.position == 1
        else "with one token of context they agree, so the weights do and attention differs: "
        "RoPE's base or scaling, a window, or the norm"
    )
    return f"log-probabilities {where}; {sizes}: {cause}"


def _continuation(found: Comparison) -> str:
    """Return the sentence about the first greedy continuation that differs; "" if all agree."""
    wrong = [(text, text.continuation) for text in found.texts if text.continuation is not None]
    if not wrong:
        return ""
    text, first = wrong[0]
    more = f" (in {len(wrong)} texts)" if len(wrong) > 1 else ""
    return f"the greedy continuation of {text.name!r} at its token {first.position}: {_pair(first)}{more}"


def _pair(first: TokenDifference) -> str:
    """Return the words for two tokens, "X here, Y there"."""
    return f"{_token(first.here)} here, {_token(first.there)} there"


def _token(token: Token | None) -> str:
    """Return a token as words: quoted text, an id, or "the end" for None."""
    return "the end" if token is None else repr(token) if isinstance(token, str) else str(token)


def _ids(tokens: "list[int] | tuple[int, ...]") -> str:
    """Return token ids separated by commas, or "none"."""
    return ", ".join(map(str, tokens)) or "none"


def _names(texts: list[TextComparison]) -> str:
    """Return the quoted names of at most three texts, and how many more there are."""
    names = [repr(text.name) for text in texts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def tolerance_line(found: Comparison) -> str:
    """Return a sentence about the tolerance and its origin."""
    limits = f"{found.tolerance.mean:g} nats on average and {LARGEST} times as much for one token"
    reason = f" (the lower precision of the two: {found.tolerance.precision})" if found.tolerance.precision else ""
    return f"Log-probabilities may differ by {limits}{reason}"
