"""Pictures of training and evaluation; they need matplotlib, which is optional."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

INSTALL = "install matplotlib for a plot of it: pip install matplotlib"


def plot_losses(log: Path, picture: Path) -> str | None:
    """Draw the losses of a training log; a hint what to install where matplotlib is missing."""
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
    rows: Sequence[tuple[str, float, float, float]], x_name: str, y_name: str, title: str, picture: Path
) -> str | None:
    """Draw rows (line, x, score, standard error), one line each; a hint where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return INSTALL
    lines: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, x, mean, error in rows:
        lines[name].append((x, mean, error))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        xs, means, errors = zip(*points, strict=True)
        axes.errorbar(xs, means, yerr=errors, label=name)
    axes.set(xlabel=x_name, ylabel=y_name, title=title)
    if len({x for _, x, *_ in rows}) > 1 and min(x for _, x, *_ in rows) > 0:
        axes.set_xscale("log", base=2)
    if len(lines) > 1:
        axes.legend()
    figure.savefig(picture, dpi=120)
    return None
