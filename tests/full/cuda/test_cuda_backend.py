"""A model on ONNX Runtime's CUDA provider over a fake GPU, and those parts of its decode steps that a CPU can check."""

import ctypes
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.cli import export
from sharp.models.checkpoint import save_checkpoint
from sharp.serving import LLM, SamplingParams
from sharp.serving.backends import StepInputs, decode_graphs, load_backend
from sharp.serving.backends.backend import StepLimits
from sharp.serving.backends.cache_size import bytes_per_block
from sharp.serving.backends.decode_graphs import DecodeGraphs, graph_size, is_decode, padded
from sharp.serving.config import BackendConfig, EngineConfig
from tests.exporter.conftest import tiny_model
from tests.full.cuda.native import ROOT

LAYERS, HEADS, VOCAB = 2, 6, 257


def exported(out, *options, norm="ssa"):
    """Export a model with a head size of 64, for which the fake package has kernels, and return its folder."""
    save_checkpoint(out / "tiny.safetensors", tiny_model(norm, head_dim=64, layers=2))
    arguments = [str(out / "tiny.safetensors"), "--norm", norm, "-o", str(out / norm), *options]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    return out / norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def int8_folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("int8"), "--kv-dtype", "int8")


@pytest.fixture(scope="module")
def screened_folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("screened"), "--key-screen", "int8", norm="entmax")


@pytest.fixture(scope="module")
def generate(libraries, cuda_provider, folder):
    def run(how, folder=folder):
        environment = {"SHARP_LIBRARY_FOLDER": str(libraries), "SHARP_FAKE_HOST_MEMORY": "1", **cuda_provider}
        finished = subprocess.run(
            [sys.executable, "-m", "tests.full.cuda.generate", folder, how],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout) | {"log": finished.stderr}

    return run


def launched(events):
    return [dict(word.split("=") for word in e.split()[2:]) for e in events if e.startswith("launch ")]


def samplings(step):
    """Return the launch of the sampling kernel in a step, and all calls of the driver after it."""
    names = [event.split()[1].partition("@")[0] if event.startswith("launch ") else event for event in step["driver"]]
    return names[names.index("sample_rows") :] if "sample_rows" in names else []


def test_a_gpu_is_taken_by_itself_and_caches_stay_on_it(generate):
    said = generate("plain")
    assert said["device"] == "cuda"
    # Caches are cleared, because uninitialized memory may be NaN. The first cache, of one block, is for the largest
    # step.
    sizes = [blocks * 2 * 64 * 16 * 4 for blocks in (1, 40) for _ in range(2 * LAYERS)]
    cleared = [event.split() for event in said["started"] if event.startswith("clear ")]
    assert [(word, int(size.removeprefix("bytes="))) for word, _, size in cleared] == [("clear", s) for s in sizes]
    del cleared[: 2 * LAYERS]
    assert sorted(int(address) for _, address, _ in cleared) == sorted(said["addresses"].values())
    assert said["completions"] == [[0] * 4] * 3
    # Every kernel was loaded at start, by a step that stores nothing.
    assert {"write_cache", "decode_stream", "merge", "prefill", "merge_prompts", "sample_rows"} == {
        event.split()[1] for event in said["started"] if event.startswith("kernel ")
    }
    assert not [event for step in said["steps"] for event in step["driver"] if event.startswith("kernel ")]

    prompt, *decode = said["steps"]
    assert prompt["tokens"] > 3 and [step["tokens"] for step in decode] == [3, 3, 3]
    for step in said["steps"]:
        used = [value for values in launched(step["driver"]) for value in [values.get("key_cache")] if value]
        assert set(used) == {str(said["addresses"][f"key_cache.{layer}"]) for layer in range(LAYERS)}
        assert not [event for event in step["driver"] if event.startswith("copy ")]
        to_device = [event for event in step["runtime"] if event.startswith("copy 1 ")]
        to_host = [int(event.split()[-1]) for event in step["runtime"] if event.startswith("copy 2 ")]
        assert len(to_device) == 8  # the inputs of a step
        # Only steps that collect statistics copy them to the host, and no step copies logits.
        assert to_host == ([] if step["stats"] is None else [LAYERS * step["tokens"] * HEADS * 4 * 4])
        assert samplings(step) == ["sample_rows", "wait for stream 0"]
        assert launched(step["driver"])[-1]["vocab"] == str(VOCAB)
        assert step["logits"] == [0, VOCAB] and step["sampled"] == [0] * 3
    assert {step["stats"] is None for step in said["steps"]} == {True, False}


