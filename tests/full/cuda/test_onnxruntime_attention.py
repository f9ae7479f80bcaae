"""`SharpAttention` on CUDAExecutionProvider, in ONNX Runtime over host memory and a fake CUDA driver."""

from dataclasses import replace

import pytest

from sharp.plugins.op.attributes import NORMALIZERS
from tests.full.cuda.steps import OPTIONAL, AttentionStep, launches, make_steps

ROW = 64 * 2  # bytes of a key in float16
PAIRS = 2 * 2  # sequences times KV heads
CACHED = ("key", "value")
FORMS = {
    "none": AttentionStep(),
    "concatenating": AttentionStep(form="concatenating"),
    "shared": AttentionStep(form="shared"),
}


@pytest.fixture(scope="module")
def run(libraries):
    return lambda *target, fails=False: make_steps(libraries, target, fails)


def row_copies(result):
    """Return the values of every copy of rows."""
    events = [event for event in result["events"] if event.startswith("copy rows ")]
    return [dict(word.split("=") for word in event.split()[2:]) for event in events]


def first_launch(result):
    """Return the values of the launch that gathers keys."""
    name, values = launches(result)[0]
    assert name == "write_present"
    return values


def assert_values(result, expected):
    """Assert that all launches have the expected values of their parameters, and that each expected value occurs."""
    seen = set()
    for _, values in launches(result):
        for name in set(values) & set(expected):
            assert values[name] == str(expected[name]), name
            seen.add(name)
    assert seen == set(expected)


def test_the_kernels_get_the_tensors_of_the_session_on_its_stream(run):
    [result] = run(AttentionStep("ssa", form="shared", counted=True, absent=[], queries=20, new_keys=20))
    addresses = result["addresses"]
    assert [name for name, _ in launches(result)] == ["write_present", "prefill"]
    given = ("query", "key", "value", "past_lens", "total_lens", *OPTIONAL, "output", "stats")
    expected = {name: addresses[name] for name in given} | {"stream": 77, "slots": 40, "past": -1, "counted": 1}
    assert_values(
        result,
        expected | {f"{name}_cache": addresses[f"past_{name}"] for name in CACHED} | {"new_keys": 20, "stored": 1},
    )
    # These arguments lie in scratch memory, not in a tensor of the node.
    for name in ("query_start", "context_lens", "block_table"):
        assert int(first_launch(result)[name]) not in addresses.values()


def test_without_a_past_keys_are_read_where_they_lie(run):
    [result] = run(FORMS["none"])
    addresses = result["addresses"]
    assert row_copies(result) == [
        {
            "to": str(addresses[f"present_{name}"]),
            "from": str(addresses[name]),
            "bytes": str(3 * ROW),
            "rows": str(PAIRS),
            "pitches": f"{3 * ROW},{3 * ROW}",
            "stream": "77",
        }
        for name in CACHED
    ]
    caches = {f"{name}_cache": addresses[name] for name in CACHED}
    assert_values(result, caches | {"past": 0, "stored": 0, "slots": 3, "counted": 0, "past_lens": 0, "total_lens": 0})


def test_a_past_and_new_keys_are_joined_in_the_present(run):
    [result] = run(FORMS["concatenating"])
    addresses = result["addresses"]
    assert [(copy["to"], copy["from"], copy["bytes"], copy["pitches"]) for copy in row_copies(result)] == [
        (str(addresses[f"present_{name}"]), str(addresses[f"past_{name}"]), str(40 * ROW), f"{40 * ROW},{43 * ROW}")
        for name in CACHED
    ]
    caches = {f"{name}_cache": addresses[f"present_{name}"] for name in CACHED}
    assert_values(result, caches | {"past": 40, "stored": 1, "slots": 43, "new_keys": 3})


def test_a_shared_buffer_is_copied_only_where_it_is_not_bound_in_place(run):
    in_place, apart = run(FORMS["shared"], replace(FORMS["shared"], in_place=False))
    assert in_place["addresses"]["present_key"] == in_place["addresses"]["past_key"]
    assert not [event for event in in_place["events"] if event.startswith("copy ")]
    assert [(copy["to"], copy["from"], copy["bytes"]) for copy in row_copies(apart)] == [
        (str(apart["addresses"][f"present_{name}"]), str(apart["addresses"][f"past_{name}"]), str(40 * ROW))
        for name in CACHED
    ]
    for result in (in_place, apart):
        assert_values(result, {f"{name}_cache": result["addresses"][f"present_{name}"] for name in CACHED})


