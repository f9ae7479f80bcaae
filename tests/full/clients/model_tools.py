"""Run third-party tools for ONNX models on exported models."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from click.testing import CliRunner

from sharp.exporter.cli import export
from tests.exporter.tiny_hugging_face import save, tiny
from tests.full.clients.clients import INSTALLED, NODE, PROGRAMS, Client

PYTHON = INSTALLED / "tools" / "bin" / "python"
WEB = Client("onnxruntime-web", "onnxruntime_web.mjs")
OPTIMUM = Client("optimum-onnx", "optimum_onnx.py", "optimum")
PACKAGES = ("onnxruntime", "onnxconverter-common", "onnxslim", "openvino")

CASES: dict[str, tuple[str, ...]] = {
    "`--target portable`, softmax": ("--norm", "softmax", "--target", "portable"),
    "`--target portable`, entmax": ("--norm", "entmax", "--target", "portable"),
    "the default": ("--norm", "entmax"),
}
TOOLS = {
    "quantize_dynamic": "`onnxruntime.quantization.quantize_dynamic`",
    "quant_pre_process": "`quant_pre_process` of ONNX Runtime",
    "MatMulNBitsQuantizer": "`MatMulNBitsQuantizer` of ONNX Runtime, 4 bits",
    "float16": "`onnxruntime.transformers.float16`",
    "float16 around attention": "`onnxruntime.transformers.float16`, as below",
    "onnxconverter_common.float16": "`onnxconverter_common.float16`",
    "onnxslim": "onnxslim",
    "OpenVINO": "OpenVINO",
    "onnxruntime-web": "onnxruntime-web (npm), WebAssembly",
    "optimum-onnx": "optimum-onnx, `ORTModelForCausalLM.generate`",
}
PORTABLE, ENTMAX, DEFAULT = CASES
_NAMES = "it gives a name twice; use ONNX Runtime's as below, or export with `--dtype float16`"
_CASTS = "it leaves casts to float32; use ONNX Runtime's as below, or export with `--dtype float16`"
_SHAPES = "its symbolic shape inference fails; `quantize_dynamic` reads models as they are exported"
REFUSED: Mapping[tuple[str, str], str] = {
    ("quant_pre_process", PORTABLE): _SHAPES,
    ("quant_pre_process", ENTMAX): _SHAPES,
    ("quant_pre_process", DEFAULT): _SHAPES,
    ("float16", ENTMAX): "it loses an input of a `Loop`; see the next line",
    ("float16", DEFAULT): "it leaves functions in float32; see the next line",
    ("onnxconverter_common.float16", PORTABLE): _NAMES,
    ("onnxconverter_common.float16", ENTMAX): _NAMES,
    ("onnxconverter_common.float16", DEFAULT): _CASTS,
    ("onnxslim", DEFAULT): "it drops inputs of the function and keeps those of its calls; use `--target portable`",
    ("OpenVINO", DEFAULT): "no conversion rule, as it reads no functions; use `--target portable`",
}
"""Why a tool's model does not load, by tool and case; all others load and have the logits."""


def installed() -> bool:
    """Whether all tools are installed, which `make clients` does."""
    return PYTHON.is_file() and WEB.installed and OPTIMUM.installed


def export_case(case: str, folder: Path) -> Path:
    """Export a small Llama with `--cache contiguous` and the flags of a case, and return its folder."""
    exported = folder / "exported"
    source = save(tiny("llama"), folder / "llama")
    flags = [*CASES[case], "--untrained-norm", "--cache", "contiguous", "-o", str(exported)]
    result = CliRunner().invoke(export, [str(source), *flags])
    assert result.exit_code == 0, result.output
    return exported


def run_tools(exported: Path, output: Path) -> dict[str, str]:
    """Return each tool's problem with the model, or "" if the tool's result has the right logits."""
    output.mkdir()
    program = NODE / WEB.program  # Node looks for packages beside the program
    program.write_text((PROGRAMS / WEB.program).read_text())
    web = _run("node", program, exported)
    (output / "web.json").write_text(web.stdout)
    result = _run(PYTHON, PROGRAMS / "model_tools.py", exported, output)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    if web.returncode:
        found["onnxruntime-web"] = web.stderr[-1000:]
    optimum = _run(OPTIMUM.python, PROGRAMS / OPTIMUM.program, exported)
    return {**found, "optimum-onnx": optimum.stderr[-1000:] if optimum.returncode else ""}


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)


def versions() -> str:
    """Return the names of the tools with their installed versions."""
    code = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {PACKAGES}))"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return ", ".join([said, *(f"{client.package} {client.version}" for client in (WEB, OPTIMUM))])