def test_the_memory_of_the_largest_step_is_taken_before_the_cache(generate):
    said = generate("plain")
    # The largest step has 2,048 tokens, and needs memory for statistics, all logits, and the layers' activations.
    step = 2048 * 4 * (LAYERS * HEADS * 4 + VOCAB)
    assert step < (6 << 30) - said["left"] < 1 << 28
    # No more memory is allocated while requests run.
    assert not [event for step in said["steps"] for event in step["runtime"] if event.startswith("allocate")]


def test_decode_steps_are_replayed_as_one_graph(generate):
    said = generate("graphs")
    assert said["completions"] == [[0] * 4] * 3
    prompt, first, *others = said["steps"]
    assert launched(prompt["driver"]) and "replay" not in prompt["runtime"]
    # Every size was captured at start: 1, 2, 4, ... 64 sequences.
    grids = {values["grid"].split(",")[0] for values in launched(said["started"]) if values.get("most_tokens") == "0"}
    assert {str(2**power) for power in range(7)} <= grids
    for step in (first, *others):  # three sequences run in a graph for four, and three are sampled
        assert samplings(step) == ["sample_rows", "wait for stream 0"] and len(step["driver"]) == 3
        assert launched(step["driver"])[0]["grid"] == "3,1,1"
        assert step["driver"][0] == "write bytes=3600 stream=0"  # the samplings of 64 rows
        assert step["runtime"].count("replay") == 1 and "capture" not in step["runtime"]
        statistics = [LAYERS * 4 * HEADS * 4 * 4] if step["stats"] else []
        assert [int(event.split()[-1]) for event in step["runtime"] if event.startswith("copy 2 ")] == statistics
        assert step["logits"] == [0, VOCAB] and step["stats"] in (None, [LAYERS, 3, HEADS, 4])


@pytest.mark.parametrize("how", ["logprobs", "without-kernel"])
def test_logits_of_a_graph_travel_where_they_are_needed(generate, how):
    said = generate(f"graphs {how}")
    assert said["completions"] == [[0] * 4] * 3
    prompt, *others = said["steps"]
    assert 3 * VOCAB * 4 in [int(event.split()[-1]) for event in prompt["runtime"] if event.startswith("copy 2 ")]
    for step in others:
        assert step["driver"] == [f"read bytes={3 * VOCAB * 4}"]  # three of the four rows of logits
        assert step["logits"] == [3, VOCAB] and step["sampled"] is None
    assert ("tokens are sampled on the host" in said["log"]) == (how == "without-kernel")


@pytest.mark.parametrize("how", ["temperature", "graphs temperature"])
def test_rows_with_a_temperature_are_sampled_on_the_gpu_too(generate, how):
    for step in generate(how)["steps"]:
        assert samplings(step) == ["sample_rows", "wait for stream 0"]
        assert step["sampled"] == [0] * 3
        assert not [event for event in step["driver"] if event.startswith("read ")]


@pytest.mark.parametrize("how", ["penalties", "graphs penalties temperature"])
def test_penalties_travel_to_the_gpu_and_logits_stay_there(generate, how):
    prompt, *decode = generate(how)["steps"]
    # The prompts "one", "another" and "third" have 3, 7 and 5 bytes, all distinct but for the last byte. Each request
    # has one bias.
    for step, generated in zip((prompt, *decode), (0, 1, 1, 1), strict=True):
        assert samplings(step) == ["sample_rows", "wait for stream 0"]
        writes = [event for event in step["driver"] if event.startswith("write ")]
        assert writes == ["write bytes=3600 stream=0", f"write bytes={16 * (3 + 7 + 5 + 3 + 3 * generated)} stream=0"]
        assert not [event for event in step["driver"] if event.startswith("read ")]
        assert step["sampled"] == [0] * 3


def test_logits_of_a_step_without_a_graph_travel_where_they_are_needed(generate):
    for step in generate("logprobs")["steps"]:
        to_host = [int(event.split()[-1]) for event in step["runtime"] if event.startswith("copy 2 ")]
        assert 3 * VOCAB * 4 in to_host and not samplings(step)