def test_a_shared_buffer_between_nodes_is_updated_in_place_by_itself(run):
    shared = replace(FORMS["shared"], dtype="float32", in_place=False, between_nodes=True)
    [result] = run(shared)
    assert not row_copies(result)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_that_a_node_leaves_out(run, form):
    left_out = (["present_key", "present_value", "stats"], ["present_key", "present_value"], ["present_value", "stats"])
    alone, with_stats, with_key = run(*(replace(FORMS[form], absent=[*OPTIONAL, *names]) for names in left_out))
    for result in (alone, with_stats):
        # A past is then gathered in scratch memory, and new keys alone are read from their own tensor.
        targets = {int(copy["to"]) for copy in row_copies(result)}
        assert len(targets) == (0 if form == "none" else 2) and not targets & set(result["addresses"].values())
    copied = {copy["to"] for copy in row_copies(with_key)}
    # a shared buffer is updated in place
    assert (str(with_key["addresses"]["present_key"]) in copied) == (form != "shared")
    cleared = [event.split()[1] for event in with_stats["events"] if event.startswith("set ")]
    assert f"to={with_stats['addresses']['stats']}" in cleared
    for result in (alone, with_key):
        assert {values.get("stats", "0") for _, values in launches(result)} == {"0"}


def test_optional_inputs_that_are_empty_are_absent(run):
    empty = {name: [0] for name in ("past_key", "past_value", "past_lens", "total_lens", "head_params")}
    absent, standing_in, typed = run(
        AttentionStep(absent=["head_params", "alibi_slopes"]),
        # An exporter's tensor for an absent input has one type, which may not be the query's.
        AttentionStep(absent=["alibi_slopes"], shapes=empty, dtypes={"past_key": "float32", "past_value": "float32"}),
        AttentionStep(absent=["alibi_slopes"], shapes=empty),
    )
    for result in (absent, standing_in, typed):
        expected = {"past": 0, "stored": 0, "counted": 0, "past_lens": 0, "total_lens": 0, "slots": 3}
        assert_values(result, expected | {"collect_stats": result["addresses"]["collect_stats"]})


def test_types(run):
    for dtype, size in (("float16", 2), ("float32", 4)):
        [result] = run(replace(FORMS["concatenating"], dtype=dtype))
        assert {copy["bytes"] for copy in row_copies(result)} == {str(40 * 64 * size)}
    # The package of these tests has no such kernels. The message shows which kernel is requested.
    [result] = run(AttentionStep(dtype="bfloat16"), fails=True)
    words = "SharpAttention: libsharp_cuda.so has no kernel write_present bfloat16 bfloat16 64 64 16 contiguous"
    assert words in result["error"]


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
    expected = {"scale": 0.25, "alpha": 1.25, "softcap": 30, "window": 7, "entropy_threshold": 0.75, "causal": 0}
    expected |= dict.fromkeys(("t0", "t1", "t2", "t3", "t4", "t5"), 0) | {"t6": 0.5, "t7": -2}
    expected |= {"columns": 5, "tokens": 6, "sequences": 2, "q_heads": 4, "kv_heads": 2}
    results = run(*(AttentionStep(name, attributes=attributes) for name in ("entmax", "adaptive_softmax")))
    assert_values({"events": [event for result in results for event in result["events"]]}, expected)


def test_every_normalizer_decodes_and_reads_prompts(run):
    decode = AttentionStep(absent=["alibi_slopes"], form="shared", queries=1, new_keys=1)
    steps = [replace(decode, normalizer=name) for name in NORMALIZERS]
    prompts = [replace(step, queries=20, new_keys=20) for step in steps]
    results = run(*steps, *prompts)
    solving, streaming = ["decode_observe", "decode_solve", "decode_settled"], ["decode_stream"]
    for name, decoded, prompted in zip(NORMALIZERS, results, results[len(steps) :], strict=False):
        of_decode = solving if name in ("entmax", "adaptive_softmax") else streaming
        assert [found for found, _ in launches(decoded)] == ["write_present", *of_decode, "merge"]
        assert [found for found, _ in launches(prompted)] == ["write_present", "prefill"]


