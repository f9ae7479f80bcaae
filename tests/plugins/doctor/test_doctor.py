"""`sharp doctor` says which backends agree, fail or are absent, and its exit code follows."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sharp.core.errors import SharpError
from sharp.plugins.doctor import backends as ways
from sharp.plugins.doctor import cli, diagnosis
from sharp.plugins.doctor.backends import OpBackend, backends
from sharp.plugins.doctor.case import Case, errors, limits, make_case
from sharp.plugins.op.reference import AttentionOutput
from tests.serving.backends.fake_tensorrt import FakeMachine

CPU, STANDARD, CUDA, TRITON, TENSORRT = (backend.name for backend in backends())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.doctor, arguments, prog_name="sharp doctor")


@pytest.fixture(scope="module")
def here() -> dict[str, dict]:
    """Return the doctor's findings on this machine, by backend."""
    result = run("--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert said["machine"]["sampler"].startswith("the host's: ")
    assert said["machine"]["onnxruntime"] and "libsharp_ops.so" in said["machine"]["libsharp_ops.so"]
    return {backend["name"]: backend for backend in said["backends"]}


def test_the_cpu_agrees_with_the_reference(here: dict[str, dict]) -> None:
    assert here[CPU]["status"] == here[STANDARD]["status"] == "agrees"
    compared = [(each["dtype"], each["normalizer"]) for each in here[CPU]["comparisons"]]
    normalizers = ["softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2", "softpick"]
    assert compared == [(dtype, name) for dtype in ("float32", "float16", "int8", "fp8") for name in normalizers]
    for each in here[CPU]["comparisons"]:
        assert 0 < each["errors"]["output"] < each["limits"]["output"] < 3e-3
        assert each["errors"]["caches"] == 0


def test_what_is_absent_says_how_to_get_it(here: dict[str, dict]) -> None:
    advice = {CUDA: "onnxruntime-gpu", TRITON: "GPU", TENSORRT: "install TensorRT 10.14"}
    for name in (name for name in advice if here[name]["status"] == "absent"):
        assert advice[name] in here[name]["reason"] and not here[name]["comparisons"]
    assert {CUDA, TRITON, TENSORRT} <= set(here)


def pretend(change: Callable[[AttentionOutput], AttentionOutput], name: str = "a backend") -> OpBackend:
    """Return a backend that computes the expected outputs and applies `change` to them."""

    def compute(case: Case) -> AttentionOutput:
        right = [np.array(array) for array in vars(case.expected).values() if array is not None]
        return change(AttentionOutput(*right))

    return OpBackend(name, ("float16",), lambda: None, compute)


def spoil(field: str, index: tuple[int, ...], value: float) -> Callable[[AttentionOutput], AttentionOutput]:
    def change(output: AttentionOutput) -> AttentionOutput:
        array = np.array(getattr(output, field))
        array[index] = value
        return replace(output, **{field: array})

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda output: output, None),
        (spoil("output", (3, 2, 1), 9.0), "output differs by"),
        (spoil("output", (3, 2, 1), np.nan), "output differs by nan"),
        (spoil("key_cache", (0, 1, 2, 3), 9.0), "caches differs by 1, and at most 0"),
        (spoil("value_cache", (-1, 0, 0, 0), 0.0), "caches differs by 1, and at most 0"),
        (spoil("stats", (0, 0, 0), 9.0), "entropy differs by"),
    ],
)
def test_a_wrong_number_anywhere_is_found(monkeypatch: pytest.MonkeyPatch, change: Callable, words: str | None) -> None:
    monkeypatch.setattr(diagnosis, "backends", lambda: (pretend(change),))
    result = run()
    assert result.exit_code == (1 if words else 0), result.output
    if words:
        assert f"a backend, softmax in float16: {words}" in result.output
        assert "a backend: wrong here. Please open an issue with the output of `sharp doctor --json`" in result.output
    else:
        assert "agrees" in result.output and "wrong" not in result.output


def test_an_error_that_is_no_number_is_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "backends", lambda: (pretend(spoil("output", (3, 2, 1), np.nan)),))
    result = CliRunner().invoke(cli.doctor, ["--json"])
    said = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (result.exit_code, said["backends"][0]["status"]) == (1, "differs")
    assert said["backends"][0]["comparisons"][0]["errors"]["output"] is None


def test_a_backend_that_fails_is_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: Case) -> AttentionOutput:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(diagnosis, "backends", lambda: (OpBackend("a GPU", ("float16",), lambda: None, fail),))
    result = run()
    assert (result.exit_code, "a GPU has failed: RuntimeError: no kernel image\n" in result.output) == (1, True)
    assert "Traceback" not in result.output


