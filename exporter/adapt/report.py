"""What a run found: report.json, report.md, one HTML page, a picture, and the model card."""

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

Report = dict[str, Any]
PICTURE = "report.png"


def write_report(report: Report, folder: Path) -> None:
    """Write all of it into `folder`.

    Raises:
        OSError: it cannot be written.
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
    # The loader of a folder, as the one of a package does not find data files of an editable install.
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=escape,  # noqa: S701 - Markdown has no markup to escape
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def tables(report: Report) -> list[dict[str, Any]]:
    """The tables of the report: title, columns, rows of text."""
    models = {"teacher": report["teacher_figures"], "raw swap": report["raw"], "student": report["student"]}
    found = []
    rows = []
    for key, name in (("held_out", f"held out of {report['text']}"), ("unlike", f"another text, {report['unlike']}")):
        teacher = models["teacher"][key]["perplexity"]
        values = [one[key]["perplexity"] for one in models.values()]
        length = models["teacher"][key]["length"]
        rows.append([name, str(length), *(f"{one:.2f}" for one in values), f"{values[-1] / teacher - 1:+.1%}"])
    columns = ["text", "tokens of a window", *models, "student against teacher"]
    found.append({"title": "Perplexity", "columns": columns, "rows": rows})
    for key, name in (("held_out", "held-out text"), ("unlike", "another text")):
        parts = zip(*(one[key]["by_position"] for one in models.values()), strict=True)
        rows = [
            [f"{row[0]['from']} to {row[0]['to'] - 1}", *(f"{one['perplexity']:.2f}" for one in row)] for row in parts
        ]
        found.append({"title": f"Perplexity by position, {name}", "columns": ["position", *models], "rows": rows})
    rows = [
        ["entropy, nats", *(f"{one['mean_entropy']:.2f}" for one in models.values())],
        ["keys with a weight", *(f"{one['mean_support']:.1%}" for one in models.values())],
    ]
    found.append({"title": "Attention, mean of all heads", "columns": ["", *models], "rows": rows})
    if report["head_parameters"]:
        rows = [[name, f"{value:.2f}"] for name, value in report["head_parameters"].items()]
        found.append(
            {"title": f"Parameters of {report['norm']}, median head", "columns": ["", "student"], "rows": rows}
        )
    if report["student"]["retrieval"]:
        found.append(_retrieval(report))
    if "speed" in report:
        found.append(_speed(report["speed"]))
    return found


def _speed(speed: Report) -> dict[str, Any]:
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
    pairs = zip(report["teacher_figures"]["retrieval"], report["student"]["retrieval"], strict=True)
    rows = [
        [str(a["tokens"]), f"{a['depth']:.0%}", f"{a['right']} of {a['trials']}", f"{b['right']} of {b['trials']}"]
        for a, b in pairs
    ]
    rows.append(["all", "", *(f"{report[key]['retrieved']:.0%}" for key in ("teacher_figures", "student"))])
    title = "Retrieval: the right word is the likeliest of eight"
    return {"title": title, "columns": ["tokens", "depth", "teacher", "student"], "rows": rows}


def plot(report: Report, path: Path) -> None:
    """Perplexity by position, and every head's entropy and support before and after."""
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
