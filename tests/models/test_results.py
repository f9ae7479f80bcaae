"""RESULTS.md is rendered from saved files only."""

import csv
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.core.errors import InputError
from sharp.models.results import main, read_published, render

MODELS = Path(__file__).parents[2] / "models"
COLUMNS = ("task", "norm", "length", "sweep", "value", "metric", "score", "standard_error", "samples", "seed")


@pytest.fixture
def folder(tmp_path):
    for name in ("published.json", "RESULTS.md.jinja"):
        shutil.copy(MODELS / "results" / name, tmp_path / name)
    return tmp_path


def save(folder, name, scores, *, swept=False, samples=100):
    path = folder / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for x, score in scores.items():
            place = (40, "function_sigma", float(x)) if swept else (x, "", "")
            rows.writerow(("task", "norm", *place, "metric", score, 0.01, samples, 1))


def lines(text, start):
    """Return the cells of the rows of a Markdown table whose first cell is `start`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == start]


def test_the_page_in_the_repository_is_what_the_script_writes():
    assert (MODELS / "RESULTS.md").read_text(encoding="utf-8") == render(MODELS / "results"), (
        "run python -m sharp.models.results"
    )


def test_mean_and_deviation_over_seeds(folder):
    for seed, score in enumerate((0.50, 0.60, 0.70)):
        save(folder, f"max-retrieval/softmax-seed{seed}", {16: 0.99, 1024: score})
    save(folder, "max-retrieval/softmax-seed7", {16: 0.99})
    text = render(folder)
    (row,) = lines(text, "**softmax**")
    assert row[1] == "ours, seeds 0, 1, 2, 7"
    assert row[2] == "99.0 ± 0.0"
    assert "60.0 ± 10.0 (3)" in row
    assert "on 100 samples of each length" in text


def test_the_papers_numbers_stand_below_ours(folder):
    save(folder, "max-retrieval/softmax-seed0", {16: 0.99})
    rows = render(folder).splitlines()
    ours = next(place for place, line in enumerate(rows) if line.startswith("| **softmax** | ours, seed 0 | 99.0 |"))
    assert rows[ours + 1].startswith("| softmax | Veličković et al., Table 1 | 98.6 |")
    assert rows[ours + 2].startswith("| softmax, θ = √d | Vasylenko et al., Table 5 | 99.2 |")


def test_the_order_is_counted_over_the_seeds_that_both_have(folder):
    for seed, (plain, adaptive) in enumerate(((0.5, 0.6), (0.7, 0.6), (0.5, 0.9))):
        save(folder, f"max-retrieval/softmax-seed{seed}", {1024: plain})
        save(folder, f"max-retrieval/adaptive-temperature-seed{seed}", {1024: adaptive})
    save(folder, "max-retrieval/softmax-seed3", {1024: 0.1})
    (row,) = lines(render(folder), "softmax < adaptive-temperature")
    assert row[1:] == ["2 of 3"]


def test_the_difference_of_one_model_under_two_norms_is_tested_in_pairs(folder):
    """The t-test reproduces Student's example of sleep under two drugs (Biometrika 6, 1908): t = 4.06, p = 0.00283."""
    first = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
    second = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
    for seed, (plain, adaptive) in enumerate(zip(first, second, strict=True)):
        save(folder, f"max-retrieval/softmax-seed{seed}", {16: 0.99, 1024: plain / 100, 2048: 0.5})
        save(folder, f"max-retrieval/adaptive-temperature-seed{seed}", {16: 0.99, 1024: adaptive / 100})
    save(folder, "max-retrieval/softmax-seed10", {1024: 0.5})
    text = render(folder)
    assert "adaptive-temperature minus softmax in accuracy, %, with a paired t-test over the seeds" in text
    assert lines(text, "mean difference") == [["mean difference", "+0.00", "+1.58", ""]]
    assert lines(text, "t") == [["t", "", "4.06", ""]]
    assert lines(text, "p, two-sided") == [["p, two-sided", "", "0.0028", ""]]
    assert lines(text, "seeds") == [["seeds", "10", "10", "0"]]
    assert lines(text, "p, Veličković et al., Table 1")[0][1:] == ["0.4", "0.0001", "0.0006"]


