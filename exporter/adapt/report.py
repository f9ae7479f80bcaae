"""The report of a run: report.json, report.md, one HTML page, a picture, and the model card."""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Report = dict[str, Any]
PICTURE = "report.png"


def write_report(report: Report, folder: Path) -> None:
    """Write report.json, report.md, report.html, report.png and the model card README.md into `folder`.

    `report` is the result of `sharp.exporter.adapt.adapt.adapt`.

    Raises:
        OSError: a file cannot be written.
    """
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, folder / PICTURE)
    picture = base64.b64encode((folder / PICTURE).read_bytes()).decode()
    content = {"report": report, "tables": tables(report), "picture": picture}
    for template, name in (("report.md.jinja", "report.md"), ("card.md.jinja", "README.md")):
        (folder / name).write_text(_environment(False).get_template(template).render(content), encoding="utf-8")
    page = _environment(True).get_template("report.html.jinja").render(content)
    (folder / "report.html").write_text(page, encoding="utf-8")


def _environment(escape: bool) -> Environment:
    """Return the environment of the report's Jinja templates; `escape` is true for HTML and false for Markdown."""
    # FileSystemLoader, because PackageLoader does not find data files of an editable install.
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=escape,  # noqa: S701 - Markdown has no markup to escape
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def tables(report: Report) -> list[dict[str, Any]]:
    """Return the tables of the report, each with the entries title, columns (names) and rows (lists of cells), as text.

    The first table is the perplexity.
    """
    models = {"teacher": report["teacher_figures"], "raw swap": report["raw"], "student": report["student"]}
    found = []
    rows = []
    for key, name in (("held_out", f"held out of {report['text']}"), ("unlike", f"another text, {report['unlike']}")):
        teacher = models["teacher"][key]["perplexity"]
        values = [figures[key]["perplexity"] for figures in models.values()]
        length = models["teacher"][key]["length"]
        rows.append(
            [name, str(length), *(f"{perplexity:.2f}" for perplexity in values), f"{values[-1] / teacher - 1:+.1%}"]
        )
    columns = ["text", "tokens of a window", *models, "student against teacher"]
    found.append({"title": "Perplexity", "columns": columns, "rows": rows})
    for key, name in (("held_out", "held-out text"), ("unlike", "another text")):
        parts = zip(*(figures[key]["by_position"] for figures in models.values()), strict=True)
        rows = [
            [f"{row[0]['from']} to {row[0]['to'] - 1}", *(f"{model['perplexity']:.2f}" for model in row)]
            for row in parts
        ]
        found.append({"title": f"Perplexity by position, {name}", "columns": ["position", *models], "rows": rows})
    rows = [
        ["entropy, nats", *(f"{figures['mean_entropy']:.2f}" for figures in models.values())],
        ["keys with a weight", *(f"{figures['mean_support']:.1%}" for figures in models.values())],
    ]
    found.append({"title": "Attention, mean of all heads", "columns": ["", *models], "rows": rows})
    if report["head_parameters"]:
        rows = [[name, f"{value:.2f}"] for name, value in report["head_parameters"].items()]
        found.append(
            {"title": f"Parameters of {report['norm']}, median head", "columns": ["", "student"], "rows": rows}
        )
    if report["calibration"]:
        found.append(_calibration(report["calibration"]))
    if report["student"]["retrieval"]:
        found.append(_retrieval(report))
    if "speed" in report:
        found.append(_speed(report["speed"]))
    return found


def _calibration(calibration: Report) -> dict[str, Any]:
    """Return title, columns and rows of the table of the calibration, whose errors are [layers][heads]."""
    errors = sorted(error for layer in calibration["errors"] for error in layer)
    middle = [errors[round(share * (len(errors) - 1))] for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
    rows = [
        ["error of the heads' output, 10, 25, 50, 75 and 90 %", ", ".join(f"{error:.3f}" for error in middle)],
        ["heads that keep softmax", f"{calibration['kept_share']:.0%}"],
        ["their groups' error is above", f"{calibration['max_error']:g}"],
        ["tokens", f"{calibration['tokens']:,}"],
    ]
    return {"title": "Calibration, before any training", "columns": ["", ""], "rows": rows}


def _speed(speed: Report) -> dict[str, Any]:
    """Return title, columns and rows of the table of decoding times: ms per token of teacher and student.

    If the measurement failed, the title says so.
    """
    rows = [
        [
            f"{row['context']:,}",
            *(f"{row['median_ms'][name]:.1f}" for name in ("teacher", "student")),
            f"{row['times_as_fast']:.2f}",
        ]
        for row in speed["rows"]
    ]
    title = "Decoding, milliseconds a token, one sequence on the CPU"
    if "failed" in speed:
        title = f"Decoding was not measured: {speed['failed']}"
    return {"title": title, "columns": ["tokens before", "teacher", "student", "times as fast"], "rows": rows}


def _retrieval(report: Report) -> dict[str, Any]:
    """Return title, columns and rows of the table of retrieval: right of all trials, per length and depth."""
    pairs = zip(report["teacher_figures"]["retrieval"], report["student"]["retrieval"], strict=True)
    rows = [
        [str(a["tokens"]), f"{a['depth']:.0%}", f"{a['right']} of {a['trials']}", f"{b['right']} of {b['trials']}"]
        for a, b in pairs
    ]
    rows.append(["all", "", *(f"{report[key]['retrieved']:.0%}" for key in ("teacher_figures", "student"))])
    title = "Retrieval: the right word is the likeliest of eight"
    return {"title": title, "columns": ["tokens", "depth", "teacher", "student"], "rows": rows}


def plot(report: Report, path: Path) -> None:
    """Plot perplexity by position, and every head's entropy and support in teacher and student, to the file `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, key in (("teacher", "teacher_figures"), ("raw swap", "raw"), ("student", "student")):
        rows = report[key]["unlike"]["by_position"]
        left.plot([row["to"] - 1 for row in rows], [row["perplexity"] for row in rows], "o-", label=name)
    left.set(xlabel="position", ylabel="perplexity", xscale="log", yscale="log", title=f"Text: {report['unlike']}")
    left.legend()
    for axes, what, label in ((middle, "entropy", "entropy, nats"), (right, "support", "share of keys with a weight")):
        before, after = (
            [value for layer in report[key]["heads"][what] for value in layer] for key in ("teacher_figures", "student")
        )
        axes.plot(before, after, ".", alpha=0.6)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.5)
        axes.set(xlabel=f"teacher: {label}", ylabel=f"student: {label}", title="Every head")
    figure.savefig(path, dpi=110)
