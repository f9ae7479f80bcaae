"""`python -m sharp.models.results`, which writes `models/RESULTS.md`, our numbers beside the papers', from saved files.

`sharp.models.evaluate` wrote `models/results/SECTION/LABEL-seedN.csv` for the model of seed N; LABEL is the model's
norm and other distinguishing options. `SECTION.md` is our text about the section. `published.json` has the papers'
numbers and their sources.
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

from sharp.core.cli import SharpCommand
from sharp.core.errors import InputError
from sharp.models.plots import plot_scores

RESULTS = Path("models/results")
OUTPUT = Path("models/RESULTS.md")
FILE_NAME = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)")


@dataclass(frozen=True)
class Section:
    """A section with one table, whose files are in the folder `name`.

    A saved score is shown times `factor`, in the format `digits`. Labels in `labels` come first, in this order. If
    `rising` names labels, a second table counts the seeds in which each label is better than the label before.
    `paired` names two labels that are measured on the same models; their difference gets a paired t-test over the
    seeds. `limits` are the limits of the scores in the picture.
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
    """The files of one label: `scores[seed][x]`, and the numbers of samples that scores are means of.

    x is the value of the field that was varied, or else the length.
    """

    label: str
    scores: dict[int, dict[float, float]]
    samples: tuple[int, ...]

    @property
    def xs(self) -> list[float]:
        """Every length, or value of the varied field, at which some seed has a score."""
        return sorted({x for row in self.scores.values() for x in row})

    def by_seed(self, x: float) -> dict[int, float]:
        """Return the score at `x` of every seed that has one."""
        return {seed: row[x] for seed, row in self.scores.items() if x in row}

    def at(self, x: float) -> list[float]:
        """Return the scores at `x` of all seeds."""
        return list(self.by_seed(x).values())


@dataclass(frozen=True)
class Published:
    """A row of a paper's table; `scheme` is the label beside which the row is shown, `paper` the key of its paper.

    `scores` are by x, in the unit in which the section shows them.
    """

    section: str
    scheme: str
    name: str
    paper: str
    table: str
    scores: dict[float, float]


@dataclass(frozen=True)
class PublishedTest:
    """The p values of a paper's paired t-tests, by x."""

    section: str
    paper: str
    table: str
    p: dict[float, float]


def read_measured(folder: Path, factor: float) -> list[Measured]:
    """Read all .csv files in a section's folder, one `Measured` per label; scores are multiplied with `factor`.

    The list is empty if the folder does not exist.

    Raises:
        InputError: the name of a file has no label and seed, or the file is not from `sharp.models.evaluate`.
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
                    raise InputError(
                        f"{path} is not a file of python -m sharp.models.evaluate; remove it, or write it again"
                    ) from error
    return [
        Measured(label, dict(sorted(scores.items())), tuple(sorted(samples[label]))) for label, scores in rows.items()
    ]


def read_published(path: Path) -> tuple[dict[str, dict[str, str]], list[Published], list[PublishedTest]]:
    """Read published.json: the papers by their keys, the rows of their tables, and their tests.

    The file is ours and not checked: a damaged file raises KeyError, TypeError or ValueError.
    """
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
    """Return the cells of a section's table, head first: each label of ours, followed by the papers' rows beside it."""
    xs = sorted({x for series in measured for x in series.xs} | {x for row in published for x in row.scores})
    ours = {series.label: series for series in measured}
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
    """Format mean ± standard deviation over the seeds, with the number of seeds if some lack a score at `x`.

    `digits` is a format such as ".1f". Without a score the cell is empty, with one score it has no deviation.
    """
    scores = one.at(x)
    if not scores:
        return ""
    spread = f" ± {stdev(scores):{digits}}" if len(scores) > 1 else ""
    return f"{mean(scores):{digits}}{spread}" + (f" ({len(scores)})" if len(scores) < len(one.scores) else "")


def count_rises(section: Section, measured: list[Measured]) -> list[list[str]]:
    """Return a table of the number of seeds in which each label of `section.rising` is better than the one before.

    The table has a column for every x and is empty if no two successive labels are there.
    """
    ours = {series.label: series for series in measured}
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
    """Return a table of the paired t-test of `section.paired` at every x, with the papers' p values below.

    The test is over the seeds that both labels have. The table is empty if a label is missing; t and p are empty if
    there are fewer than two seeds or if all differences are equal.
    """
    ours = {series.label: series for series in measured}
    if section.paired is None or not set(section.paired) <= ours.keys():
        return []
    before, after = (ours[label] for label in section.paired)
    xs = before.xs
    seeds, differences, statistics, chances = [], [], [], []
    for x in xs:
        both = sorted(before.by_seed(x).keys() & after.by_seed(x).keys())
        first, second = ([series.by_seed(x)[seed] for seed in both] for series in (before, after))
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
    """Return rows of cells as a Markdown table, the first row as head."""
    head, *body = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([head, "|" + " --- |" * len(cells[0]), *body])


def render(folder: Path) -> str:
    """Return the text of RESULTS.md from the files in `folder`; nothing is written.

    Raises:
        InputError: a file has a wrong name or content.
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
                "samples": sorted({count for series in measured for count in series.samples}),
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
    """Draw SECTION.png in `folder` for every section that has files, each label with its first row of a paper.

    Returns:
        Hints what to install if matplotlib is missing, one for every picture that was left out.
    """
    papers, published, _ = read_published(folder / "published.json")
    hints = []
    for section in SECTIONS:
        measured = read_measured(folder / section.name, section.factor)
        points, dashed = [], set()
        for series in measured:
            points += [
                (series.label, x, mean(series.at(x)), stdev(series.at(x)) if len(series.at(x)) > 1 else 0.0)
                for x in series.xs
            ]
            beside = [row for row in published if (row.section, row.scheme) == (section.name, series.label)][:1]
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