def test_an_int8_cache_and_its_scales_stay_on_the_gpu(generate, int8_folder):
    said = generate("graphs", int8_folder)
    assert (said["device"], said["completions"]) == ("cuda", [[0] * 4] * 3)
    sizes = {
        "key_cache": 40 * 2 * 64 * 16,
        "value_cache": 40 * 2 * 64 * 16,
        "key_scale": 40 * 2 * 4,
        "value_scale": 320,
    }
    cleared = [event.split()[1:] for event in said["started"] if event.startswith("clear ")]
    cleared = dict(cleared[len(cleared) // 2 :])
    assert cleared == {str(at): f"bytes={sizes[name.partition('.')[0]]}" for name, at in said["addresses"].items()}
    prompt, first, *others = said["steps"]
    for step in (prompt,):
        for name in sizes:
            used = {values[name] for values in launched(step["driver"]) if name in values}
            assert used == {str(said["addresses"][f"{name}.{layer}"]) for layer in range(LAYERS)}
        assert not [event for event in step["driver"] if event.startswith("copy ")]
    for step in (first, *others):
        assert samplings(step) == ["sample_rows", "wait for stream 0"] and len(step["driver"]) == 3
        assert step["runtime"].count("replay") == 1


@pytest.mark.parametrize("how", ["plain", "graphs"])
def test_a_key_screen_lies_on_the_gpu_beside_its_keys(generate, screened_folder, how):
    said = generate(how, screened_folder)
    assert (said["device"], said["completions"]) == ("cuda", [[0] * 4] * 3)
    sizes = {"key_cache": 4 * 64, "value_cache": 4 * 64, "key_screen": 64 + 8}  # bytes per key
    cleared = [event.split()[1:] for event in said["started"] if event.startswith("clear ")]
    assert len(cleared) == 2 * 3 * LAYERS
    cleared = dict(cleared[len(cleared) // 2 :])
    expected = {
        str(at): f"bytes={40 * 2 * 16 * sizes[name.partition('.')[0]]}" for name, at in said["addresses"].items()
    }
    assert cleared == expected and len(expected) == 3 * LAYERS
    of_screen = {"write_screened_cache", "decode_screen", "decode_survivors"}
    assert of_screen <= {event.split()[1] for event in said["started"] if event.startswith("kernel ")}
    prompt, *decode = said["steps"]
    for step in said["steps"] if how == "plain" else (prompt,):
        launches = launched(step["driver"])
        assert {values["key_screen"] for values in launches if values.get("key_screen")} == {
            str(said["addresses"][f"key_screen.{layer}"]) for layer in range(LAYERS)
        }
        # Caches are updated in place: nothing is copied on the GPU, and no cache is copied to or from the host.
        assert not [event for event in step["driver"] if event.startswith("copy ")]
    block = 2 * 16 * (64 + 8)
    for step in said["steps"]:
        assert not [
            event for event in step["runtime"] if event.startswith("copy ") and int(event.split()[-1]) >= block * 40
        ]
    assert all(("replay" in step["runtime"]) == (how == "graphs") for step in decode)


def test_a_cache_is_as_many_blocks_as_fit_with_their_screens(generate, screened_folder):
    manifest = read_manifest(screened_folder)
    with_screens, without = bytes_per_block(manifest), bytes_per_block(manifest, screened=False)
    assert with_screens - without == LAYERS * 2 * 16 * (64 + 8)
    said = generate("no-limit", screened_folder)
    assert said["blocks"] == int(0.9 * said["left"]) // with_screens


def decode_batch(contexts, pages=3, **changes):
    """Return a batch with one token for each sequence, in blocks of its own."""
    count = len(contexts)
    table = np.arange(count * pages, dtype=np.int32).reshape(count, pages)
    values = {
        "input_ids": np.arange(1, count + 1),
        "positions": np.array(contexts),
        "slot_mapping": np.array([table[i, n // 16] * 16 + n % 16 for i, n in enumerate(contexts)], np.int32),
        "block_table": table,
        "query_start": np.arange(count + 1, dtype=np.int32),
        "context_lens": np.array(contexts, np.int32),
        "logits_indices": np.arange(count),
        "collect_stats": True,
    }
    return StepInputs(**{**values, **changes})


def test_padding_changes_nothing_but_the_shapes(folder):
    # The CPU's kernels treat padded tokens, which see nothing, as the GPU's kernels must.
    def stepped(pad):
        backend = load_backend(folder, read_manifest(folder), BackendConfig(threads=1, device="cpu"))
        backend.allocate_cache(9)
        prompt = decode_batch([0, 0, 0], input_ids=np.arange(40) % 200)
        prompt = StepInputs(
            **{
                **vars(prompt),
                "positions": np.concatenate([np.arange(17), np.arange(3), np.arange(20)]),
                "slot_mapping": np.concatenate([np.arange(17), 48 + np.arange(3), 96 + np.arange(20)]).astype(np.int32),
                "query_start": np.array([0, 17, 20, 40], np.int32),
                "logits_indices": np.array([39]),
            }
        )
        assert not is_decode(prompt)
        backend.step(prompt)
        batch = decode_batch([17, 3, 20])
        assert is_decode(batch)
        output = backend.step(padded(batch, *graph_size(batch)) if pad else batch)
        return output, [value.numpy().copy() for value in backend._current]

    (plain, caches), (more, same_caches) = stepped(False), stepped(True)
    assert plain.logits.shape == (3, VOCAB) and more.logits.shape == (4, VOCAB)
    np.testing.assert_allclose(more.logits[:3], plain.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more.stats[:, :3], plain.stats, rtol=1e-5, atol=1e-6)
    assert np.isfinite(more.logits).all() and not more.stats[:, 3].any()
    for cache, same in zip(caches, same_caches, strict=True):
        np.testing.assert_allclose(same, cache, rtol=1e-5, atol=1e-6)


class HostReadback:
    """A readback that copies rows of a tensor on the host."""

    def copy(self, address, indices):
        rows = (ctypes.c_float * ((int(indices.max()) + 1) * VOCAB)).from_address(address)
        return np.ctypeslib.as_array(rows).reshape(-1, VOCAB)[indices]


class HostTensor(onnxruntime.OrtValue):
    """A tensor in host memory whose content can only be read as a copy, like a GPU's."""

    def __init__(self, shape, onnx_type, number):
        super().__init__(onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, onnx_type, "cpu", number)._ortvalue)

    def numpy(self):
        return super().numpy().copy()


def test_padding_enters_no_statistics(folder, monkeypatch):
    """Padding changes no statistics.

    Decode steps run padded in the memory of their graph, as a GPU would replay them. Here the CPU computes each step.
    """
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 9, 2, 40], [7], [100, 200, 50]]
    monkeypatch.setattr(decode_graphs, "device_tensor", HostTensor)

    def generated(graphs):
        engine = EngineConfig(cache_tokens=640, attention_interval=1, max_sequences=8, speculative_tokens=0)
        llm = LLM(folder, backend=BackendConfig(threads=1, device="cpu"), engine=engine)
        backend, steps = llm._engine._backend, []
        if graphs:
            caches = {}
            for one, value in zip(backend._caches, backend._current, strict=True):
                caches |= {one.name: value, one.updated_name: value}
            own = DecodeGraphs(backend._session, backend._manifest, caches, 0, HostReadback(), None)
            backend._graphs = own
            assert backend.step(decode_batch([0] * 3)).stats.shape[1] == 3 and {*own._graphs} == {(4, 64)}
        report = llm._engine.report

        def reported():
            steps.extend(report().attention)

        llm._engine.report = reported
        completions = llm.generate(prompts, params, attention=True)
        return completions, steps

    (plain, expected), (replayed, found) = generated(False), generated(True)
    for one, other in zip(plain, replayed, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("entropy", "normalized_entropy", "support_ratio", "logit_spread"):
            values = getattr(one.attention, name)
            np.testing.assert_allclose(getattr(other.attention, name), values, rtol=1e-5, err_msg=name)
        assert one.attention.tokens == other.attention.tokens
    # The metrics get one row for each token that was computed.
    assert [len(rows.positions) for rows in found] == [8, 3, 3, 3, 3, 3]
    for one, other in zip(expected, found, strict=True):
        assert other.positions.tolist() == one.positions.tolist()
        np.testing.assert_allclose(other.stats, one.stats, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sequences", "pages", "size"), [(1, 1, (1, 64)), (3, 64, (4, 64)), (4, 65, (4, 128)), (33, 4000, (64, 4096))]
)
def test_sizes_of_graphs(sequences, pages, size):
    batch = decode_batch([0] * sequences)
    assert graph_size(StepInputs(**{**vars(batch), "block_table": np.zeros((sequences, pages), np.int32)})) == size


def test_sizes_that_are_listed():
    config = BackendConfig(threads=1, cuda_graph_sizes="24,8,8")
    assert config.graph_sizes == (8, 24)
    graphs = DecodeGraphs(SimpleNamespace(get_outputs=list), None, {}, 0, None, None, config.graph_sizes)
    batches = [decode_batch([0] * sequences) for sequences in (3, 9, 25)]
    assert [graphs.has(batch) for batch in batches] == [True, True, False]
    assert [graph_size(batch, config.graph_sizes)[0] for batch in batches[:2]] == [8, 24]
    stepped = []
    graphs.step = lambda batch: stepped.append(batch.block_table.shape)
    manifest = SimpleNamespace(cache=SimpleNamespace(block_size=16))
    graphs._manifest = manifest
    graphs.capture(StepLimits(sequences=64, tokens=64, context=2048, blocks=128), lambda: 1)
    assert stepped == [(8, 64), (24, 64), (8, 128), (24, 128)]
    for sizes in ("8,", "0", "a", "-1"):
        with pytest.raises(InputError, match=r"cuda_graph_sizes is .* it must be numbers above 0, separated by commas"):
            BackendConfig(cuda_graph_sizes=sizes)


def test_a_cpu_has_no_graphs(folder):
    backend = load_backend(folder, read_manifest(folder), BackendConfig(threads=1, device="cpu", cuda_graphs=True))
    backend.allocate_cache(4)
    assert backend.step(decode_batch([0, 0])).logits.shape == (2, VOCAB)


def test_a_gpu_without_kernels_of_its_own_is_refused_at_start(libraries, cuda_provider, folder):
    environment = {**os.environ, "SHARP_LIBRARY_FOLDER": str(libraries), "SHARP_FAKE_HOST_MEMORY": "1", **cuda_provider}
    finished = subprocess.run(
        [sys.executable, "-c", "from sharp.core.cli import main; main()", "serve", folder, "--cache-tokens", "64"],
        env={**environment, "SHARP_FAKE_CAPABILITY": "75"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2, finished.stderr
    said = finished.stderr.splitlines()[-1]
    assert said.startswith("Error: the model does not run on this GPU: ") and said.endswith("; --device cpu runs it")
    assert "has no kernel write_cache float32 float32 64 64 16 for compute capability 7.5" in said


def run_doctor(libraries, cuda_provider, *command):
    finished = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "SHARP_LIBRARY_FOLDER": str(libraries), "SHARP_FAKE_HOST_MEMORY": "1", **cuda_provider},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = json.loads(finished.stdout)
    assert said["machine"]["GPU"] == "a fake GPU, compute capability 9.0, 8 GiB, a driver for CUDA 13.1"
    assert said["machine"]["sampler"] == "the GPU's: sample_rows for compute capability 9.0 loads"
    found = {backend["name"]: backend for backend in said["backends"]}
    assert found["ONNX Runtime on the CPU, our kernels"]["status"] == "agrees"
    return finished, found["ONNX Runtime on a GPU, our kernels"]


def test_the_doctor_sees_that_this_gpu_computes_nothing(libraries, cuda_provider):
    command = "from sharp.core.cli import main; main()"
    finished, on_gpu = run_doctor(libraries, cuda_provider, "-c", command, "doctor", "--json")
    assert finished.returncode == 1
    assert "ONNX Runtime on a GPU, our kernels: wrong here. Please open an issue" in finished.stderr
    assert on_gpu["status"] == "differs" and len(on_gpu["comparisons"]) == 8


def test_the_doctor_agrees_with_a_gpu_that_is_interpreted(libraries, cuda_provider):
    computing = {**cuda_provider, "TRITON_INTERPRET": "1"}
    finished, on_gpu = run_doctor(libraries, computing, "-m", "tests.full.cuda.compute_doctor")
    assert finished.returncode == 0, finished.stderr
    assert on_gpu["status"] == "agrees" and len(on_gpu["comparisons"]) == 8
