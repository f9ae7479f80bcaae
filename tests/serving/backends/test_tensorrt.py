"""The TensorRT backend over a fake TensorRT and a fake cuda-python, which compute on the CPU by address."""

import ctypes
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from sharp.core.engine_manifest import ENGINE_FILE, manifest_path
from sharp.core.errors import SharpError
from sharp.core.manifest import read_manifest
from sharp.plugins.cpu.sampling import sample
from sharp.serving import LLM, SamplingParams
from sharp.serving.api.errors import DeviceLostError, EngineError, InputError
from sharp.serving.backends import load_backend
from sharp.serving.backends.tensorrt import CACHE_DTYPES, DTYPES
from sharp.serving.cli import serve
from sharp.serving.config import BackendConfig, EngineConfig
from tests.serving.backends.fake_tensorrt import FakeBuilder, FakeContext, FakeEngine, FakeMachine, write_engine
from tests.serving.conftest import BLOCK
from tests.serving.processes import PORTS

BACKEND = BackendConfig(name="tensorrt")
ENGINE = EngineConfig(max_sequences=4, max_batch_tokens=16, attention_interval=0)


@pytest.fixture
def machine(monkeypatch):
    made = FakeMachine()
    made.install(monkeypatch)
    return made


@pytest.fixture
def folder(hashing, tmp_path):
    return shutil.copytree(hashing, tmp_path / "model")


PROMPTS = [[5, 9, 2, 40, 3, 8, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 200, 7, 31], [7], [100, 200, 50]]


@pytest.mark.parametrize("plugin", [True, False])
def test_tokens_are_those_of_the_model(machine, folder, expected_hashing, plugin):
    write_engine(folder, machine, block=BLOCK, plugin=plugin)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    machine.used.clear()  # the server's own first token at start also used a profile
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [list(completion.token_ids) for completion in completions] == [
        expected_hashing(prompt, 8) for prompt in PROMPTS
    ]
    # Prompts run in profile 1, which fits every step. Decoding steps run in profile 0.
    assert machine.used[0] == 1 and machine.used[-1] == 0 and machine.used == sorted(machine.used, reverse=True)
    assert machine.loaded == (["/lib/tensorrt.so"] if plugin else [])
    assert machine.added == ([(folder, 0)] if plugin else [])
    # The plugin aliases caches, so they are updated in place. Without the plugin, two caches are swapped in every step.
    for name in ("key_cache", "value_cache"):
        read, written = machine.addresses[f"{name}.0"], machine.addresses[f"{name}_out.0"]
        assert read == written and len(read) == (1 if plugin else 2)


def test_statistics_come_when_requested(machine, folder):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    [completion] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4), attention=True)
    # Attention is uniform over the keys of each token. The second head has half of the entropy.
    assert completion.attention.normalized_entropy[0] == pytest.approx([1.0, 0.5], abs=1e-5)


def test_every_thread_that_computes_chooses_the_gpu(machine, folder, expected_hashing):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=replace(BACKEND, device="cuda:1"), engine=ENGINE)
    prompts = [([1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))]
    with ThreadPoolExecutor(1) as pool:
        [[completion]] = pool.map(lambda one: llm.generate([one[0]], one[1]), prompts)
    assert list(completion.token_ids) == expected_hashing([1, 2], 4)
    assert {number for _, number in machine.devices} == {1}
    assert len({thread for thread, _ in machine.devices}) == 2


def test_a_refused_step_fails_and_the_next_one_works(machine, folder, expected_hashing):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    machine.refuse = "step"
    with pytest.raises(EngineError, match="TensorRT refused the step"):
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))
    machine.refuse = ""
    [completion] = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert list(completion.token_ids) == expected_hashing([1, 2], 4)


def test_a_gpu_that_is_lost_ends_the_engine(machine, folder):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    machine.refuse = "device"
    with pytest.raises(DeviceLostError, match="the GPU is lost to this process: cudaDeviceSynchronize failed: cudaErr"):
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=4))


def test_the_engine_sets_the_limits_of_the_server(machine, folder):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    assert (llm.model.context_limit, llm.model.cache_tokens) == (64, 256)
    with pytest.raises(InputError, match="at most 4 sequences and 16 tokens a step: serve it with --max-sequences 4"):
        LLM(folder, backend=BACKEND)
    with pytest.raises(InputError, match="cache_tokens is 257, but the engine takes at most 256"):
        LLM(folder, backend=BACKEND, engine=EngineConfig(max_sequences=4, max_batch_tokens=16, cache_tokens=257))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "TensorRT-RTX"}, "is an engine of TensorRT-RTX; build one with --backend tensorrt"),
        ({"sha256": "0"}, "is not the engine that its manifest describes"),
        ({"model_sha256": "0"}, r"was built from another model\.onnx"),
        ({"version": "10.15.0"}, r"built by TensorRT 10\.15\.0, and only that one loads it; this is 10\.14\.1"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(machine, folder, changes, words):
    write_engine(folder, machine, block=BLOCK, **changes)
    with pytest.raises(InputError, match=words):
        load_backend(folder, read_manifest(folder), BACKEND)


def test_an_engine_with_other_tensors_is_refused(machine, folder):
    write_engine(folder, machine, block=BLOCK)
    manifest = read_manifest(folder)
    half = manifest.model_copy(update={"cache": manifest.cache.model_copy(update={"dtype": "float16"})})
    with pytest.raises(InputError, match=r"key_cache\.0 of .* is FLOAT, but must be HALF"):
        load_backend(folder, half, BACKEND)
    with pytest.raises(InputError, match=r"lacks key_cache\.1, key_cache_out\.1"):
        load_backend(folder, manifest.model_copy(update={"layers": 2}), BACKEND)


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        ("plugin", SharpError, r"could not load /lib/tensorrt\.so"),
        ("engine", InputError, r"cannot be loaded by TensorRT 10\.14\.1 on this GPU"),
        ("memory", SharpError, "cudaMalloc failed: cudaErrorMemoryAllocation"),
    ],
)
def test_what_the_machine_refuses(machine, folder, refused, error, words):
    write_engine(folder, machine, block=BLOCK)
    machine.refuse = refused
    with pytest.raises(error, match=words):
        load_backend(folder, read_manifest(folder), BACKEND).allocate_cache(4)


