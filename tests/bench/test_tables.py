"""`bench/RESULTS.md` is the page that `python -m bench.tables` renders from all archived results."""

import json

import pytest

from bench.tables import PAGE, README, README_RESULT, RESULTS, page, read, with_speed_table
from sharp.core.errors import InputError


def test_the_page_is_what_the_generator_makes():
    assert PAGE.read_text(encoding="utf-8") == page(RESULTS), "run `python -m bench.tables`"


def test_the_speed_table_of_the_readme_is_that_of_the_archived_result():
    readme = README.read_text(encoding="utf-8")
    result = read(README_RESULT)
    assert with_speed_table(readme, result) == readme, "run `python -m bench.tables`"
    for row in result["rows"]:
        row["milliseconds"] *= 2
    assert with_speed_table(readme, result) != readme


def test_every_result_has_a_section():
    headings = [line.removeprefix("### ") for line in page(RESULTS).splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(path.name for path in RESULTS.glob("*.json"))


def test_a_benchmark_without_a_section_is_refused(tmp_path):
    (tmp_path / "new.json").write_text(json.dumps({"benchmark": "new", "rows": []}))
    with pytest.raises(InputError, match=r"new\.json is of benchmark 'new'; add it to SECTIONS in bench/tables\.py"):
        page(tmp_path)


def test_gpu_sections_show_times_and_of_correctness_what_is_wrong(tmp_path):
    part = {"device": "GPU", "date": "2026-11-24T10:00:00+00:00", "complete": False}
    correctness = [{"normalizer": "softmax", "holds": True}, {"normalizer": "ssa", "output": 0.25, "holds": False}]
    decode = [{"subject": "softmax", "milliseconds": 0.123456}, {"subject": "ssa", "error": "ValueError: a|b"}]
    sections = {"correctness": {**part, "rows": correctness}, "decode": {**part, "complete": True, "rows": decode}}
    (tmp_path / "gpu.json").write_text(json.dumps(sections))
    assert page(tmp_path).split("## GPU\n")[1].splitlines() == [
        "",
        "### gpu.json",
        "",
        "**correctness**: GPU, 2026-11-24, incomplete.",
        "2 results compared, 1 wrong.",
        "",
        "| normalizer | output | holds |",
        "| --- | --- | --- |",
        "| ssa | 0.25 | False |",
        "",
        "**decode**: GPU, 2026-11-24.",
        "",
        "| subject | milliseconds | error |",
        "| --- | --- | --- |",
        "| softmax | 0.1235 |  |",
        r"| ssa |  | ValueError: a\|b |",
    ]
