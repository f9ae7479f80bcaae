"""Generate with `LLM` on the CPU's kernels, on an interpreted GPU, and on that GPU without key screens.

`python -m tests.full.cuda.compute_text FOLDER OPS` prints the three results as JSON. OPS is a library that registers
the CUDA ops as ops of the CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from sharp import LLM, SamplingParams
from sharp.core.manifest import read_manifest
from sharp.serving.backends import session as backends
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig, EngineConfig
from tests.full.cuda.computing import Device

# Together these prompts cause prefill in several chunks, prefix-cache hits, decoding beside prefill, and draft tokens.
PROMPTS = ("abc abc abc abc abc abc abc ", "abc abc abc abc abc abc then another one", "short", "x" * 70)
SAMPLING = SamplingParams(temperature=0, max_tokens=4, logprobs=2)


def generate(folder: str) -> dict[str, Any]:
    """Generate, and return tokens, log-probabilities, and the statistics of every step."""
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
        "completions": [
            (completion.token_ids, [token.logprob for token in completion.logprobs]) for completion in completions
        ],
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
