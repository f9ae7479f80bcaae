"""Generates with `LLM` by the CPU's kernels, by those of a GPU that is interpreted, and there without key screens.

python -m tests.full.cuda.compute_text FOLDER OPS: what came of each as JSON on stdout; OPS is what hands ONNX Runtime
the CUDA ops as ops of the CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sharp import LLM, SamplingParams
from sharp.plugins.manifest import read_manifest
from sharp.serving.backends import session as backends
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig, EngineConfig
from tests.full.cuda.computing import Device

# Together they are prompts of several chunks, a shared beginning, decoding beside prompts, and draft tokens.
PROMPTS = ("abc abc abc abc abc abc abc ", "abc abc abc abc abc abc then another one", "short", "x" * 70)
SAMPLING = SamplingParams(temperature=0, max_tokens=4, logprobs=2)


def generate(folder: str) -> dict[str, Any]:
    """Tokens and log probabilities, and statistics of every step."""
    backend = BackendConfig(threads=1, device="cpu")
    engine = EngineConfig(cache_tokens=640, attention_interval=1, max_batch_tokens=64, max_sequences=8)
    llm = LLM(folder, backend=backend, engine=engine)
    used, stats = llm._engine._backend, []

    def recorded(batch: Any) -> Any:
        output = step(batch)
        stats.append(output.stats.tolist())
        return output

    step, used.step = used.step, recorded
    completions = llm.generate(list(PROMPTS), SAMPLING)
    return {
        "completions": [(one.token_ids, [token.logprob for token in one.logprobs]) for one in completions],
        "stats": stats,
    }


def main() -> None:
    folder, ops = sys.argv[1:]
    device = Device()
    on_cpu = generate(folder)
    assert not device.launches
    backends.kernel_library = lambda: Path(ops)
    on_gpu = generate(folder)
    said = {"cpu": on_cpu, "gpu": on_gpu, "launches": [*device.launches]}
    if read_manifest(Path(folder)).cache.key_screens:
        device.launches.clear()
        OnnxRuntimeBackend.screened = property(lambda self: False)  # type: ignore[assignment, method-assign]  # a property
        said |= {"unscreened": generate(folder), "launches_unscreened": device.launches}
    json.dump(said | {"failures": device.failures}, sys.stdout)


if __name__ == "__main__":
    main()
