"""The output of a comparison, as a table or as JSON."""

from dataclasses import asdict
from typing import Any

from rich import box

from sharp.core.table import Table
from sharp.serving.compare.comparison import Comparison, TextComparison
from sharp.serving.compare.verdict import not_compared, verdict


def table(found: Comparison) -> Table:
    """Return a table for the terminal with a row per text: equal tokens, differences in nats, generated tokens."""
    rows = Table(box=box.SIMPLE)
    rows.add_column("text")
    for name in ("tokens", "same", "compared", "mean", "largest", "KL", "generated"):
        rows.add_column(name, justify="right", no_wrap=True)
    for text in found.texts:
        rows.add_row(text.name, f"{text.count:,}", _tokens(text), *_numbers(text), _generated(text))
    return rows


def as_object(found: Comparison) -> dict[str, Any]:
    """Return everything that was compared as an object for JSON. Differences are in nats."""
    return {
        "agrees": found.agrees,
        "verdict": verdict(found),
        "folder": found.folder,
        "with": found.other,
        "tolerance": {
            "mean": found.tolerance.mean,
            "largest": found.tolerance.largest,
            "precision": found.tolerance.precision or None,
        },
        "logprobs": {
            "compared": len(found.differences),
            "mean_difference": found.mean,
            "largest_difference": found.largest,
            "kl_divergence": found.divergence,
        },
        "generated": found.generated,
        "stop_tokens": None
        if found.stops is None
        else {
            "folder": sorted(found.stops[0]),
            "with": sorted(found.stops[1].declared) if found.stops[1].complete else None,
            "missing": found.missing,
            "extra": found.extra,
        },
        "not_compared": not_compared(found),
        "texts": [_text(text) for text in found.texts],
    }


def _text(text: TextComparison) -> dict[str, Any]:
    """Return the JSON object of one text's comparison; sizes are in nats and None if nothing was compared."""
    mean, largest = (None, None) if not text.differences else (_mean(text.differences), max(text.differences))
    return {
        "name": text.name,
        "tokens": text.count,
        "same_tokens": text.tokens is None if text.tokens_compared else None,
        "first_other_token": None if text.tokens is None else asdict(text.tokens),
        "logprobs": len(text.differences),
        "mean_difference": mean,
        "largest_difference": largest,
        "kl_divergence": _mean(text.divergences) if text.divergences else None,
        "first_beyond_tolerance": None if text.first is None else asdict(text.first),
        "largest_at": None if text.largest is None else asdict(text.largest),
        "generated": text.generated,
        "tie": text.ties,
        "first_other_generated": None if text.continuation is None else asdict(text.continuation),
    }


def _tokens(text: TextComparison) -> str:
    """Return the table cell about tokens: "all" are equal, the first position that differs, or "-" (not compared)."""
    if not text.tokens_compared:
        return "-"
    return "all" if text.tokens is None else f"{text.tokens.position:,}"


def _numbers(text: TextComparison) -> tuple[str, str, str, str]:
    """Return four table cells in nats: count of log-probabilities, mean and largest difference, mean KL divergence."""
    if not text.differences:
        return ("-",) * 4
    sizes = (_mean(text.differences), max(text.differences), _mean(text.divergences))
    return (f"{len(text.differences):,}", *(f"{size:.1e}" for size in sizes))  # type: ignore[return-value]


def _generated(text: TextComparison) -> str:
    """Return the table cell about the greedy continuation: its number of tokens, and "tie" or "other" at its end."""
    return f"{text.generated}{', tie' if text.ties else '' if text.continuation is None else ', other'}"


def _mean(values: tuple[float, ...]) -> float:
    """Return the mean of values, of which there is at least one."""
    return sum(values) / len(values)