def test_one_seed_has_no_test(folder):
    save(folder, "max-retrieval/softmax-seed0", {1024: 0.5})
    assert "t-test" not in render(folder).split("## Not run")[0]
    save(folder, "max-retrieval/adaptive-temperature-seed0", {1024: 0.6})
    text = render(folder)
    assert lines(text, "mean difference") == [["mean difference", "+10.00"]]
    assert lines(text, "p, two-sided") == [["p, two-sided", ""]]


def test_what_was_varied_is_the_column(folder):
    save(folder, "linear-functions/ssa-seed0", {1: 5e-5, 10: 9.123}, swept=True)
    text = render(folder)
    (row,) = lines(text, "**ssa**")
    assert (row[2], row[-1]) == ("5e-05", "9.12")
    (published,) = lines(text, "SSA")
    assert (published[2], published[-1]) == ("4e-05", "8.5")


def test_sections_without_files_are_left_out_with_a_line(folder):
    save(folder, "text/softmax-seed0", {256: 1.9}, samples=10)
    text = render(folder)
    for name in ("max-retrieval", "mqmtar", "linear-functions"):
        assert f"there is no evaluation in `models/results/{name}/` yet" in text
    assert "`models/results/text/` yet" not in text
    assert "| **softmax** | ours, seed 0 | 1.900 |" in text
    assert "Veličković et al.: " not in text  # the list of sources would name it so


def test_our_text_is_put_in(folder):
    save(folder, "mqmtar/entmax-wide-seed0", {64: 1.0})
    (folder / "mqmtar.md").write_text("It was a dark and stormy night.\n")
    text = render(folder)
    assert "It was a dark and stormy night." in text
    assert lines(text, "**entmax-wide**")[0][2] == "100.0"


@pytest.mark.parametrize("name", ["softmax", "softmax-seed", "-seed1"])
def test_a_file_must_name_its_seed(folder, name):
    save(folder, f"mqmtar/{name}", {64: 1.0})
    with pytest.raises(InputError, match=r"must be called LABEL-seedN\.csv"):
        render(folder)


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "length,value,score,samples\nlong,,1,1\n"])
def test_a_file_of_another_kind_is_refused(folder, content):
    (folder / "mqmtar").mkdir()
    (folder / "mqmtar" / "softmax-seed0.csv").write_text(content)
    result = CliRunner().invoke(main, ["--folder", str(folder), "--output", str(folder / "RESULTS.md")])
    assert result.exit_code == 2
    assert "is not a file of python -m sharp.models.evaluate" in " ".join(result.output.split())
    assert not (folder / "RESULTS.md").exists()


def test_the_command_writes_the_page_and_the_pictures(folder):
    save(folder, "text/softmax-seed0", {256: 1.9, 512: 1.8})
    result = CliRunner().invoke(main, ["--folder", str(folder), "--output", str(folder / "RESULTS.md")])
    assert result.exit_code == 0, result.output
    assert (folder / "RESULTS.md").read_text() == render(folder)
    assert (folder / "text.png").stat().st_size > 5000
    assert not (folder / "mqmtar.png").exists()


def test_every_published_number_has_a_source_and_a_place():
    papers, rows, tests = read_published(MODELS / "results" / "published.json")
    assert {row.paper for row in rows} == set(papers)
    assert [(test.section, test.table, len(test.p)) for test in tests] == [("max-retrieval", "Table 1", 11)]
    assert {test.paper for test in tests} <= set(papers)
    lengths = {
        "max-retrieval": (9, 11),
        "mqmtar": (11,),
        "linear-functions": (10,),
        "2back": (7,),
        "flip-flop-sparse": (10,),
        "local-count": (6,),
        "copy": (7,),
        "sort": (4,),
        "reverse": (5,),
    }
    assert {row.section for row in rows} == set(lengths)
    for row in rows:
        assert row.table
        assert len(row.scores) in lengths[row.section]
        assert all(0 <= score <= (100 if row.section != "linear-functions" else 200) for score in row.scores.values())
