"""`python -m sharp.models.results`: write `models/RESULTS.md`, our numbers beside the papers', from saved files only.

`models/results/SECTION/LABEL-seedN.csv` is what `sharp.models.evaluate` wrote for the model of seed N; LABEL is its
norm, and what else sets it apart. `SECTION.md` is our text about it, `published.json` has the papers' numbers and their
sources.
"""

import csv
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from scipy.stats import ttest_rel

from sharp.models.plots import plot_scores
from sharp.plugins.cli import SharpCommand
from sharp.plugins.errors import InputError

RESULTS = Path("models/results")
OUTPUT = Path("models/RESULTS.md")
FILE_NAME = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)")


@dataclass(frozen=True)
class Section:
    """One table: `name` is its folder, `factor` and `digits` make a saved score what is shown.

    `labels` come in this order, others after them. Where `rising` names labels, a second table counts the seeds in
    which every one of them is better than the one before. `paired` names a label and another that is measured on the
    same models: their difference gets a paired t-test over the seeds. `limits` are those of the picture's scores.
    """

    name: str
    title: str
    x_name: str
    score_name: str
    digits: str
    factor: float = 1.0
    labels: tuple[str, ...] = ()
    rising: tuple[str, ...] = ()
    paired: tuple[str, str] | None = None
    log_scores: bool = False
    limits: tuple[float, float] | None = None


SECTIONS = (
    Section(
        "max-retrieval",
        "Max retrieval",
        x_name="items",
        score_name="accuracy, %",
        digits=".1f",
        factor=100,
        labels=(
            "softmax",
            "adaptive-temperature",
            "adaptive-temperature-fitted",
            "log-power",
            "ssmax",
            "ssmax-bias",
            "ssa",
            "entmax",
            "asentmax",
        ),
        rising=("softmax", "adaptive-temperature", "log-power", "asentmax"),
        paired=("softmax", "adaptive-temperature"),
    ),
    Section(
        "mqmtar",
        "MQMTAR",
        x_name="tokens",
        score_name="exact match, %",
        digits=".1f",
        factor=100,
        labels=("softmax", "ssmax", "entmax", "asentmax"),
    ),
    *(
        Section(
            name,
            title,
            x_name="tokens",
            score_name=f"{score}, %",
            digits=".1f",
            factor=100,
            labels=("softmax", "ssmax", "entmax", "asentmax"),
            limits=(-3, 103),
        )
        for name, title, score in (
            ("2back", "2Back", "accuracy"),
            ("flip-flop-sparse", "Flip-Flop, sparse", "exact match"),
            ("local-count", "Local Count", "accuracy"),
            ("copy", "Copy", "exact match"),
            ("sort", "Sort", "exact match"),
            ("reverse", "Reverse", "exact match"),
        )
    ),
    Section(
        "linear-functions",
        "Linear functions",
        x_name="sigma",
        score_name="squared error",
        digits=".3g",
        labels=("softmax", "ssa"),
        log_scores=True,
    ),
    Section(
        "text",
        "Language models",
        x_name="bytes in a window",
        score_name="bits per byte",
        digits=".3f",
        labels=("softmax", "ssa", "asentmax"),
    ),
)


@dataclass(frozen=True)
class Measured:
    """The files of one label: a score for every seed and x, and how many samples each is the mean of."""

    label: str
    scores: dict[int, dict[float, float]]
    samples: tuple[int, ...]

    @property
    def xs(self) -> list[float]:
        """Every length, or value of what was varied, that some seed has a score at."""
        return sorted({x for row in self.scores.values() for x in row})

    def by_seed(self, x: float) -> dict[int, float]:
        """The score at `x` of every seed that has one."""
        return {seed: row[x] for seed, row in self.scores.items() if x in row}

    def at(self, x: float) -> list[float]:
        """The scores at `x`."""
        return list(self.by_seed(x).values())


@dataclass(frozen=True)
class Published:
    """A row of a paper's table; `scheme` is the label that it belongs beside."""

    section: str
    scheme: str
    name: str
    paper: str
    table: str
    scores: dict[float, float]


@dataclass(frozen=True)
class PublishedTest:
    """The p of a paper's paired t-test, by x."""

    section: str
    paper: str
    table: str
    p: dict[float, float]