def test_an_instruction_set_that_the_processor_lacks_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: Case) -> AttentionOutput:
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : SHARP_ISA is 'mmx'; this processor can run: avx2, baseline")

    monkeypatch.setattr(diagnosis, "backends", lambda: (OpBackend("the CPU", ("float32",), lambda: None, fail),))
    result = run()
    assert result.exit_code == 2
    assert result.output.rstrip().endswith("Error: SHARP_ISA is 'mmx'; this processor can run: avx2, baseline")


def test_a_library_without_some_kernels_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pretend(lambda output: output, "a GPU")

    def without_int8(case: Case) -> AttentionOutput:
        if case.dtype == "int8":
            raise RuntimeError("libsharp_cuda.so has no kernel write_scaled_cache; compile it with make kernels")
        return whole.run(case)

    for dtypes, words in ((("float16", "int8"), "a GPU was checked in part"), (("int8",), "a GPU is absent")):
        backend = replace(whole, dtypes=dtypes, run=without_int8)
        monkeypatch.setattr(diagnosis, "backends", lambda backend=backend: (backend,))
        result = run()
        assert (result.exit_code, f"{words}: libsharp_cuda.so has no kernel" in result.output) == (0, True)


def test_a_package_that_is_broken_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("libnvinfer.so.10: cannot open shared object file")

    broken_one = replace(pretend(lambda output: output, "a GPU"), ready=broken)
    monkeypatch.setattr(diagnosis, "backends", lambda: (broken_one, pretend(lambda output: output)))
    result = run()
    assert result.exit_code == 1
    assert "a GPU has failed: ImportError: libnvinfer.so.10: cannot open shared object file\n" in result.output
    assert "agrees" in result.output  # the doctor goes on to the other backends


def test_nothing_there_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise SharpError("there is no NVIDIA driver")

    monkeypatch.setattr(
        diagnosis, "backends", lambda: (replace(pretend(lambda output: output, "a GPU"), ready=missing),)
    )
    result = run()
    assert (result.exit_code, "a GPU is absent: there is no NVIDIA driver\n" in result.output) == (0, True)


def test_tensorrt_builds_and_runs_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    machine.install(monkeypatch)
    monkeypatch.setattr(ways, "library_path", lambda runtime, real=ways.library_path: real("onnxruntime"))
    monkeypatch.setattr(ways, "find_device", lambda: None)
    found = diagnosis.diagnose(next(backend for backend in backends() if backend.name == TENSORRT))
    assert (found.status, found.reason) == ("agrees", "")
    assert len(found.comparisons) == 2 * 8 and set(machine.features) == {("aliasing", True)}
    # Caches are updated in place, and all memory is freed.
    for name in ("key_cache", "value_scale"):
        assert machine.addresses[name] == machine.addresses[f"{name}_out"] and not machine.memory
    machine.refuse = "build"
    found = diagnosis.diagnose(next(backend for backend in backends() if backend.name == TENSORRT))
    assert found.status == "failed" and "could not build an engine" in found.reason


def test_the_case_has_work_of_every_kind() -> None:
    case = make_case("entmax", "float16")
    new = np.diff(case.inputs["query_start"])
    assert {1, 5, 40} <= set(new) and 300 in case.inputs["context_lens"]
    right = errors(case, AttentionOutput(*(array for array in vars(case.expected).values() if array is not None)))
    assert not any(right.values()) and right.keys() == limits(case).keys()
    # The case is sparse, so that tiles without support are skipped. Its numbers are the same in every run.
    assert case.expected.stats[0, :, 1].mean() < 150
    np.testing.assert_array_equal(case.inputs["query"], make_case("entmax", "float16").inputs["query"])


def test_without_onnx_it_still_describes_the_machine() -> None:
    script = "import sys; sys.modules['onnx'] = None; from sharp.core.cli import main; main(['doctor', '--json'])"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout)
    [cpu] = [backend for backend in said["backends"] if backend["name"] == CPU]
    assert (cpu["status"], cpu["reason"]) == ("absent", "onnx is not installed: pip install 'sharp-attention[export]'")
    assert said["machine"]["processor"]


def test_a_terminal_shows_which_backend_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "backends", lambda: (pretend(lambda output: output),))
    shown = CliRunner().invoke(cli.doctor, [], env={"TTY_COMPATIBLE": "1"})
    assert "Checking a backend" in shown.stderr
    assert CliRunner().invoke(cli.doctor, []).stderr == ""
