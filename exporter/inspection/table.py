"""The statistics of the heads as a table on the console and as rows of the page."""

from dataclasses import dataclass

import numpy as np

from sharp.core.table import Table
from sharp.exporter.inspection.heads import Doubles, TokenStatistics

HEADS_SHOWN = 8  # from each end, if a model has too many heads for a screen


@dataclass(frozen=True)
class HeadRow:
    """The statistics of one head as means over all tokens but the first; fields are described at `TokenStatistics`.

    Entropy is in nats, support in keys, spread in logits. `normalized_entropy` is entropy / ln n and `support_share`
    support / n, for n visible keys. `bound`, `sink` and `length_scale` are None where the model has no such value.
    """

    layer: int
    head: int
    entropy: float
    normalized_entropy: float
    support: float
    support_share: float
    inverse_temperature: float
    spread: float
    bound: float | None
    sink: float | None
    length_scale: float | None


def head_rows(statistics: TokenStatistics) -> list[HeadRow]:
    """Return a row per head, from the sharpest to the most dispersed."""

    def mean(values: Doubles) -> Doubles:
        """Return the means of values [..., tokens] over the tokens after the first."""
        return np.asarray(values[..., 1:].mean(-1))

    normalized, share = statistics.normalized_entropy, statistics.support_share
    entropy, support, spread = map(mean, (statistics.entropy, statistics.support, statistics.spread))
    beta = mean(statistics.inverse_temperature)
    bound, sink, length_scale = (
        None if values is None else mean(values)
        for values in (statistics.bound, statistics.sink, statistics.length_scale)
    )
    return [
        HeadRow(
            layer=layer,
            head=head,
            entropy=float(entropy[layer, head]),
            normalized_entropy=float(normalized[layer, head]),
            support=float(support[layer, head]),
            support_share=float(share[layer, head]),
            inverse_temperature=float(beta[layer, head]),
            spread=float(spread[layer, head]),
            bound=None if bound is None else float(bound[layer, head]),
            sink=None if sink is None else float(sink[layer, head]),
            length_scale=None if length_scale is None else float(length_scale[layer, head]),
        )
        for layer, head in map(divmod, np.argsort(normalized, axis=None), [normalized.shape[1]] * normalized.size)
    ]


def heads_table(statistics: TokenStatistics, adaptive: bool) -> Table:
    """Make the table of the sharpest and the most dispersed heads, up to 8 of each; all heads if there are 16 or fewer.

    `adaptive` adds the inverse temperature beta.
    """
    rows = head_rows(statistics)
    table = Table(
        title="Attention heads, from the sharpest to the most dispersed (means over the text)", title_justify="left"
    )
    for column in ("layer", "head", "entropy", "/ ln n", "support", "/ n", "spread", "bound", "/ bound"):
        table.add_column(column, justify="right")
    if adaptive:
        table.add_column("beta", justify="right")
    if statistics.sink is not None:
        table.add_column("sink", justify="right")
    if statistics.length_scale is not None:
        table.add_column("length scale", justify="right")
    for index, row in enumerate(rows):
        if len(rows) > 2 * HEADS_SHOWN and HEADS_SHOWN <= index < len(rows) - HEADS_SHOWN:
            continue
        cells = [str(row.layer), str(row.head), f"{row.entropy:.2f}", f"{row.normalized_entropy:.3f}"]
        cells += [f"{row.support:.1f}", f"{row.support_share:.3f}", f"{row.spread:.2f}"]
        cells += ["-", "-"] if row.bound is None else [f"{row.bound:.1f}", f"{row.spread / row.bound:.3f}"]
        if adaptive:
            cells.append(f"{row.inverse_temperature:.2f}")
        if row.sink is not None:
            cells.append(f"{row.sink:.3f}")
        if row.length_scale is not None:
            cells.append(f"{row.length_scale:.2f}")
        table.add_row(*cells, end_section=len(rows) > 2 * HEADS_SHOWN and index == HEADS_SHOWN - 1)
    return table
