"""The op of libsharp_ops.so on CUDAExecutionProvider, in ONNX Runtime over host memory and a fake CUDA driver."""

import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from sharp.plugins import library_path
from sharp.plugins.op.attributes import NORMALIZERS
from tests.full.cuda.steps import OPTIONAL, Step, launches, make_steps
from tests.plugins.conformance.cases import Shape, assert_agrees, make_case, make_model, run_reference

IN_ORDER = ("query", "key", "value", "slot_mapping", "block_table", "query_start", "context_lens", "output", "stats")


@pytest.fixture(scope="module")
def run(libraries):
    return lambda *target, fails=False: make_steps(libraries, target, fails)


def test_the_kernels_get_the_tensors_of_the_session_on_its_stream(run):
    [result] = run(Step("ssa", absent=[]))
    addresses = result["addresses"]
    assert addresses["key_cache_out"] == addresses["key_cache"]
    assert not [event for event in result["events"] if event.startswith(("copy ", "set "))]
    found = launches(result)
    assert [name for name, _ in found] == ["write_cache", "decode_stream", "merge", "prefill"]
    for _, values in found:
        assert values["stream"] == "77"
        for name in set(values) & {*IN_ORDER, "key_cache", "value_cache", "head_params", "alibi_slopes"}:
            assert values[name] == str(addresses[name]), name
        assert values.get("collect_stats", str(addresses["collect_stats"])) == str(addresses["collect_stats"])
    assert set().union(*(values for _, values in found)) >= {*IN_ORDER, "key_cache", "value_cache", "head_params"}


def test_caches_that_are_not_bound_in_place_are_copied_first(run):
    [result] = run(Step(in_place=False))
    addresses = result["addresses"]
    size = 9 * 2 * 64 * 16 * 2
    assert [event for event in result["events"] if event.startswith("copy ")] == [
        f"copy to={addresses[f'{name}_out']} from={addresses[name]} bytes={size} stream=77"
        for name in ("key_cache", "value_cache")
    ]
    for _, values in launches(result):
        for name in set(values) & {"key_cache", "value_cache"}:
            assert values[name] == str(addresses[f"{name}_out"]) != str(addresses[name])


def test_caches_between_nodes_are_updated_in_place_by_themselves(run):
    [result] = run(Step(dtype="float32", cache_dtype="float32", in_place=False, between_nodes=True))
    assert launches(result) and not [event for event in result["events"] if event.startswith("copy ")]


def test_a_key_screen_reaches_the_kernels_and_is_updated_in_place(run):
    beside = [*OPTIONAL, "alibi_slopes"]
    given, none = run(
        Step("entmax", screened=True, tokens=2, absent=beside),
        Step("entmax", screened=True, tokens=2, absent=beside, shapes={"key_screen": [0, 2, 16 * 72]}),
    )
    found = launches(given)
    assert [name for name, _ in found][:3] == ["write_screened_cache", "decode_screen", "decode_survivors"]
    for _, values in found[:3]:
        assert values["key_screen"] == str(given["addresses"]["key_screen"])
        assert values["key_shift"] == str(given["addresses"]["key_shift"])
    assert not [event for event in given["events"] if event.startswith("copy ")]
    assert [name for name, _ in launches(none)][:2] == ["write_cache", "decode_observe"]


def test_every_attribute_reaches_the_kernels(run):
    attributes = {
        "scale": 0.25,
        "alpha": 1.25,
        "softcap": 30.0,
        "window": 7,
        "entropy_threshold": 0.75,
        "causal": 0,
        "stats_columns": 5,
        "temperature_coefficients": [0.5, -2.0],
    }
    entmax, adaptive = run(Step("entmax", attributes=attributes), Step("adaptive_softmax", attributes=attributes))
    expected = {"scale": 0.25, "alpha": 1.25, "softcap": 30.0, "window": 7, "entropy_threshold": 0.75, "causal": 0}
    expected |= dict.fromkeys(("t0", "t1", "t2", "t3", "t4", "t5"), 0) | {"t6": 0.5, "t7": -2.0}
    expected |= {"columns": 5, "tokens": 20, "sequences": 2, "q_heads": 4, "kv_heads": 2, "max_blocks": 20}
    seen = set()
    for _, values in launches(entmax) + launches(adaptive):
        for name in set(values) & set(expected):
            assert float(values[name]) == expected[name], name
            seen.add(name)
    assert seen == set(expected)