def test_sizes_that_are_nothing(run):
    joined, shared = FORMS["concatenating"], FORMS["shared"]
    results = run(
        replace(joined, batch=0),
        replace(joined, past=0),  # the first call of a generation
        replace(shared, past=0),
        replace(joined, queries=0),
        replace(joined, new_keys=0),
        replace(joined, new_keys=0, dtype="float32", in_place=False),
        replace(FORMS["none"], new_keys=0),
    )
    nobody, first, full, unasked, nothing_new, nothing_new32, no_keys = results
    assert not nobody["events"]
    assert_values(first, {"past": 0, "stored": 0, "slots": 3, "key_cache": first["addresses"]["key"]})
    # A buffer without slots holds no keys, so new keys are dropped.
    assert_values(full, {"past": 0, "stored": 0, "slots": 0, "new_keys": 0})
    assert [name for name, _ in launches(unasked)] == ["write_present"]
    for result in (nothing_new, nothing_new32):
        assert_values(result, {"slots": 40, "new_keys": 0, "key_cache": result["addresses"]["present_key"]})
    assert_values(no_keys, {"slots": 0, "new_keys": 0})


WRONG = [
    (AttentionStep(shapes={"query": [2, 4, 64]}), "query has shape [2, 4, 64]; it must have the dimensions [batch"),
    (AttentionStep(shapes={"key": [2, 3, 3, 64]}), "key has shape [2, 3, 3, 64]; kv_heads must divide q_heads, 4"),
    (
        AttentionStep(form="concatenating", shapes={"past_value": [2, 2, 39, 64]}),
        "past_value has shape [2, 2, 39, 64]; it must be [batch, kv_heads, capacity, value_dim] =",
    ),
    (
        AttentionStep(form="concatenating", absent=[*OPTIONAL, "past_value"]),
        "past_key and past_value must be given together, and past_lens only with them",
    ),
    (
        AttentionStep(shapes={"past_lens": [2]}),
        "past_key and past_value must be given together, and past_lens only with them",
    ),
    (AttentionStep(form="shared", shapes={"past_lens": [3]}), "past_lens has shape [3]; it must be [batch] = [2]"),
    (AttentionStep(shapes={"total_lens": [1]}), "total_lens has shape [1]; it must be [batch] = [2]"),
    (AttentionStep(absent=[], shapes={"alibi_slopes": [3]}), "alibi_slopes has shape [3]; it must be [q_heads] = [4]"),
    (AttentionStep("ssa"), "ssa needs head_params [q_heads, 2]: b and n of every head"),
    (
        AttentionStep("ssa", absent=[], shapes={"head_params": [4, 1]}),
        "head_params has 1 columns; ssa takes 2 (b, n) or 3 (the sink behind them)",
    ),
    (
        AttentionStep(form="concatenating", dtypes={"past_key": "float32", "past_value": "float32"}),
        "past_key is float32 and query is not; they must be of one type",
    ),
    (
        AttentionStep("adaptive_softmax", attributes={"scale": 1.0, "temperature_coefficients": [1.0] * 9}),
        "attribute temperature_coefficients has 9 numbers; it must have 1 to 8",
    ),
]


def test_what_cannot_be_launched_is_said_in_a_sentence(run):
    results = run(*(step for step, _ in WRONG), fails=True)
    for (_, words), result in zip(WRONG, results, strict=True):
        assert words in result["error"].partition("SharpAttention: ")[2]
        assert not launches(result)


def test_the_cuda_provider_takes_the_node_and_replays_it_as_a_graph(libraries, cuda_provider):
    plain = AttentionStep("ssa", form="shared", counted=True, absent=[], provider="cuda", runs=2)
    joining = AttentionStep("entmax", form="concatenating", provider="cuda")
    between = replace(plain, dtype="float32", in_place=False, between_nodes=True)
    standing_in = AttentionStep(
        provider="cuda",
        shapes={name: [0] for name in ("past_key", "past_value", "past_lens")},
        dtypes={"past_key": "float32", "past_value": "float32"},
    )
    graph = AttentionStep("adaptive_softmax", form="shared", queries=1, new_keys=1, provider="cuda", graph=True, runs=3)
    plain, joining, between, standing_in, graph = make_steps(
        libraries, [plain, joining, between, standing_in, graph], environment=cuda_provider
    )

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

    assert len(row_copies(joining)) == 2 and not row_copies(between)
    assert first_launch(standing_in)["stored"] == "0"

    # The first run warms up, and is captured and replayed. Later runs launch only the graph.
    first, second, third = graph["runs"]
    assert "capture" in first and "replay" in first
    assert not [event for event in first if event.endswith("while capturing")]
    assert second == third == ["replay", "wait"]
