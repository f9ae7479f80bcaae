"""The pictures of an inspection as PNG files."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sharp.exporter.inspection.attention_map import AttentionMap
from sharp.exporter.inspection.heads import TokenStatistics, entropy_curves
from sharp.exporter.inspection.inspection import Inspection
from sharp.exporter.inspection.table import head_rows

DPI = 120
COLUMNS = 6  # panels side by side
SMALLEST_WEIGHT = 1e-4  # the dark end of a map's colours


def draw_pictures(inspection: Inspection, folder: Path) -> list[Path]:
    """Write entropy.png, heads.png, attention.png and, if there are a bound and a spread, spread.png into `folder`.

    There is no spread if every query sees only one key. The folder must exist. The paths of the files are returned.
    """
    statistics, model = inspection.statistics, inspection.model
    figures = {
        "entropy.png": draw_entropy(statistics, model.trained_context),
        "heads.png": draw_heads(statistics),
        "attention.png": draw_maps(inspection.maps),
    }
    if statistics.bound is not None and statistics.spread[..., 1:].any():
        figures["spread.png"] = draw_spread(statistics)
    for name, figure in figures.items():
        figure.suptitle(f"{figure.get_suptitle()}: {model.name}, norm {model.norm}")
        figure.savefig(folder / name, dpi=DPI)
    return [folder / name for name in figures]


def draw_entropy(statistics: TokenStatistics, trained_context: int) -> Figure:
    """Draw a panel per layer, as in Figure 3 of the adaptive-temperature paper: a curve per head, mean and ln n.

    A dotted line marks `trained_context` if there are more tokens.
    """
    curves = entropy_curves(statistics)
    layers, heads, _ = curves.entropy.shape
    columns = min(COLUMNS, layers, max(2, int(np.ceil(layers**0.5))))
    rows = -(-layers // columns)
    figure = Figure(figsize=(max(6.0, 3.2 * columns), 2.6 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colors = colormaps["turbo"](np.linspace(0.05, 0.95, heads))
    for layer, panel in enumerate(panels.flat):
        if layer >= layers:
            panel.set_axis_off()
            continue
        _draw_layer(panel, curves.length, curves.entropy[layer], colors)
        panel.plot(curves.length, curves.uniform[layer], "k--", label="ln n: uniform attention")
        if trained_context < statistics.tokens:
            panel.axvline(trained_context, color="gray", linestyle=":", label="trained context")
        panel.set(title=f"layer {layer}", xscale="log")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4 if columns > 2 else 2)
    for panel in panels[-1]:
        panel.set_xlabel("context length n (keys seen)")
    for panel in panels[:, 0]:
        panel.set_ylabel("entropy (nats)")
    figure.suptitle("Entropy of the heads")
    return figure


def _draw_layer(panel: Axes, length: np.ndarray, entropy: np.ndarray, colors: np.ndarray) -> None:
    """Draw the entropy [heads, points] of one layer against `length` (visible tokens) with its mean and deviation.

    `colors` has a color per head.
    """
    for head, (curve, color) in enumerate(zip(entropy, colors, strict=True)):
        panel.plot(length, curve, color=color, linewidth=0.8, label="a head" if head == 0 else None)
    mean, deviation = entropy.mean(0), entropy.std(0)
    panel.plot(length, mean, color="tab:blue", linewidth=2, label="mean and deviation of the heads")
    panel.fill_between(length, mean - deviation, mean + deviation, color="tab:blue", alpha=0.2)


def draw_heads(statistics: TokenStatistics) -> Figure:
    """Draw two heat maps layer x head: entropy / ln n, and the share of keys that have weight."""
    layers, heads = statistics.normalized_entropy.shape
    figure = Figure(figsize=(max(8.0, 0.7 * heads + 3), max(3.2, 0.26 * layers + 1.4)), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = (("entropy / ln n", statistics.normalized_entropy), ("support / n", statistics.support_share))
    for panel, (title, values) in zip(panels, shown, strict=True):
        image = panel.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        panel.set(title=title, xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
        figure.colorbar(image, ax=panel)
    figure.suptitle("Sharp (0) and dispersed (1) heads")
    return figure


def draw_maps(maps: tuple[AttentionMap, ...]) -> Figure:
    """Draw the attention map of every chosen head; weights of 0 stay white."""
    figure = Figure(figsize=(6.2 * len(maps), 5.6), layout="constrained")
    panels = figure.subplots(1, len(maps), squeeze=False)
    for panel, attention_map in zip(panels.flat, maps, strict=True):
        weights = np.ma.masked_less_equal(attention_map.weights, 0)
        last = int(attention_map.queries[-1]) + 1
        colors = LogNorm(SMALLEST_WEIGHT, max(float(attention_map.weights.max()), 2 * SMALLEST_WEIGHT))
        image = panel.imshow(weights, norm=colors, cmap="magma_r", interpolation="nearest", extent=(0, last, last, 0))
        panel.set(
            title=f"layer {attention_map.layer}, head {attention_map.head}",
            xlabel="key",
            ylabel="query",
            xlim=(-last / 64, last),
        )
        panel.spines[:].set_visible(False)  # the left spine would hide the first key, on which many heads rest
        figure.colorbar(image, ax=panel, label="weight")
    figure.suptitle("Attention maps")
    return figure


def draw_spread(statistics: TokenStatistics) -> Figure:
    """Draw the mean logit spread of every head against the mean of its bound by Prop. 3.1.

    Heads without a bound or a spread are left out; at least one head must have both.
    """
    rows = [row for row in head_rows(statistics) if row.bound and row.spread]
    bounds, spreads = [row.bound or 0.0 for row in rows], [row.spread for row in rows]
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    panel = figure.subplots()
    points = panel.scatter(bounds, spreads, c=[row.layer for row in rows], cmap="viridis", s=18, zorder=2)
    left, bottom, end = min(bounds) * 0.8, min(spreads) * 0.8, max(bounds) * 1.25
    panel.plot([left, end], [left, end], "k--", label="spread = bound (no head can be above)")
    panel.set(xlabel="bound of Prop. 3.1", ylabel="logit spread", xscale="log", yscale="log")
    panel.set(xlim=(left, end), ylim=(bottom, end))
    panel.legend()
    figure.colorbar(points, ax=panel, label="layer", ticks=MaxNLocator(integer=True))
    figure.suptitle("Logit spread and its bound")
    return figure
