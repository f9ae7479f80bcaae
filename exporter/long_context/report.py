"""The report of an evaluation: evaluation.json, one HTML page, and a picture."""

import base64
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sharp.exporter.long_context.documents import TASKS
from sharp.exporter.long_context.intervals import Estimate, difference, ratio

Line = dict[str, Any]
PICTURE, PAGE, FIGURES = "evaluation.png", "evaluation.html", "evaluation.json"
SCORES = {"among": "right among the choices", "text": "right greedy text", "nats": "nats of the expected choice"}
ACCURACIES = ("among", "text")  # the scores that are shares of right responses
DEPTHS = 4  # parts of a document in figures by depth


def summarize(lines: Sequence[Line]) -> Line:
    """Return the figures of every model by length, which are the content of `evaluation.json` without the settings.

    `lines` are those of `sharp.exporter.long_context.evaluate.evaluate`; the model of the first is the one to which the
    others are compared. The entries are models, lengths, rows (a row per model and length) and perplexity (a row per
    model and range of positions).
    """
    models = list(dict.fromkeys(line["model"] for line in lines))
    lengths = sorted({line["length"] for line in lines})
    rows = []
    for model in models:
        for length in lengths:
            own = _of(lines, model, length)
            if not own:
                continue
            row: Line = {"model": model, "length": length, "documents": len(own)}
            row["prompt_tokens"] = round(sum(line["tokens"] for line in own) / len(own))
            row["tasks"] = {task: _task(own, _of(lines, models[0], length), task) for task in _tasks(own)}
            row["heads"] = _heads(own)
            rows.append(row)
    return {"models": models, "lengths": lengths, "rows": rows, "perplexity": _perplexities(lines, models)}


def _of(lines: Iterable[Line], model: str, length: int) -> list[Line]:
    """Return a model's results at one length (tokens), in the order of documents."""
    found = (line for line in lines if line["model"] == model and line["length"] == length)
    return sorted(found, key=lambda line: line["document"])


def _tasks(lines: Sequence[Line]) -> list[str]:
    """Return the names of the tasks that any of the results has, in the order of `TASKS`."""
    return [task for task in TASKS if any(line["tasks"].get(task) for line in lines)]


def _task(own: Sequence[Line], first: Sequence[Line], task: str) -> Line:
    """Return the figures of one task, from the lines of one model (`own`) and of the first model, of one length.

    The entries are questions (their number), chance (the accuracy of a random choice), and for each of `SCORES` the
    `Estimate` of its mean as a dict, with by_depth, for task tracking by_hops, and for other models than the first
    against_first (the difference); a score is None if the model does not report it. The task must have questions.
    """
    own = [line for line in own if line["tasks"].get(task)]
    questions = [question for line in own for question in line["tasks"][task]]
    found: Line = {
        "questions": len(questions),
        "chance": sum(1 / question["choices"] for question in questions) / len(questions),
    }
    for score in SCORES:
        if any(question.get(score) is None for question in questions):  # older results have no nats
            found[score] = None
            continue
        found[score] = asdict(ratio(*_sums(own, task, score)))
        found[score]["by_depth"] = _parts(questions, score, lambda one: min(DEPTHS - 1, int(one["depth"] * DEPTHS)))
        if task == "tracking":
            found[score]["by_hops"] = _parts(questions, score, lambda one: one["hops"])
        pairs = _paired(own, first, task, score)
        if own and first and own[0]["model"] != first[0]["model"] and pairs is not None:
            found[score]["against_first"] = asdict(difference(*pairs))
    return found


def _sums(lines: Sequence[Line], task: str, score: str) -> tuple[list[float], list[int]]:
    """Return two lists with an entry per document: the sum of a score over a task's questions, and their number.

    `score` is one of `SCORES`; those of accuracy count the right responses.
    """
    return (
        [sum(float(question[score]) for question in line["tasks"][task]) for line in lines],
        [len(line["tasks"][task]) for line in lines],
    )


def _paired(
    own: Sequence[Line], first: Sequence[Line], task: str, score: str
) -> tuple[list[float], list[float], list[int]] | None:
    """Return sums of a score of both models, and questions, for the documents on which both have the same questions.

    None if there is no such document, or if the first model has no such score.
    """
    others = {line["document"]: line for line in first if line["tasks"].get(task)}
    pairs = [
        (line, others[line["document"]])
        for line in own
        if line["document"] in others and len(line["tasks"][task]) == len(others[line["document"]]["tasks"][task])
    ]
    if not pairs or any(question.get(score) is None for _, other in pairs for question in other["tasks"][task]):
        return None
    mine, asked = _sums([line for line, _ in pairs], task, score)
    theirs, _ = _sums([other for _, other in pairs], task, score)
    return mine, theirs, asked