def test_an_engine_without_a_manifest_or_with_an_old_one(machine, folder):
    with pytest.raises(InputError, match=r"has no model\.engine; make it with: sharp build"):
        load_backend(folder, read_manifest(folder), BACKEND)
    write_engine(folder, machine, block=BLOCK)
    path = manifest_path(folder / ENGINE_FILE)
    path.write_text('{"shapes": {}}')
    with pytest.raises(InputError, match=r"is not a manifest of an engine that this Sharp reads: backend"):
        load_backend(folder, read_manifest(folder), BACKEND)
    path.unlink()
    with pytest.raises(InputError, match=r"has no manifest model\.engine\.json beside it"):
        load_backend(folder, read_manifest(folder), BACKEND)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("tensorrt", "package tensorrt is not installed"), ("cuda", "package cuda-python is not installed")],
)
def test_a_library_that_is_missing_ends_the_server_with_one_sentence(machine, folder, monkeypatch, missing, words):
    write_engine(folder, machine, block=BLOCK)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(serve, [str(folder), "--backend", "tensorrt", *PORTS])
    assert (result.exit_code, result.output.count("Error: "), words in result.output) == (2, 1, True), result.output


@pytest.mark.parametrize("flags", [("--device", "cpu"), ("--no-kernels",)])
def test_settings_of_the_other_backend_are_refused(machine, folder, flags):
    write_engine(folder, machine, block=BLOCK)
    result = CliRunner().invoke(serve, [str(folder), "--backend", "tensorrt", *PORTS, *flags])
    assert (result.exit_code, "takes no --device cpu or --no-kernels" in result.output) == (2, True)


def test_the_fake_has_the_interface_of_the_real_package():
    # TensorRT-RTX's Python package is built from the same source, and can be installed anywhere.
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="the TensorRT-RTX bindings are not installed")
    pairs = ((FakeEngine, trt.ICudaEngine), (FakeContext, trt.IExecutionContext), (FakeBuilder, trt.Builder))
    for fake, real in pairs:
        used = {name for name in vars(fake) if not name.startswith("_")} - {"read", "value"}
        assert used and all(hasattr(real, name) for name in used), real
    for name in ("num_io_tensors", "num_optimization_profiles"):
        assert hasattr(trt.ICudaEngine, name)
    assert {*DTYPES.values(), *CACHE_DTYPES.values()} <= set(trt.DataType.__members__)
    assert hasattr(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03") and hasattr(trt.Runtime, "deserialize_cuda_engine")


def test_logits_that_are_sampled_come_to_page_locked_memory_and_no_others(machine, folder):
    write_engine(folder, machine, block=BLOCK)
    llm = LLM(folder, backend=BACKEND, engine=ENGINE)
    machine.copied.clear()
    llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert {size // (257 * 4) for _, size in machine.copied} == {1, 2}
    assert all(locked for locked, _ in machine.copied)
    assert len(machine.page_locked) == 1


class HostSampler:
    """A sampler that reads logits from the fake GPU's memory."""

    def __init__(self, vocab, number, stream):
        assert stream == 55
        self.vocab = vocab
        self.changed = []  # for each call, whether logits were changed

    def sample(self, logits, indices, samplings, changes):
        memory = (ctypes.c_float * (len(indices) * self.vocab)).from_address(logits)
        rows = np.ctypeslib.as_array(memory).reshape(-1, self.vocab)[indices]
        self.changed.append(changes is not None)
        if changes is not None:
            changes.apply(rows)
        return sample(rows, samplings)


def test_tokens_are_sampled_where_the_logits_are(machine, folder, monkeypatch):
    params = [
        SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.5, logit_bias={4: 3}),
        SamplingParams(temperature=0, max_tokens=6, logprobs=1),
    ]

    def completions():
        write_engine(folder, machine, block=BLOCK)
        llm = LLM(folder, backend=BACKEND, engine=replace(ENGINE, attention_interval=2))
        sampler = llm._engine._backend._sampler
        machine.copied.clear()
        found = [list(llm.generate(PROMPTS, each)[0].token_ids) for each in params[:2]]
        copied = {size for _, size in machine.copied}
        return found, copied, list(llm.generate(PROMPTS, params[2])[0].token_ids), sampler

    on_host, with_logits, *_ = completions()
    monkeypatch.setattr("sharp.serving.backends.tensorrt.find_sampler", HostSampler)
    found, copied, last, sampler = completions()
    assert found == on_host
    # Statistics (2 heads, 4 columns) are still copied. Logits (257 tokens) are copied only if logprobs need them.
    assert copied and all(size % (2 * 4 * 4) == 0 and size < 257 * 4 for size in copied)
    assert {257 * 4, 257 * 8} & with_logits
    assert {False, True} == set(sampler.changed) and len(last) == 6