def test_every_normalizer_has_its_own_kernels(run):
    results = run(*(Step(normalizer, absent=["alibi_slopes"]) for normalizer in NORMALIZERS))
    loaded = {}
    for normalizer, result in zip(NORMALIZERS, results, strict=True):
        loaded[normalizer] = [name for name, _ in launches(result)]
    solving = ["write_cache", "decode_observe", "decode_solve", "decode_settled", "merge", "prefill"]
    streaming = ["write_cache", "decode_stream", "merge", "prefill"]
    assert loaded == {name: solving if name in ("entmax", "adaptive_softmax") else streaming for name in NORMALIZERS}


def test_types_of_queries_and_caches(run):
    pairs = [("float32", "float32"), ("float16", "float16"), ("float32", "int8"), ("float16", "fp8")]
    results = run(*(Step(dtype=dtype, cache_dtype=cache, in_place=False) for dtype, cache in pairs))
    copied = [int(result["events"][0].split("bytes=")[1].split()[0]) for result in results]
    assert copied == [9 * 2 * 64 * 16 * size for size in (4, 2, 1, 1)]
    # The package of these tests has no such kernels. The message shows which kernel is requested.
    pairs = [("float32", "float16"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
    for (dtype, cache), result in zip(
        pairs, run(*(Step(dtype=dtype, cache_dtype=cache) for dtype, cache in pairs), fails=True), strict=True
    ):
        assert f"PagedAttention: libsharp_cuda.so has no kernel write_cache {dtype} {cache} 64 64 16" in result["error"]


SCALED = ("key_cache", "value_cache", "key_scale", "value_scale")


@pytest.mark.parametrize(("dtype", "cache"), [("float32", "int8"), ("float16", "fp8")])
def test_a_cache_and_its_scales_are_updated_in_place(run, dtype, cache):
    in_place, apart = run(*(Step(dtype=dtype, cache_dtype=cache, in_place=bound) for bound in (True, False)))
    assert [name for name, _ in launches(in_place)] == ["write_scaled_cache", "decode_stream", "merge", "prefill"]
    assert not [event for event in in_place["events"] if event.startswith("copy ")]
    addresses = apart["addresses"]
    sizes = [9 * 2 * 64 * 16] * 2 + [9 * 2 * 4] * 2
    assert [event for event in apart["events"] if event.startswith("copy ")] == [
        f"copy to={addresses[f'{name}_out']} from={addresses[name]} bytes={size} stream=77"
        for name, size in zip(SCALED, sizes, strict=True)
    ]
    for result in (in_place, apart):
        seen = set()
        for _, values in launches(result):
            for name in set(values) & set(SCALED):
                assert values[name] == str(result["addresses"][f"{name}_out"]), name
                seen.add(name)
        assert seen == set(SCALED)


def test_without_collect_stats_a_flag_in_scratch_memory_is_cleared(run):
    absent, empty = run(Step(), Step(absent=["head_params"], shapes={"alibi_slopes": [0], "collect_stats": [0]}))
    for result in (absent, empty):
        [cleared] = [event for event in result["events"] if event.startswith("set ")]
        flag = cleared.split()[1].removeprefix("to=")
        assert cleared == f"set to={flag} value=0 bytes=1" and int(flag) not in result["addresses"].values()
        for _, values in launches(result):
            assert values.get("collect_stats", flag) == flag
            assert values.get("alibi_slopes", "0") == "0"


def test_a_step_without_tokens_launches_nothing(run):
    [result] = run(Step(tokens=0))
    assert result["events"] == []


WRONG = [
    (Step(shapes={"key": [20, 3, 64]}), "key has shape [20, 3, 64]; kv_heads must divide q_heads, 4"),
    (Step(shapes={"query_start": [5]}), "query_start has shape [5]; it must be [sequences + 1] = [3]"),
    (Step("ssa"), "ssa needs head_params [q_heads, 2]"),
    (
        Step("ssa", absent=[], shapes={"head_params": [4, 1]}),
        "head_params has 1 columns; ssa takes 2 (b, n) or 3 (the sink behind them)",
    ),
    (
        Step(shapes={"key_scale": [9, 2]}),
        "key_scale has shape [9, 2]; it must be left out; only int8 and fp8 caches have scales",
    ),
    (
        Step(dtype="float32", cache_dtype="int8", shapes={"value_scale": [9, 1]}),
        "value_scale has shape [9, 1]; it must be [blocks, kv_heads] = [9, 2]",
    ),
    (
        Step(dtype="float32", cache_dtype="int8", in_place=False, absent=[*OPTIONAL, "key_scale"]),
        "key_scale is missing; an int8 or fp8 cache needs it",
    ),
    (
        Step(dtype="float32", cache_dtype="int8", absent=[*OPTIONAL, "value_scale_out"]),
        "value_scale is given, but the node has no output value_scale_out; it needs both",
    ),
    (
        Step("adaptive_softmax", attributes={"scale": 1.0, "temperature_coefficients": [1.0] * 9}),
        "attribute temperature_coefficients has 9 numbers; it must have 1 to 8",
    ),
]


def test_what_cannot_be_launched_is_said_in_a_sentence(run):
    results = run(*(step for step, _ in WRONG), fails=True)
    for (_, words), result in zip(WRONG, results, strict=True):
        assert words in result["error"].partition("PagedAttention: ")[2]
        assert not launches(result)


def test_a_session_of_the_cpu_computes_as_before(libraries):
    # A wheel for GPUs works on a machine without one, under an ONNX Runtime without CUDAExecutionProvider.
    case = make_case("ssa", Shape(sequences=((33, 3), (0, 1)), head_dim=8, value_dim=8))
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(libraries / "libsharp_ops.so"))
    session = onnxruntime.InferenceSession(
        make_model(case).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    expected = run_reference(case)
    actual = type(expected)(*session.run(None, case.inputs))
    assert np.isfinite(actual.output).all()
    assert_agrees(actual, expected, case)


def test_without_the_kernels_there_is_no_cuda_op(libraries, tmp_path):
    # The wheel for CPUs has the same libsharp_ops.so and no libsharp_cuda.so.
    for library in (library_path("onnxruntime"), libraries / "libsharp_cuda.so"):
        shutil.copy(library, tmp_path)
    script = (
        "import onnxruntime, sys; onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[1]);"
        "print('libsharp_cuda.so' in open('/proc/self/maps').read())"
    )
    command = [sys.executable, "-c", script, tmp_path / "libsharp_ops.so"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
    (tmp_path / "libsharp_cuda.so").unlink()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_cuda_provider_takes_the_node_and_replays_it_as_a_graph(libraries, cuda_provider):
    plain = Step("ssa", absent=[], provider="cuda", runs=2)
    copying = Step("entmax", provider="cuda", in_place=False)
    graph = Step("adaptive_softmax", provider="cuda", graph=True, runs=3)
    plain, copying, graph = make_steps(libraries, [plain, copying, graph], environment=cuda_provider)

    # Memory of the device is allocated once, nothing is copied to or from the host, and the op never waits. The two
    # waits are those of the session around the op.
    kinds = [[event.partition(" ")[0] for event in run] for run in plain["runs"]]
    happened = [[kind for kind in run if kind in ("allocate", "wait")] for run in kinds]
    assert happened == [["allocate", "wait", "wait"], ["wait", "wait"]]
    assert not [event for run in plain["runs"] for event in run if event.startswith("copy ")]
    for _, values in launches(plain):
        assert values["stream"] not in ("0", "77")
        for name in set(values) & set(plain["addresses"]):
            assert values[name] == str(plain["addresses"][name]), name

    assert len([event for event in copying["events"] if event.startswith("copy to=")]) == 2

    # The first run warms up, and is captured and replayed. Later runs launch only the graph.
    first, second, third = graph["runs"]
    assert "capture" in first and "replay" in first
    assert not [event for event in first if event.endswith("while capturing")]
    assert second == third == ["replay", "wait"]
