"""The kernel updates a bound cache in place, and its memory grows linearly with the context, not with its square."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from sharp.plugins.op.reference import AttentionOutput
from sharp.plugins.op.schema import OUTPUTS
from tests.marks import full
from tests.plugins.conformance.cases import Shape, assert_agrees, make_case, make_model, run, run_reference, session


def test_a_cache_bound_as_input_and_output_is_updated_in_place() -> None:
    case = make_case("softmax")
    loaded = session(make_model(case), kernel=True)
    binding = loaded.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in case.inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")
    binding.bind_ortvalue_output("key_cache_out", values["key_cache"])
    binding.bind_ortvalue_output("value_cache_out", values["value_cache"])
    binding.bind_output("stats")
    loaded.run_with_iobinding(binding)
    outputs = binding.get_outputs()
    assert outputs[1].data_ptr() == values["key_cache"].data_ptr()
    assert outputs[2].data_ptr() == values["value_cache"].data_ptr()
    result = AttentionOutput(*(output.numpy() for output in outputs))
    assert_agrees(result, run_reference(case), case)


def test_a_cache_that_is_not_bound_so_is_not_overwritten() -> None:
    case = make_case("softmax")
    before = case.inputs["key_cache"].copy()
    result = run(case, kernel=True)
    np.testing.assert_array_equal(case.inputs["key_cache"], before)
    assert (np.isnan(before) & ~np.isnan(result.key_cache)).any() or (result.key_cache != before).any()


def test_a_cache_used_by_two_nodes_is_read_unchanged_by_both() -> None:
    # The first node must not update a cache in place that the second node still reads.
    case = make_case("softmax")
    model = make_model(case)
    nodes = model.graph.node
    nodes.insert(0, helper.make_node("Identity", ["key_cache"], ["moved_cache"]))
    nodes[1].input[3] = "moved_cache"
    second = type(nodes[1])()
    second.CopyFrom(nodes[1])
    second.output[:] = ["second_output", "second_key_cache", "second_value_cache", "second_stats"]
    nodes.append(second)
    model.graph.output.append(helper.make_tensor_value_info("second_key_cache", 1, None))
    model.graph.output.append(helper.make_tensor_value_info("second_output", 1, None))
    results = session(model, kernel=True).run([*OUTPUTS, "second_output", "second_key_cache"], case.inputs)
    np.testing.assert_array_equal(results[0], results[4])
    np.testing.assert_array_equal(results[1], results[5])


PEAK_OF_A_PROMPT = """
import resource, sys
import numpy as np
from tests.plugins.conformance.cases import Shape, make_case, make_model, session
from tests.plugins.test_memory import prompt
normalizer, tokens = sys.argv[1], int(sys.argv[2])
model, feeds = prompt(normalizer, tokens)
loaded = session(model, kernel=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded.run(["output"], feeds)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def prompt(normalizer: str, tokens: int) -> tuple[object, dict[str, np.ndarray]]:
    """Return a model and a prompt of one head with one channel, so that only the kernel's own memory can be large."""
    case = make_case(normalizer, Shape(((0, 1),), 1, 1, 1, 1))
    blocks = tokens // 16
    numbers = np.random.default_rng(0).standard_normal((tokens, 1, 1)).astype(np.float32)
    feeds = {
        **case.inputs,
        "query": numbers,
        "key": numbers,
        "value": numbers,
        "key_cache": np.zeros((blocks, 1, 1, 16), np.float32),
        "value_cache": np.zeros((blocks, 1, 16, 1), np.float32),
        "slot_mapping": np.arange(tokens, dtype=np.int32),
        "block_table": np.arange(blocks, dtype=np.int32)[None],
        "query_start": np.array([0, tokens], np.int32),
        "context_lens": np.array([0], np.int32),
        "collect_stats": np.array(False),
    }
    return make_model(case), feeds


@pytest.mark.parametrize("normalizer", [full("softmax"), "entmax"])
def test_peak_memory_of_a_prompt_is_linear(normalizer: str) -> None:
    def peak(tokens: int) -> float:
        finished = subprocess.run(
            [sys.executable, "-c", PEAK_OF_A_PROMPT, normalizer, str(tokens)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(finished.stdout)

    # A float32 matrix of tokens times context would take 256 MiB and 4 GiB.
    assert peak(8192) < 32
    assert peak(32768) < 64