def _parts(questions: Sequence[Line], score: str, part_of: Callable[[Line], int]) -> list[float | None]:
    """Return the mean of a score over questions, per index that `part_of` gives a question.

    An index without questions has None.
    """
    parts: dict[int, list[float]] = {}
    for question in questions:
        parts.setdefault(part_of(question), []).append(float(question[score]))
    return [
        sum(parts[index]) / len(parts[index]) if index in parts else None for index in range(max(parts, default=-1) + 1)
    ]


def _heads(lines: Sequence[Line]) -> Line | None:
    """Return entropy (nats) and support (share) of the heads over the questions' tokens, as means over documents.

    The entries are entropy and support (means over heads), entropy_by_head and support_by_head (layer by layer); None
    if no line has heads.
    """
    observed = [line["heads"] for line in lines if line["heads"] is not None]
    if not observed:
        return None
    found: Line = {}
    for index, name in enumerate(("entropy", "support")):
        every = [[value for row in heads[index] for value in row] for heads in observed]
        by_head = [sum(values) / len(values) for values in zip(*every, strict=True)]
        found[name] = sum(by_head) / len(by_head)
        found[f"{name}_by_head"] = [round(value, 4) for value in by_head]
    return found


def _perplexities(lines: Sequence[Line], models: Sequence[str]) -> list[Line]:
    """Return perplexity by position of every model, over its documents that reach the position.

    A row has model, to (the last position of its range), tokens (number of losses), perplexity, low and high.
    """
    rows = []
    for model in models:
        parts: dict[int, tuple[list[float], list[int]]] = {}
        for line in lines:
            if line["model"] == model and line["losses"] is not None:
                for part in line["losses"]:
                    sums, counts = parts.setdefault(part["to"], ([], []))
                    sums.append(part["sum"])
                    counts.append(part["count"])
        for to, (sums, counts) in sorted(parts.items()):
            loss = ratio(sums, counts)
            rows.append({"model": model, "to": to, "tokens": sum(counts), **_exponentials(loss)})
    return rows


def _exponentials(loss: Estimate) -> Line:
    """Return a perplexity and its 95 % interval, from the mean cross entropy in nats and its interval.

    The entries are perplexity, low and high, each at most e^700; low and high are None where the interval is unknown.
    """
    return {
        name: None if value is None else math.exp(min(value, 700.0))
        for name, value in (("perplexity", loss.value), ("low", loss.low), ("high", loss.high))
    }