def read_measured(folder: Path, factor: float) -> list[Measured]:
    """Everything in a section's folder, by label.

    Raises:
        InputError: a file's name does not say label and seed, or it is no file of `sharp.models.evaluate`.
    """
    rows: dict[str, dict[int, dict[float, float]]] = {}
    samples: dict[str, set[int]] = {}
    for path in sorted(folder.glob("*.csv")):
        name = FILE_NAME.fullmatch(path.stem)
        if name is None:
            raise InputError(f"{path} must be called LABEL-seedN.csv")
        label, seed = name["label"], int(name["seed"])
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                try:
                    x = float(row["value"] or row["length"])
                    rows.setdefault(label, {}).setdefault(seed, {})[x] = factor * float(row["score"])
                    samples.setdefault(label, set()).add(int(row["samples"]))
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"{path} is not a file of python -m sharp.models.evaluate") from error
    return [
        Measured(label, dict(sorted(scores.items())), tuple(sorted(samples[label]))) for label, scores in rows.items()
    ]


def read_published(path: Path) -> tuple[dict[str, dict[str, str]], list[Published], list[PublishedTest]]:
    """The papers by their keys, the rows of their tables, and their tests."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Published(**{**row, "scores": {float(x): score for x, score in row["scores"].items()}})
        for row in content["rows"]
    ]
    tests = [
        PublishedTest(**{**test, "p": {float(x): p for x, p in test["p"].items()}}) for test in content["paired_tests"]
    ]
    return content["papers"], rows, tests


def make_table(
    section: Section, measured: list[Measured], published: list[Published], papers: dict[str, dict[str, str]]
) -> list[list[str]]:
    """The cells of a section's table, its head first: every label of ours, then the papers' rows that belong to it."""
    xs = sorted({x for one in measured for x in one.xs} | {x for row in published for x in row.scores})
    ours = {one.label: one for one in measured}
    schemes = dict.fromkeys((*section.labels, *ours, *(row.scheme for row in published)))
    table = [[section.x_name, "", *(f"{x:,g}" for x in xs)]]
    for scheme in schemes:
        if scheme in ours:
            seeds = ", ".join(map(str, ours[scheme].scores))
            source = f"ours, seed{'s' * (len(ours[scheme].scores) > 1)} {seeds}"
            table.append([f"**{scheme}**", source, *(cell(ours[scheme], x, section.digits) for x in xs)])
        for row in published:
            if row.scheme == scheme:
                shown = [format(row.scores[x], section.digits) if x in row.scores else "" for x in xs]
                table.append([row.name, f"{papers[row.paper]['short']}, {row.table}", *shown])
    return table


def cell(one: Measured, x: float, digits: str) -> str:
    """Mean ± standard deviation over the seeds; how many they are where some lack this x."""
    scores = one.at(x)
    if not scores:
        return ""
    spread = f" ± {stdev(scores):{digits}}" if len(scores) > 1 else ""
    return f"{mean(scores):{digits}}{spread}" + (f" ({len(scores)})" if len(scores) < len(one.scores) else "")


def count_rises(section: Section, measured: list[Measured]) -> list[list[str]]:
    """In how many seeds each of `section.rising` is better than the one before, at every x; empty if none is there."""
    ours = {one.label: one for one in measured}
    pairs = [(low, high) for low, high in pairwise(section.rising) if low in ours and high in ours]
    xs = sorted({x for low, _ in pairs for x in ours[low].xs})
    table = [["", *(f"{x:,g}" for x in xs)]] if pairs else []
    for low, high in pairs:
        shown = [f"{low} < {high}"]
        for x in xs:
            before, after = ours[low].by_seed(x), ours[high].by_seed(x)
            both = before.keys() & after.keys()
            better = sum(before[seed] < after[seed] for seed in both)
            shown.append(f"{better} of {len(both)}" if both else "")
        table.append(shown)
    return table


def paired_test(
    section: Section, measured: list[Measured], published: list[PublishedTest], papers: dict[str, dict[str, str]]
) -> list[list[str]]:
    """`section.paired` over the seeds that have both, at every x, with the papers' p below; empty if none is there.

    t and p are empty where there are fewer than two seeds or all differences are equal.
    """
    ours = {one.label: one for one in measured}
    if section.paired is None or not set(section.paired) <= ours.keys():
        return []
    before, after = (ours[label] for label in section.paired)
    xs = before.xs
    seeds, differences, statistics, chances = [], [], [], []
    for x in xs:
        both = sorted(before.by_seed(x).keys() & after.by_seed(x).keys())
        first, second = ([one.by_seed(x)[seed] for seed in both] for one in (before, after))
        moved = [high - low for low, high in zip(first, second, strict=True)]
        seeds.append(str(len(both)))
        differences.append(f"{mean(moved):+.2f}" if moved else "")
        found = ttest_rel(second, first) if len(set(moved)) > 1 else None
        statistics.append("" if found is None else f"{found.statistic:.2f}")
        chances.append("" if found is None else f"{found.pvalue:.2g}")
    table = [
        ["", *(f"{x:,g}" for x in xs)],
        ["seeds", *seeds],
        ["mean difference", *differences],
        ["t", *statistics],
        ["p, two-sided", *chances],
    ]
    for test in published:
        shown = [f"{test.p[x]:.2g}" if x in test.p else "" for x in xs]
        table.append([f"p, {papers[test.paper]['short']}, {test.table}", *shown])
    return table


def markdown_table(cells: list[list[str]]) -> str:
    """Rows of cells as Markdown, the first as head."""
    head, *body = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([head, "|" + " --- |" * len(cells[0]), *body])


def render(folder: Path) -> str:
    """The whole of RESULTS.md from what is in `folder`.

    Raises:
        InputError: a file is named or made wrongly.
    """
    papers, published, tests = read_published(folder / "published.json")
    sections = []
    for section in SECTIONS:
        measured = read_measured(folder / section.name, section.factor)
        rows = [row for row in published if row.section == section.name]
        text = folder / f"{section.name}.md"
        sections.append(
            {
                "section": section,
                "measured": measured,
                "table": make_table(section, measured, rows, papers),
                "rises": count_rises(section, measured),
                "paired": paired_test(section, measured, [t for t in tests if t.section == section.name], papers),
                "samples": sorted({count for one in measured for count in one.samples}),
                "text": text.read_text(encoding="utf-8").strip() if text.is_file() else "",
                "papers": [papers[key] for key in dict.fromkeys(row.paper for row in rows)],
            }
        )
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown of our own files
    )
    environment.filters["table"] = markdown_table
    return environment.get_template("RESULTS.md.jinja").render(sections=sections)


def plot(folder: Path) -> list[str]:
    """Draw a picture of every section that has files, ours with the first row of a paper beside each; hints, if any."""
    papers, published, _ = read_published(folder / "published.json")
    hints = []
    for section in SECTIONS:
        measured = read_measured(folder / section.name, section.factor)
        points, dashed = [], set()
        for one in measured:
            points += [(one.label, x, mean(one.at(x)), stdev(one.at(x)) if len(one.at(x)) > 1 else 0.0) for x in one.xs]
            beside = [row for row in published if (row.section, row.scheme) == (section.name, one.label)][:1]
            for row in beside:
                name = f"{row.name}, {papers[row.paper]['short']}"
                dashed.add(name)
                points += [(name, x, score, 0.0) for x, score in row.scores.items()]
        if points:
            picture = folder / f"{section.name}.png"
            hint = plot_scores(
                points,
                section.x_name,
                section.score_name,
                section.title,
                picture,
                dashed,
                section.log_scores,
                section.limits,
            )
            hints += [hint] if hint else []
    return hints


@click.command(cls=SharpCommand, context_settings={"show_default": True})
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False, exists=True), default=RESULTS)
@click.option("--output", type=click.Path(path_type=Path), default=OUTPUT)
def main(folder: Path, output: Path) -> None:
    """Write the results beside the papers' numbers, and a picture of every section into FOLDER."""
    output.write_text(render(folder), encoding="utf-8")
    for hint in dict.fromkeys(plot(folder)):
        Console().print(hint)
    Console().print(f"wrote {output}")


if __name__ == "__main__":
    main()
