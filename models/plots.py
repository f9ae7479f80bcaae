"""Pictures of training and evaluation, which need the optional package matplotlib."""

import csv
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from sharp.models.temperature_fit import Points
from sharp.plugins.op.schema import ICML2025_COEFFICIENTS

LINES_INSIDE = 8  # a legend inside the axes with more names would cover the lines
INSTALL = "install matplotlib for a plot of it: pip install matplotlib"


def plot_losses(log: Path, picture: Path) -> str | None:
    """Draw the losses of a training log (loss.csv of `sharp.models.trainer.train`) to the file `picture`.

    Returns:
        A hint what to install if matplotlib is missing, and then no file is written; otherwise None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([int(row["step"]) for row in rows], [float(row["train_loss"]) for row in rows], label="training loss")
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    column = list(rows[0])[-1] if rows else ""
    if checked := [row for row in rows if row[column]]:
        right = axes.twinx()
        right.plot(
            [int(row["step"]) for row in checked], [float(row[column]) for row in checked], "o-", color="tab:orange"
        )
        right.set_ylabel(column.replace("_", " "))
    figure.savefig(picture, dpi=120)
    return None


def plot_scores(
    rows: Sequence[tuple[str, float, float, float]],
    x_name: str,
    y_name: str,
    title: str,
    picture: Path,
    dashed: Collection[str] = (),
    log_scores: bool = False,
    limits: tuple[float, float] | None = None,
) -> str | None:
    """Draw rows (name of the line, x, score, error), at least one, as lines, to the file `picture`.

    Lines in `dashed` have the color of the line before and no error bars. `limits` are the limits of the scores' axis,
    which `log_scores` makes logarithmic. The axis of x is logarithmic if there are several x, all above 0.

    Returns:
        A hint what to install if matplotlib is missing, and then no file is written; otherwise None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    lines: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, x, mean, error in rows:
        lines[name].append((x, mean, error))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    color = None
    for name, points in lines.items():
        xs, means, errors = zip(*points, strict=True)
        if name in dashed:
            axes.plot(xs, means, "--", label=name, color=color)
        else:
            color = axes.errorbar(xs, means, yerr=errors, label=name).lines[0].get_color()
    axes.set(xlabel=x_name, ylabel=y_name, title=title)
    if len({x for _, x, *_ in rows}) > 1 and min(x for _, x, *_ in rows) > 0:
        axes.set_xscale("log", base=2)
    if log_scores:
        axes.set_yscale("log")
    if limits is not None:
        axes.set_ylim(limits)
    if len(lines) > LINES_INSIDE:
        figure.set_size_inches(11, 4.5)
        figure.legend(fontsize="small", loc="outside right upper")
    elif len(lines) > 1:
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
    return None


def plot_temperature_fit(points: Points, coefficients: Sequence[float], title: str, picture: Path) -> str | None:
    """Draw how often every inverse temperature is best, and our and the paper's polynomials, over the entropy.

    The picture is Figure 6 of the adaptive-temperature paper with 1 / theta instead of theta. `coefficients` are those
    of our polynomial, highest power first.

    Returns:
        A hint what to install if matplotlib is missing, otherwise None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    cells = axes.hexbin(
        points.entropy, points.inverse_temperature, gridsize=60, bins="log", mincnt=1, cmap="Greys", linewidths=0.1
    )
    figure.colorbar(cells, ax=axes, label="points")
    low, high = points.entropy.min(), points.entropy.max()
    edges = np.linspace(low, high, 21)
    bins = np.digitize(points.entropy, edges[1:-1])
    filled = [index for index in range(20) if (bins == index).any()]
    means = [points.inverse_temperature[bins == index].mean() for index in filled]
    axes.plot((edges[:-1] + edges[1:])[filled] / 2, means, "o", color="tab:orange", label="mean of the points")
    inside, around = np.linspace(low, high, 200), np.linspace(0, 1.15 * high, 300)
    axes.plot(around, np.polyval(ICML2025_COEFFICIENTS, around), "--", color="tab:blue", label="paper (ICML 2025)")
    axes.plot(around, np.polyval(coefficients, around), ":", color="tab:red")
    axes.plot(inside, np.polyval(coefficients, inside), color="tab:red", label="fitted to this model")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set(xlabel="entropy of the attention, nats", ylabel="inverse temperature 1 / θ", title=title)
    axes.set_ylim(0, max(4.0, 1.2 * max(means)))
    axes.legend()
    figure.savefig(picture, dpi=120)
    return None
