"""Generate with `LLM` on ONNX Runtime's CUDA provider, over a GPU that computes nothing, so every token is the first.

`python -m tests.full.cuda.generate FOLDER HOW` prints the calls to the GPU as JSON. HOW is a text of words: graphs;
logprobs, which need logits; temperature; penalties; without-kernel (the library has no kernel for sampling); no-limit
(the cache takes all free memory).
"""

import ctypes
import json
import sys

from sharp import LLM, SamplingParams
from sharp.plugins.cuda import sampler
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig, EngineConfig

BLOCKS = 40
LEFT: list[int] = []  # bytes that are left for the cache


def events(library: str, function: str) -> list[str]:
    source = getattr(ctypes.CDLL(library), function)
    source.restype = ctypes.c_char_p
    return source().decode().splitlines()


def main() -> None:
    folder, how = sys.argv[1], sys.argv[2].split()
    if "without-kernel" in how:
        sampler.KERNEL = "another"
    backend = BackendConfig(threads=1, cuda_graphs="graphs" in how)  # the default device, auto
    engine = EngineConfig(cache_tokens=None if "no-limit" in how else BLOCKS * 16, attention_interval=2)
    free_memory = OnnxRuntimeBackend.free_memory

    def free_memory_of(self, largest):
        LEFT.append(free_memory(self, largest))
        return LEFT[-1]

    OnnxRuntimeBackend.free_memory = free_memory_of
    llm = LLM(folder, backend=backend, engine=engine)
    used = llm._engine._backend
    said = {
        "device": used.device,
        "blocks": llm._engine.blocks.blocks,
        "left": LEFT[0],
        "started": events("libcuda.so.1", "fake_events"),
    }
    said["addresses"] = {
        tensor.name: value.data_ptr() for tensor, value in zip(used._caches, used._current, strict=True)
    }
    events("libcudart.so.13", "fake_runtime_events")

    steps = []

    def record(batch, output):
        happened = {"driver": events("libcuda.so.1", "fake_events")}
        happened["runtime"] = events("libcudart.so.13", "fake_runtime_events")
        stats = None if output.stats is None else output.stats.shape
        happened |= {"tokens": len(batch.input_ids), "logits": output.logits.shape, "stats": stats}
        happened["sampled"] = None if output.sampled is None else output.sampled.tolist()
        steps.append(happened)
        return output

    step, step_and_sample = used.step, used.step_and_sample
    used.step = lambda batch: record(batch, step(batch))
    if used._sampler is not None:
        used.step_and_sample = lambda batch, *how: record(batch, step_and_sample(batch, *how))
    sampling = SamplingParams(
        temperature=0.7 * ("temperature" in how),
        max_tokens=4,
        logprobs=1 if "logprobs" in how else None,
        repetition_penalty=1.1 if "penalties" in how else 1,
        logit_bias={5: 1.5} if "penalties" in how else (),
    )
    completions = llm.generate(["one", "another", "third"], sampling)
    said |= {"steps": steps, "completions": [completion.token_ids for completion in completions]}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
