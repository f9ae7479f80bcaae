"""The output of `sharp generate` for a completion."""

from collections.abc import Iterable

import click
import numpy as np
from rich.console import Console

from sharp.core.table import Table
from sharp.serving.api.attention import AttentionSummary
from sharp.serving.api.errors import SharpError
from sharp.serving.api.events import Delta, Finished, FinishReason
from sharp.serving.client.channel import CUT_SHORT

HEADS_SHOWN = 5


def print_event(event: Delta | Finished, as_token_ids: bool) -> None:
    """Print the new text of an event, or the end of the completion.

    If `as_token_ids`, print token ids instead of text, for prompts given as token ids.

    Raises:
        SharpError: the completion was cut short.
    """
    if isinstance(event, Delta):
        click.echo(_spaced(event.token_ids) if as_token_ids else event.text, nl=False)
        return
    click.echo()
    if event.reason is FinishReason.CANCELLED:
        raise SharpError(f"the completion is not complete: {CUT_SHORT}")
    if event.attention is not None:
        _print_heads(event.attention)


def _spaced(token_ids: Iterable[int]) -> str:
    """Return token ids, each followed by a space."""
    return "".join(f"{token_id} " for token_id in token_ids)


def _print_heads(summary: AttentionSummary) -> None:
    """Print the heads with the lowest and the highest normalized entropy."""
    heads = sorted(
        (normalized, summary.entropy[layer, head], layer, head)
        for (layer, head), normalized in np.ndenumerate(summary.normalized_entropy)
    )
    shown = heads if len(heads) <= 2 * HEADS_SHOWN else [*heads[:HEADS_SHOWN], *heads[-HEADS_SHOWN:]]
    table = Table(
        "layer", "head", "entropy / ln n", "entropy (nats)", title="From the sharpest head to the most dispersed"
    )
    for normalized, entropy, layer, head in shown:
        table.add_row(str(layer), str(head), f"{normalized:.3f}", f"{entropy:.3f}")
    Console(stderr=True).print(table)