def write_report(figures: Line, folder: Path) -> None:
    """Write evaluation.json, evaluation.html and evaluation.png into `folder`, which must exist.

    `figures` are those of `summarize` with the entries settings and text.

    Raises:
        OSError: a file cannot be written.
    """
    (folder / FIGURES).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    plot(figures, folder / PICTURE)
    picture = base64.b64encode((folder / PICTURE).read_bytes()).decode()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("evaluation.html.jinja").render(
        figures=figures, tables=tables(figures), picture=picture
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def tables(figures: Line) -> list[Line]:
    """Return the tables of the page, each with the entries title, columns (names) and rows (lists of cells)."""
    lengths, models = figures["lengths"], figures["models"]
    rows = {(row["model"], row["length"]): row for row in figures["rows"]}
    found = []
    for task in TASKS:
        for score, said in SCORES.items():
            cells = {
                key: row["tasks"][task][score]
                for key, row in rows.items()
                if task in row["tasks"] and row["tasks"][task].get(score) is not None
            }
            if not cells:
                continue
            chance = (
                f", chance {next(row['tasks'][task]['chance'] for row in rows.values() if task in row['tasks']):.0%}"
            )
            form = "{:.0%}" if score in ACCURACIES else "{:.2f}"
            found.append(
                {
                    "title": f"{task}, {said}{chance if score == 'among' else ''}",
                    "columns": ["model", *(f"{length:,}" for length in lengths)],
                    "rows": [
                        [model, *(_cell(cells.get((model, length)), form) for length in lengths)] for model in models
                    ],
                }
            )
    if any(row["heads"] for row in rows.values()):
        for name, form in (("entropy", "{:.2f} nats"), ("support", "{:.1%}")):
            found.append(
                {
                    "title": {
                        "entropy": "Entropy of the heads while they read the questions",
                        "support": "Keys with a weight, share of those that are visible",
                    }[name],
                    "columns": ["model", *(f"{length:,}" for length in lengths)],
                    "rows": [
                        [model, *(_head_cell(rows.get((model, length)), name, form) for length in lengths)]
                        for model in models
                    ],
                }
            )
    if figures["perplexity"]:
        ends = sorted({row["to"] for row in figures["perplexity"]})
        values = {(row["model"], row["to"]): row["perplexity"] for row in figures["perplexity"]}
        found.append(
            {
                "title": "Perplexity of the documents, by position",
                "columns": ["model", *(f"{1 if end == 256 else end // 2 + 1:,} to {end:,}" for end in ends)],
                "rows": [
                    [model, *(f"{values[model, end]:.2f}" if (model, end) in values else "" for end in ends)]
                    for model in models
                ],
            }
        )
    counts = [
        [model, *(str(rows[model, length]["documents"]) if (model, length) in rows else "" for length in lengths)]
        for model in models
    ]
    found.append({"title": "Documents", "columns": ["model", *(f"{length:,}" for length in lengths)], "rows": counts})
    return found


def _cell(estimate: Line | None, form: str) -> str:
    """Return a table cell: the mean, its interval or standard error, each in the format string `form`; "" for None.

    An arrow says that the model differs from the first, up or down.
    """
    if estimate is None:
        return ""
    value, low, high, error = (
        "" if estimate[name] is None else form.format(estimate[name])
        for name in ("value", "low", "high", "standard_error")
    )
    if not error:
        return value
    if not low:
        return f"{value} ± {error}"
    shown = f"{value} ({low} to {high})"
    against = estimate.get("against_first")
    if against is not None and against["low"] is not None and (against["low"] > 0 or against["high"] < 0):
        shown += f" {'▲' if against['value'] > 0 else '▼'}"
    return shown


def _head_cell(row: Line | None, name: str, form: str) -> str:
    """Return the value `name` of a row's heads in the format string `form`; "" without a row or heads."""
    return form.format(row["heads"][name]) if row is not None and row["heads"] else ""


def plot(figures: Line, path: Path) -> None:
    """Plot accuracy of every task by length with intervals, perplexity by position, and accuracy against entropy.

    `figures` are those of `summarize`; the picture is written to `path`.
    """
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(task in row["tasks"] for row in figures["rows"])]
    panels = len(tasks) + bool(figures["perplexity"]) + any(row["heads"] for row in figures["rows"])
    columns = min(3, panels)
    height = -(-panels // columns)
    figure = Figure(figsize=(5 * columns, 3.8 * height + 0.5), layout="constrained")
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_visible(False)
    colors = {model: f"C{index % 10}" for index, model in enumerate(figures["models"])}
    for panel, task in zip(axes, tasks, strict=False):
        for model in figures["models"]:
            bars = [
                (row["length"], *_shown(row["tasks"][task]))
                for row in figures["rows"]
                if row["model"] == model and task in row["tasks"]
            ]
            if bars:
                xs, values, lows, highs = zip(*bars, strict=True)
                panel.errorbar(xs, values, [lows, highs], fmt="o-", capsize=3, label=model, color=colors[model])
        chance = [row["tasks"][task]["chance"] for row in figures["rows"] if task in row["tasks"]]
        panel.axhline(sum(chance) / len(chance), color="grey", linestyle=":", linewidth=1)
        panel.set(xlabel="tokens", ylabel="right", title=task, xscale="log", ylim=(0, 1.02))
        _powers(panel, figures["lengths"])
    rest = axes[len(tasks) : panels]
    if figures["perplexity"]:
        panel = rest.pop(0)
        for model in figures["models"]:
            points = [(row["to"], row["perplexity"]) for row in figures["perplexity"] if row["model"] == model]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", label=model, color=colors[model])
        panel.set(xlabel="position", ylabel="perplexity", title="perplexity by position", xscale="log", yscale="log")
        _powers(panel, sorted({row["to"] for row in figures["perplexity"]}))
    if rest and tasks:
        panel = rest.pop(0)
        for model in figures["models"]:
            points = [
                (row["heads"]["entropy"], _shown(row["tasks"][tasks[0]])[0])
                for row in figures["rows"]
                if row["model"] == model and row["heads"] and tasks[0] in row["tasks"]
            ]
            if points:
                panel.plot(*zip(*points, strict=True), "o-", color=colors[model])
        panel.set(xlabel="mean entropy of the heads, nats", ylabel=f"{tasks[0]}, right", ylim=(0, 1.02))
        panel.set_title("does sharpness go with finding?")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))), fontsize="small")
    figure.savefig(path, dpi=110)


def _shown(task: Line) -> tuple[float, float, float]:
    """Return the accuracy and the interval's lengths below and above it, which are 0 where the interval is unknown.

    The accuracy is that among the choices if it is known, otherwise that of the greedy text.
    """
    estimate = task["among"] or task["text"]
    low, high = (estimate["value"] if estimate[name] is None else estimate[name] for name in ("low", "high"))
    return estimate["value"], max(0.0, estimate["value"] - low), max(0.0, high - estimate["value"])


def _powers(panel: Any, values: Sequence[int]) -> None:
    """Label the x axis at `values` (tokens), multiples of 1024 as "8k"."""
    from matplotlib.ticker import NullLocator

    panel.set_xticks(
        values, [f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value) for value in values]
    )
    panel.xaxis.set_minor_locator(NullLocator())  # a log axis of y keeps its labels
