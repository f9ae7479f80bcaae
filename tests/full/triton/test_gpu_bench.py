"""`bench/gpu/run.py`, as far as a machine without a GPU can run it."""

import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.full.triton import bench_check

ROOT = Path(__file__).parents[3]


def test_sections_run_in_their_own_order() -> None:
    from bench.gpu import run

    assert run.parse(["--only", "decode,machine"]).only == ["machine", "decode"]
    assert run.parse([]).only == [
        "machine",
        "correctness",
        "long",
        "decode",
        "shapes",
        "prefill",
        "statistics",
        "sampling",
        "end-to-end",
    ]
    assert run.parse(["--quick"]).quick


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "decode,speed"], "--only names 'speed'; the sections are machine, correctness"),
        (["--minutes", "0"], "--minutes is 0.0; it must be above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.gpu import run

    with pytest.raises(SystemExit) as exit_:
        run.parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "bench.gpu.run"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 2
    assert finished.stderr == "bench.gpu.run: torch finds no CUDA device; run it on a machine with an NVIDIA GPU\n"


def test_results_of_sections_are_merged(tmp_path: Path) -> None:
    from bench.gpu import run

    path = tmp_path / "results" / "gpu.json"
    run.merge_results(path, {"machine": {"rows": [1]}, "decode": {"rows": [2]}})
    merged = run.merge_results(path, {"decode": {"rows": [3]}})
    assert merged == json.loads(path.read_text()) == {"machine": {"rows": [1]}, "decode": {"rows": [3]}}


def test_targets_are_judged_from_the_results() -> None:
    from bench.gpu.targets import targets

    def decode(
        subject: str, microseconds: float, batch: int = 32, context: int = 8192, **more: float
    ) -> dict[str, object]:
        row = {"subject": subject, "batch": batch, "context": context, "microseconds_per_layer": microseconds}
        return {**row, "cache_gb_per_second": 1.07e6 / microseconds, **more}

    results = {
        "machine": {"rows": [{"what": "copy", "gb_per_second": 4000.0}]},
        "decode": {
            "rows": [
                *(decode("softmax", 300.0), decode("ssa", 400.0), decode("softmax", 290.0, 8, 32_768)),
                decode("entmax", 145.0, 8, 32_768, support=0.04),
            ]
        },
        "prefill": {
            "rows": [
                {"subject": "softmax", "length": 8192, "milliseconds": 2.0},
                {"subject": "torch SDPA (cuDNN)", "length": 8192, "milliseconds": 1.0},
                {"subject": "torch SDPA (flash)", "length": 8192, "milliseconds": 1.6},
            ]
        },
        "statistics": {"rows": [{"phase": "decode", "normalizer": "ssa", "on_ratio": 1.01}]},
    }
    met = {found["target"]: (round(found["measured"], 3), found["met"]) for found in targets(results)}
    assert met == {
        "decode of softmax, share of copy bandwidth": (0.892, True),
        "decode of ssa, share of copy bandwidth": (0.669, False),
        "decode of entmax beside softmax, support 0.040": (2.0, True),
        "prefill of softmax, share of torch's best SDPA": (0.5, False),
        "decode of ssa with statistics, times without": (1.01, True),
    }


def test_a_case_that_fails_or_ends_its_process_is_a_row_and_the_others_still_run(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    script = tmp_path / "run_with_failures.py"  # stands for run.py in the processes of its sections, too
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from bench.gpu import cases as gpu_cases, run

def rows_of(section, chosen, cases):
    def fail(): raise ValueError("wrong tile")
    def lose(): raise RuntimeError("illegal memory access")
    def check():
        if state: raise cases.DeviceLostError("illegal memory access")
    cases.check_device, state = check, []
    yield from cases.run({{"number": 1}}, lambda: [{{"holds": True}}])
    yield from cases.run({{"number": 2}}, fail)
    yield from cases.run({{"number": 3}}, lambda: os._exit(7))
    yield from cases.run({{"number": 4}}, lambda: state.append(1) or lose())
    yield from cases.run({{"number": 5}}, lambda: [{{"holds": True}}])

torch.cuda.is_available, run.device, run.rows_of, run.MODULE = lambda: True, dict, rows_of, "run_with_failures"
sys.exit(run.main())
""")
    command = [sys.executable, "-m", "run_with_failures", "--only", "tiles", "--output", output]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 1, finished.stderr
    assert "0 wrong results, 3 errors" in finished.stdout
    for part in json.loads(output.read_text()).values():
        assert part["ended"] and part["complete"]
        assert [row.get("number") for row in part["rows"]] == [1, 2, None, 4, 5]
        errors = [row.get("error") for row in part["rows"]]
        assert errors[1] == "ValueError: wrong tile" and "fail" in part["rows"][1]["where"][-1]
        assert "code 7" in errors[2] and part["rows"][2]["case"] == 3
        assert errors[3] == "RuntimeError: illegal memory access"


def test_a_case_that_the_end_of_the_time_cuts_off_is_done_again(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    script = tmp_path / "run_too_long.py"
    script.write_text(f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from bench.gpu import run

def rows_of(section, chosen, cases):
    yield from cases.run({{"number": 1}}, lambda: [{{"holds": True}}])
    yield from cases.run({{"number": 2}}, lambda: time.sleep(600 * ("SLOW" in os.environ)) or [{{"holds": True}}])

torch.cuda.is_available, run.device, run.rows_of, run.MODULE = lambda: True, dict, rows_of, "run_too_long"
run.GRACE_SECONDS = 0
sys.exit(run.main())
""")
    command = [sys.executable, "-m", "run_too_long", "--only", "tiles", "--output", output, "--resume"]
    slow = subprocess.run(
        [*command, "--minutes", "0.5"], cwd=tmp_path, env={**os.environ, "SLOW": "1"}, capture_output=True, timeout=300
    )
    assert b"still running when the time was over" in slow.stdout
    assert [row["number"] for row in json.loads(output.read_text())["tiles"]["rows"]] == [1]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    part = json.loads(output.read_text())["tiles"]
    assert part["complete"] and [row["number"] for row in part["rows"]] == [1, 2]


def test_every_case_is_one_of_which_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu import correctness, library, speed, tiles
    from sharp.plugins.triton.variants import kernels

    short = ((1, 1),)
    monkeypatch.setattr(correctness, "SEQUENCES", dict.fromkeys(correctness.SEQUENCES, short))
    for options in library.options_of_cases(quick=False):
        assert kernels(options, 90)
    jobs = [job for section in ("decode", "prefill", "statistics") for job in speed.jobs(section)]
    assert all(job.kernels(90) for job in [*jobs, *tiles.jobs()])


def test_a_crash_of_the_compiler_costs_no_case() -> None:
    from bench.gpu.compilation import Compilations
    from bench.gpu.correctness import computed, make_case, submit
    from sharp.plugins.triton.options import Options

    with ProcessPoolExecutor(1) as executor:
        assert isinstance(executor.submit(os._exit, 1).exception(), BrokenExecutor)
        compilations = Compilations(executor, 90)
        options = Options("softmax", "float32", "float32", 64, 64, 16)
        compilations.begin(options)
        compilations.finish(options)
        call = make_case(device="cpu", normalizer="softmax", head_dim=16, dtype=torch.float32)
        assert computed(submit(executor, sum, (1, 2)), call, lambda *_: "reference") == "reference"


def test_a_section_goes_on_behind_the_rows_that_an_earlier_call_wrote(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    script = tmp_path / "run_and_lose.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from bench.gpu import run

def rows_of(section, chosen, cases):
    for number in range(1, 6):
        if number == 4 and os.environ.get("LOSE"):  # the machine is taken back
            os.kill(os.getppid(), 9)
            os._exit(9)
        yield from cases.run({{"number": number}}, lambda: [{{"holds": True}}])

torch.cuda.is_available, run.device, run.rows_of, run.MODULE = lambda: True, dict, rows_of, "run_and_lose"
sys.exit(run.main())
""")
    command = [sys.executable, "-m", "run_and_lose", "--only", "tiles", "--output", output, "--resume"]
    environment = {**os.environ, "LOSE": "1"}
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=300).returncode == -9
    assert [row["number"] for row in json.loads(output.read_text())["tiles"]["rows"]] == [1, 2, 3]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert " number 3 " not in finished.stdout and " number 4 " in finished.stdout
    part = json.loads(output.read_text())["tiles"]
    assert part["complete"] and [row["number"] for row in part["rows"]] == [1, 2, 3, 4, 5]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "complete already" in again.stdout


def test_the_entropy_of_entmax_in_bfloat16_is_known_to_a_hundredth() -> None:
    from bench.gpu import correctness

    def limit(normalizer: str, dtype: torch.dtype, **attributes: float) -> float:
        call = correctness.make_case(device="cpu", normalizer=normalizer, dtype=dtype, head_dim=16, **attributes)
        return correctness.entropy_limit(call)

    assert limit("entmax", torch.bfloat16) == 1.2e-2
    assert {
        limit("softmax", torch.bfloat16),
        limit("entmax", torch.float16),
        limit("entmax", torch.bfloat16, alpha=2.0),
    } == {2e-3}


@pytest.mark.parametrize("normalizer", ["entmax", "ssa"])
def test_its_correctness_part_on_a_tiny_case(interpreter: ProcessPoolExecutor, normalizer: str) -> None:
    found = interpreter.submit(bench_check.check, normalizer).result()
    assert found["right"] is True
    assert found["wrong"] is False
    assert found["nan"] is False
    assert found["row"] < 1e-5
    assert found["statistics"] < 1e-4


@pytest.mark.parametrize(("form", "queries", "new_keys"), [("none", 3, 20), ("concatenating", 1, 1), ("shared", 9, 9)])
def test_its_part_for_attention_on_a_tiny_case(
    interpreter: ProcessPoolExecutor, form: str, queries: int, new_keys: int
) -> None:
    found = interpreter.submit(bench_check.check_attention, form, queries, new_keys).result()
    assert found["right"]["holds"], found["right"]
    assert found["wrong"] is False


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn", "float16", "bfloat16"])
def test_caches_of_other_types_are_among_its_cases(interpreter: ProcessPoolExecutor, cache_dtype: str) -> None:
    assert interpreter.submit(bench_check.check, "softmax", cache_dtype).result()["right"] is True


def test_key_screens_are_among_its_cases(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(bench_check.check, "entmax", None, True).result()["right"] is True


def test_its_timed_sections_on_tiny_cases_launch_what_was_compiled_ahead() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.full.triton.dry_gpu_bench"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    rows = [json.loads(line) for line in finished.stdout.splitlines()]
    assert {row["section"]: sum(row["section"] == other["section"] for other in rows) for row in rows} == {
        "decode": 6,
        "shapes": 8,
        "prefill": 5,
        "statistics": 2,
        "sampling": 14,
        "tiles": 4,
    }
    # A row that a CPU cannot run has an error, like a peer that fails on a GPU.
    assert {row["subject"] for row in rows if "error" in row} <= {"torch SDPA (cuDNN)", "torch SDPA (flash)"}
    assert all(row["late"] == [] for row in rows)
    assert all(row["holds"] for row in rows if row["section"] == "sampling" or "block_size" in row)
    assert any("context" in row and "error" not in row for row in rows if row["section"] == "prefill")
    assert 0 < next(row["support"] for row in rows if row["section"] == "prefill" and "support" in row) < 1


def test_it_runs_from_the_source_tree_without_an_install_or_onnx() -> None:
    # -S leaves out site, and so an editable install; the folder of the packages is added again.
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {sysconfig.get_path('platlib')!r}]; "
        "sys.modules['onnx'] = None; "
        "from bench.gpu import attention, correctness, generation, speed, tiles; import sharp.plugins; "
        "print(sharp.plugins.__file__)"
    )
    finished = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert Path(finished.stdout.strip()) == ROOT / "plugins" / "__init__.py"


def test_the_instructions_of_a_prompts_loops_are_counted() -> None:
    from bench.gpu import instructions

    kernel = instructions.inspect("adaptive_softmax", 64)
    assert kernel.tile == (128, 128)
    observe, settled = kernel.passes
    assert (observe.spills, settled.spills) == (0, 0)
    # A thread has 64 logits of a tile, and takes a few instructions for each.
    assert all(4 * 64 < part.instructions < 16 * 64 for part in kernel.passes)
    cycles = 2 * observe.instructions + 512
    assert observe.cycles == cycles and kernel.cycles == (cycles + settled.cycles) / 128**2
