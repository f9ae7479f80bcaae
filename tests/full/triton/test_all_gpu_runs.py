"""`bench/gpu/all.py`: runs in order, resumed where a call or the machine ended, and stopped by an error."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import all as all_runs
from bench.gpu.all import LEFT, Run

# A script that writes the next of three rows into its results, and exits with the code in its second argument.
ROW = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
part = json.loads(path.read_text())["decode"] if path.is_file() else {"rows": [], "complete": False}
part["rows"].append({"number": len(part["rows"]) + 1})
part["complete"] = len(part["rows"]) >= 3
path.write_text(json.dumps({"decode": part}))
sys.exit(int(sys.argv[1]))
"""


def command(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script, *arguments)


def rows(name: str, code: int = 0, **options: object) -> Run:
    script = command(ROW, str(code), "--only", "decode", "--output", f"{{output}}/{name}.json")
    return Run(name, "rows", 1, script, **options)  # type: ignore[arg-type]


def test_a_run_goes_on_until_it_has_all_rows(tmp_path: Path) -> None:
    assert all_runs.main(["--output", str(tmp_path)], [rows("first"), rows("second")]) == 0
    assert json.loads((tmp_path / "runs.json").read_text()) == {"first": "0", "second": "0"}
    assert [row["number"] for row in json.loads((tmp_path / "first.json").read_text())["decode"]["rows"]] == [1, 2, 3]


def test_a_call_without_time_begins_nothing_and_the_next_one_leaves_out_what_has_ended(tmp_path: Path) -> None:
    assert all_runs.main(["--output", str(tmp_path), "--minutes", "0"], [rows("first")]) == LEFT
    assert not (tmp_path / "first.json").exists()
    assert all_runs.main(["--output", str(tmp_path)], [rows("first")]) == 0
    written = (tmp_path / "first.json").read_text()
    assert all_runs.main(["--output", str(tmp_path)], [rows("first")]) == 0
    assert (tmp_path / "first.json").read_text() == written
    assert all_runs.main(["--output", str(tmp_path), "--again", "first"], [rows("first")]) == 0
    assert (tmp_path / "first.json").read_text() != written


def test_a_run_that_the_end_of_a_call_cuts_off_before_its_first_row_is_left(tmp_path: Path) -> None:
    slow = Run("slow", "compiles first", 1, command("import time; time.sleep(2)", "--output", "{output}/slow.json"))
    assert all_runs.main(["--output", str(tmp_path), "--minutes", "0.02"], [slow]) == LEFT
    assert not (tmp_path / "runs.json").exists()
    without_rows = Run("without rows", "never has a row", 0.02, slow.command)
    assert all_runs.main(["--output", str(tmp_path)], [without_rows]) == 0
    assert json.loads((tmp_path / "runs.json").read_text()) == {"without rows": "0"}


def test_what_is_wrong_stops_the_others_unless_told_otherwise(tmp_path: Path) -> None:
    wrong, other = rows("correctness", 1, decides=True), rows("decode")
    assert all_runs.main(["--output", str(tmp_path)], [wrong, other]) == 1
    assert not (tmp_path / "decode.json").exists()
    assert all_runs.main(["--output", str(tmp_path), "--keep-going"], [wrong, other]) == 1
    assert json.loads((tmp_path / "runs.json").read_text()) == {"correctness": "1", "decode": "0"}


def test_what_is_not_installed_is_left_out_and_a_crash_is_no_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = Run("memcheck", "memory", 1, command(""), tool="no-such-sanitizer")
    crash = Run("crash", "nothing", 1, command("import os; os.abort()", "--output", "{output}/none.json"))
    assert all_runs.main(["--output", str(tmp_path)], [without, crash]) == 1
    assert json.loads((tmp_path / "runs.json").read_text()) == {"memcheck": "left out", "crash": "-6"}
    assert "left out: no-such-sanitizer is not installed" in capsys.readouterr().out


def test_every_run_is_shorter_than_ten_minutes_and_writes_where_the_caller_says() -> None:
    for run in all_runs.RUNS:
        assert run.minutes < 10
        assert run.name == "doctor" or any("{output}/" in part for part in run.command)
        assert run.name == "doctor" or "--resume" in run.command


def test_a_run_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        all_runs.main(["--output", str(tmp_path), "--again", "speed"])
    assert ended.value.code == 2
