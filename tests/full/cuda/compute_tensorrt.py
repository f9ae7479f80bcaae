"""Generate on a fake TensorRT, once with the host's sampler and once with the kernel on an interpreted GPU.

`python -m tests.full.cuda.compute_tensorrt FOLDER LIBRARIES` prints as JSON the tokens of both, the sizes of copies to
the host, launches and failures.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sharp import LLM, SamplingParams
from sharp.serving.backends import tensorrt
from sharp.serving.config import BackendConfig, EngineConfig
from tests.full.cuda.computing import Device
from tests.serving.backends.fake_tensorrt import FakeMachine, write_engine
from tests.serving.conftest import BLOCK

PROMPTS = [[5, 9, 2, 40, 3], [7], [100, 200, 50]]
PARAMS = (
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, top_k=40, max_tokens=4, ignore_eos=True),
    SamplingParams(
        temperature=1, seed=4, max_tokens=4, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={9: 6}
    ),
)


def generate(folder: Path, machine: FakeMachine) -> dict[str, Any]:
    """Generate, and return the tokens and the sizes of copies to the host."""
    write_engine(folder, machine, block=BLOCK)
    engine = EngineConfig(max_sequences=4, max_batch_tokens=16, attention_interval=0)
    llm = LLM(folder, backend=BackendConfig(name="tensorrt"), engine=engine)
    machine.copied.clear()
    tokens = [[completion.token_ids for completion in llm.generate(PROMPTS, params)] for params in PARAMS]
    return {"tokens": tokens, "copied": sorted({size for _, size in machine.copied})}


def main() -> None:
    folder, device, machine = Path(sys.argv[1]), Device(), FakeMachine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARP_LIBRARY_FOLDER", sys.argv[2])
        machine.install(patch)
        on_gpu = generate(folder, machine)
        patch.setattr(tensorrt, "find_sampler", lambda *_: None)
        on_host = generate(folder, machine)
    json.dump({"gpu": on_gpu, "host": on_host, "launches": device.launches, "failures": device.failures}, sys.stdout)


if __name__ == "__main__":
    main()
