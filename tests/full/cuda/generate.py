"""Generates with `LLM` on ONNX Runtime's CUDA provider over a GPU that computes nothing: every token is the first one.

python -m tests.full.cuda.generate FOLDER GRAPHS: what happened on the GPU as JSON on stdout.
"""

import ctypes
import json
import sys

from sharp import LLM, SamplingParams
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig, EngineConfig

BLOCKS = 40
LEFT: list[int] = []  # bytes, for the cache


def events(library: str, function: str) -> list[str]:
    source = getattr(ctypes.CDLL(library), function)
    source.restype = ctypes.c_char_p
    return source().decode().splitlines()


def main() -> None:
    folder, graphs = sys.argv[1], sys.argv[2] == "graphs"
    backend = BackendConfig(threads=1, cuda_graphs=graphs)  # device: auto
    engine = EngineConfig(cache_tokens=BLOCKS * 16, attention_interval=2)
    free_memory = OnnxRuntimeBackend.free_memory

    def free_memory_of(self, largest):
        LEFT.append(free_memory(self, largest))
        return LEFT[-1]

    OnnxRuntimeBackend.free_memory = free_memory_of
    llm = LLM(folder, backend=backend, engine=engine)
    used = llm._engine._backend
    said = {"device": used.device, "left": LEFT[0], "started": events("libcuda.so.1", "fake_events")}
    said["addresses"] = {
        tensor.name: value.data_ptr() for tensor, value in zip(used._caches, used._current, strict=True)
    }
    events("libcudart.so.13", "fake_runtime_events")

    steps = []

    def recorded(batch):
        output = step(batch)
        happened = {"driver": events("libcuda.so.1", "fake_events")}
        happened["runtime"] = events("libcudart.so.13", "fake_runtime_events")
        stats = None if output.stats is None else output.stats.shape
        happened |= {"tokens": len(batch.input_ids), "logits": output.logits.shape, "stats": stats}
        steps.append(happened)
        return output

    step, used.step = used.step, recorded
    completions = llm.generate(["one", "another", "third"], SamplingParams(temperature=0, max_tokens=4))
    said |= {"steps": steps, "completions": [completion.token_ids for completion in completions]}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
