"""Launches of libsharp_cuda.so, recorded by a fake driver, equal the plan that Triton's wrapper uses."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from sharp.plugins.op.attributes import HEAD_PARAMETERS, NORMALIZERS, WITHOUT_SINK
from sharp.plugins.triton.launch_plan import LaunchPlan, Shapes
from sharp.plugins.triton.launching import plan_of
from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.variants import Kernel, kernels
from tests.full.cuda.native import OTHER_SHARED, PREFILL_SHARED
from tests.full.cuda.process import ABSENT, BUFFERS, CONTIGUOUS, Call

MULTIPROCESSORS = 132
ADDRESSES = {name: 4096 * (index + 1) for index, name in enumerate(BUFFERS)}


def options_of(call: Call) -> Options:
    return Options(
        call.normalizer,
        call.dtype,
        call.cache_dtype or call.dtype,
        call.head_dim,
        call.head_dim,
        16,
        statistics=True,
        alibi="alibi_slopes" not in call.absent,
        softcap=call.softcap != 0,
        contiguous=call.contiguous,
        power=power_name(call.alpha) if call.normalizer == "entmax" else "",
        screened=call.screened,
    )


def shapes_of(call: Call) -> Shapes:
    if not call.contiguous:
        return Shapes(call.tokens, call.sequences, call.max_blocks, call.q_heads, call.kv_heads, MULTIPROCESSORS)
    tokens, blocks = call.tokens * call.sequences, -(-places_of(call) // 16)
    return Shapes(tokens, call.sequences, blocks, call.q_heads, call.kv_heads, MULTIPROCESSORS, call.new_keys)


def kernels_of(call: Call, capability: int) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels(options_of(call), capability)}


def planned(call: Call, capability: int = 90) -> LaunchPlan:
    return plan_of(options_of(call), shapes_of(call), kernels_of(call, capability))


def places_of(call: Call) -> int:
    return call.past if "past_lens" not in call.absent else call.past + call.new_keys


def launches(result: dict) -> list[tuple[str, dict[str, str]]]:
    """Return the name and values of every launch of a call that succeeded."""
    assert result["error"] is None, result["error"]
    lines = [event.split() for event in result["events"] if event.startswith("launch ")]
    return [(line[1], dict(word.split("=") for word in line[2:])) for line in lines]


def random_calls(count: int) -> list[Call]:
    rng = random.Random(7)
    calls = []
    for _ in range(count):
        normalizer = rng.choice(NORMALIZERS)
        kv_heads = rng.choice([1, 2, 8])
        absent = [name for name in ("alibi_slopes", "collect_stats") if rng.random() < 0.5]
        more = rng.random() < 0.3  # sinks, or the columns of normalizers without a sink
        own = len(HEAD_PARAMETERS.get(normalizer, ()))
        parameters = own * more if normalizer in WITHOUT_SINK else own + more
        dtypes = rng.choice(
            [("float16", ""), ("float32", ""), ("float16", "int8"), ("float32", "int8"), ("float16", "fp8")]
        )
        calls.append(
            Call(
                normalizer,
                *dtypes,
                alpha=rng.choice([1.5, 2.0, 1.25]),
                softcap=rng.choice([0.0, 30.0]),
                window=rng.choice([-1, 64]),
                tokens=rng.choice([1, 2, 17, 300, 8192]),
                sequences=rng.choice([1, 3, 32]),
                max_blocks=rng.choice([1, 64, 5000]),
                q_heads=kv_heads * rng.choice([1, 4, 20]),
                kv_heads=kv_heads,
                head_dim=rng.choice([64, 128]),
                parameters=parameters,
                screened=normalizer == "entmax" and dtypes[1] == "" and rng.random() < 0.7,
                absent=absent + ([] if parameters else ["head_params"]),
            )
        )
    return calls


FORMS = {
    "none": [*ABSENT, "past_key", "past_value", "past_lens"],
    "concatenating": [*ABSENT, "past_lens"],
    "shared": [*ABSENT],
}


def random_contiguous_calls(count: int) -> list[Call]:
    """Return random calls of op SharpAttention in all forms; half of them decode."""
    rng = random.Random(8)
    calls = []
    for call in random_calls(count):
        form = rng.choice(list(FORMS))
        changes = {
            "dtype": rng.choice(["float16", "float32"]),
            "cache_dtype": "",
            "screened": False,
            "tokens": rng.choice([1, 1, 2, 300]),
            "contiguous": True,
            "new_keys": rng.choice([0, 1, 17, 1500]),
            "past": 0 if form == "none" else rng.choice([0, 3, 5000]),
            "absent": [name for name in FORMS[form] if name not in ABSENT] + call.absent,
        }
        calls.append(replace(call, **changes))
    return calls


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_call_launches_what_the_wrapper_for_pytorch_launches(launch, capability):
    calls = random_calls(60) + random_contiguous_calls(60)
    for call, result in zip(calls, launch(calls, capability), strict=True):
        # The library takes tiles, warps and constants from the package, and the test takes them from Python.
        expected, known = planned(call, capability).launches, kernels_of(call, capability)
        found = launches(result)
        assert [name for name, _ in found] == [
            f"{step.function}@sm_{capability}{'a' * (capability >= 90)}" for step in expected
        ]
        for step, (_, values) in zip(expected, found, strict=True):
            assert values["grid"] == ",".join(map(str, step.grid)), (call, step.function)
            assert values["threads"] == str(32 * known[step.function].warps)
            assert values["shared"] == str(PREFILL_SHARED if step.function == "prefill" else OTHER_SHARED)
            assert values["stream"] == "77"
            assert values.get("stage", "0") == str(step.stage)


def test_arguments_are_those_of_the_problem(launch):
    present = Call("adaptive_softmax", "float32", "int8", softcap=20.0, window=9, parameters=1, columns=5, absent=[])
    [result] = launch([present])
    for _, values in launches(result):
        for name in set(values) & set(ADDRESSES):
            assert values[name] == str(ADDRESSES[name]), name
        numbers = {"tokens": 5, "sequences": 2, "q_heads": 8, "kv_heads": 2, "max_blocks": 20, "parameters": 1}
        numbers |= {"columns": 5}
        numbers |= {"window": 9, "causal": 1, "scale": 0.125, "softcap": 20, "entropy_threshold": 0.5}
        # Two coefficients, highest power first, are the polynomial's last two terms.
        numbers |= dict.fromkeys(("t0", "t1", "t2", "t3", "t4", "t5"), 0) | {"t6": 0.5, "t7": 0.25}
        for name in set(values) & set(numbers):
            assert float(values[name]) == numbers[name], name
        # Triton hides these parameters behind a kernel's own.
        assert values["global_scratch"] == values["profile_scratch"] == "0"
    assert any("t7" in values for _, values in launches(result))
    assert not any(event.startswith("set ") for event in result["events"])


def test_the_key_screen_takes_the_place_of_the_keys(launch):
    calls = [
        Call("entmax", "float32", tokens=2, screened=True, absent=[*ABSENT, *absent]) for absent in ([], ["key_shift"])
    ]
    for call, result in zip(calls, launch(calls), strict=True):
        found = launches(result)
        names = ["write_screened_cache", "decode_screen", "decode_survivors", "decode_solve", "decode_settled", "merge"]
        assert [name.partition("@")[0] for name, _ in found] == names
        shifted = "key_shift" not in call.absent
        for _, values in found[:3]:
            assert values["key_screen"] == str(ADDRESSES["key_screen"])
            assert values["key_shift"] == str(ADDRESSES["key_shift"] * shifted)
            assert values["shifted"] == str(int(shifted))


def test_a_key_screen_that_no_kernel_has_is_refused(launch):
    wrong = [
        (Call("softmax", screened=True), "only entmax over a cache of floats has one"),
        (Call("entmax", "float32", "int8", screened=True), "only entmax over a cache of floats has one"),
        (Call("entmax", screened=True, absent=[*ABSENT, "key_screen"]), "screened says otherwise than key_screen"),
    ]
    for (_, message), result in zip(wrong, launch([call for call, _ in wrong]), strict=True):
        assert message in result["error"]


def test_scratch_buffers_do_not_overlap_and_fit_the_workspace(launch):
    calls = random_calls(60) + [call for call in random_contiguous_calls(40) if call.tokens == 1]
    calls = [call for call in calls if call.tokens == 1 or call.sequences > 1]  # other calls are prefill only
    for call, result in zip(calls, launch(calls), strict=True):
        sizes = {name: 4 * count for name, count in planned(call).scratch.items()}
        places = {}
        for _, values in launches(result):
            places.update({name: int(values[name]) for name in sizes if sizes[name] and name in values})
        if call.contiguous:
            arrays = {"query_start": call.sequences + 1, "context_lens": call.sequences, "block_table": call.sequences}
            sizes |= {name: 4 * count for name, count in arrays.items()}
            places |= {name: int(launches(result)[0][1][name]) for name in arrays}
        assert {"sums", "outputs"} <= set(places)
        regions = sorted((place, place + sizes[name]) for name, place in places.items())
        if "collect_stats" in call.absent:
            flag = call.workspace
            assert f"set to={flag} value=0 bytes=1" in result["events"]
            regions.insert(0, (flag, flag + 1))
        assert regions[0][0] >= call.workspace and regions[-1][1] <= call.workspace + result["bytes"]
        if not call.contiguous:
            assert result["bytes"] == 256 + sum(256 * math.ceil(size / 256) for size in sizes.values())
        assert all(place % 256 == 0 for place, _ in regions)
        assert all(end <= start for (_, end), (start, _) in pairwise(regions))


@pytest.mark.parametrize(("normalizer", "tokens"), [("entmax", 64), ("adaptive_softmax", 64), ("entmax", 2048)])
def test_the_workspace_of_the_largest_call_is_enough_for_smaller_ones(launch, normalizer, tokens):
    largest = Call(normalizer, tokens=tokens, sequences=64, max_blocks=5000, only="workspace")
    smaller = [
        replace(largest, tokens=fewer, sequences=sequences, max_blocks=blocks)
        for fewer in {1, 4, 33, 64, tokens // 2, tokens}
        for sequences in (1, 2, 3, 5, 8, 13, 31, 63)
        for blocks in (1, 16, 17, 100, 500, 1000, 5000)
    ]
    most, *others = (result["bytes"] for result in launch([largest, *smaller]))
    assert max(others) <= most
    for call in smaller:
        assert 4 * sum(planned(call).scratch.values()) <= most


def attention(form: str, **changes) -> Call:
    return Call(contiguous=True, absent=FORMS[form], **changes)


def row_copies(result: dict) -> list[dict[str, str]]:
    lines = [event.split() for event in result["events"] if event.startswith("copy rows ")]
    return [dict(word.split("=") for word in line[2:]) for line in lines]


def test_keys_of_attention_are_read_where_they_lie(launch):
    plain, given = launch(
        [attention("none", new_keys=9), replace(attention("none", new_keys=9), absent=[*FORMS["none"], *CONTIGUOUS])]
    )
    for result in (plain, given):
        first, *rest = launches(result)
        assert first[1]["stored"] == "0" and first[1]["past"] == "0"
        assert all(values["key_cache"] == str(ADDRESSES["key"]) for _, values in rest)
        assert all(values["value_cache"] == str(ADDRESSES["value"]) for _, values in rest)
    # A present that the node has as an output is a copy.
    keys, values = row_copies(plain)
    assert keys["from"] == str(ADDRESSES["key"]) and keys["to"] == str(ADDRESSES["present_key"])
    assert values["from"] == str(ADDRESSES["value"]) and values["to"] == str(ADDRESSES["present_value"])
    assert not row_copies(given)


def test_a_past_is_joined_with_the_new_keys(launch):
    requested = attention("concatenating", past=40, new_keys=3, tokens=3)
    [result, unwanted] = launch(
        [requested, replace(requested, absent=[*requested.absent, "present_key", "present_value"])]
    )
    keys, values = row_copies(result)
    row = 64 * 2  # bytes of a key
    assert keys == {
        "to": str(ADDRESSES["present_key"]),
        "from": str(ADDRESSES["past_key"]),
        "bytes": str(40 * row),
        "rows": "4",  # sequences times KV heads
        "pitches": f"{40 * row},{43 * row}",
        "stream": "77",
    }
    assert values["to"] == str(ADDRESSES["present_value"]) and values["from"] == str(ADDRESSES["past_value"])
    first, second, *_ = launches(result)
    assert (first[1]["past"], first[1]["stored"], first[1]["slots"], first[1]["new_keys"]) == ("40", "1", "43", "3")
    assert second[1]["key_cache"] == str(ADDRESSES["present_key"])
    # Presents that the node leaves out lie in scratch memory.
    starts = [int(copy["to"]) for copy in row_copies(unwanted)]
    assert requested.workspace <= starts[0] and starts[0] + 4 * 43 * row <= starts[1]
    assert starts[1] + 4 * 43 * row <= requested.workspace + unwanted["bytes"]


def test_a_shared_buffer_is_written_in_place(launch):
    apart = attention("shared", past=64, new_keys=1, tokens=1)
    [result] = launch([apart])
    # the present is not the memory of the past
    assert [copy["bytes"] for copy in row_copies(result)] == [str(64 * 64 * 2)] * 2
    first = launches(result)[0][1]
    assert (first["past"], first["counted"], first["slots"]) == ("-1", "1", "64")
    assert first["past_lens"] == str(ADDRESSES["past_lens"]) and first["total_lens"] == str(ADDRESSES["total_lens"])
    [whole] = launch([replace(apart, absent=[*apart.absent, "total_lens"])])
    assert launches(whole)[0][1]["counted"] == "0"


def test_statistics_that_nobody_wants_are_not_touched(launch):
    requested = attention("none", tokens=4, new_keys=4)
    with_output, without = launch([requested, replace(requested, absent=[*FORMS["none"], "stats"])])
    cleared = f"set to={ADDRESSES['stats']} value=0 bytes={2 * 8 * 4 * 4 * 4}"
    assert cleared in with_output["events"]
    assert [event for event in without["events"] if event.startswith("set ")] == [
        f"set to={requested.workspace} value=0 bytes=1"  # a flag that turns statistics off in the kernels
    ]


def test_a_call_without_queries_or_keys_still_writes_what_it_holds(launch):
    none, no_keys, no_batch = launch(
        [attention("concatenating", tokens=0, past=4), attention("none", new_keys=0), attention("none", sequences=0)]
    )
    assert [name.split("@")[0] for name, _ in launches(none)] == ["write_present"]
    assert [name.split("@")[0] for name, _ in launches(no_keys)] == ["write_present", "prefill"]
    assert not launches(no_batch)


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        (80, "sm_80"),
        (86, "sm_86"),
        (87, "sm_86"),  # the newest image of the same major version that the device can run
        (89, "sm_86"),
        (90, "sm_90a"),
        (91, "compute_80"),  # sm_90a runs on compute capability 9.0 only
        (100, "sm_100f"),
        (103, "sm_100f"),
        (110, "compute_80"),
        (121, "compute_80"),
    ],
)
def test_the_device_decides_which_image_is_loaded(launch, capability, target):
    [result] = launch([Call()], capability)
    assert {name.split("@")[1] for name, _ in launches(result)} == {target}
    assert [event for event in result["events"] if event.startswith("shared ")] == [
        f"shared {PREFILL_SHARED} for " + next(e for e in result["events"] if "kernel prefill" in e).split(" of ")[1]
    ]


def test_kernels_are_loaded_once_and_before_the_call_when_prepared(launch):
    prepared, called, again = launch([Call(tokens=1, only="prepare"), Call(), Call(tokens=9)])
    loaded = [event.split()[1] for event in prepared["events"] if event.startswith("kernel ")]
    assert loaded == ["write_cache", "decode_stream", "merge", "prefill"]
    assert not [event for event in called["events"] + again["events"] if event.startswith("kernel ")]
    [long] = launch([Call(tokens=1, max_blocks=5000, only="prepare")])
    assert [event.split()[1] for event in long["events"] if event.startswith("kernel ")] == [*loaded, "merge_prompts"]
    # Kernels for prompts whose keys are split and for others are loaded.
    [entmax] = launch([Call("entmax", tokens=1, max_blocks=5000, only="prepare")])
    ready = {event.split()[1] for event in entmax["events"] if event.startswith("kernel ")}
    assert {"prefill", "prefill_observe", "prefill_count", "prefill_settled", "merge_prompts"} <= ready
    assert len(launches(called)) == len(launches(again)) == 4


def test_nothing_is_launched_for_nothing(launch):
    none, no_sequences = launch([Call(tokens=0), Call(tokens=3, sequences=0)])
    assert none["error"] is None and not launches(none)
    assert [name.split("@")[0] for name, _ in launches(no_sequences)] == ["write_cache"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call(head_dim=72), "has no kernel write_cache float16 float16 72 72 16 for compute capability 9.0"),
        (Call(dtype="float32", cache_dtype="float16"), "`sharp build FOLDER --backend cuda`"),
        (Call(q_heads=7), "kv_heads must divide q_heads"),
        (Call("ssa"), "ssa needs head_params [q_heads, 2]: b and n of every head"),
        (Call(columns=6), "attribute stats_columns is 6; it must be 4, or 5 with the sink's mass"),
        (Call("ssa", parameters=4, absent=[]), "ssa takes 2 (b, n) or 3 (the sink behind them)"),
        (Call(parameters=2, absent=[]), "head_params has 2 columns; softmax takes 1 (the sink)"),
        (Call("relu", parameters=2, absent=[]), "head_params has 2 columns; relu takes 1 (power) and no sink"),
        (Call("entmax", alpha=8.0), "attribute alpha is 8; it must be at most 4 for entmax on a GPU"),
        (Call(scale=-1.0), "attribute scale is -1; it must be a positive, finite number"),
        (Call(scale=0.0), "attribute scale is 0; it must be a positive, finite number"),
        (Call(shifted="key_cache"), "key_cache must lie at a multiple of 16 bytes"),
        (Call(absent=["output"]), "a buffer is null that every call needs"),
        (Call(tokens=1 << 40, sequences=1), "max_blocks * block_size and tokens must together fit 32 bits"),
        (Call(workspace=0), "the workspace is null"),
        (Call(dtype="int8"), "query must be float32, float16 or bfloat16"),
        (Call(dtype="float32", cache_dtype="int8", absent=[*ABSENT, "key_scale"]), "needs key_scale and value_scale"),
        (Call(dtype="float32", cache_dtype="fp8", absent=[*ABSENT, "key_scale"]), "needs key_scale and value_scale"),
        (Call("entmax", "float16", "fp8", screened=True), "only entmax over a cache of floats has one"),
        (attention("none", dtype="fp8"), "query must be float32, float16 or bfloat16"),
        (attention("none", dtype="int8"), "query must be float32, float16 or bfloat16"),
        (attention("none", past=5), "without past_key there is neither a capacity nor past_lens"),
        (replace(attention("concatenating", past=5), absent=[*FORMS["concatenating"], "past_value"]), "says otherwise"),
        (replace(attention("none"), absent=[*FORMS["none"], "output"]), "a buffer is null that is not empty"),
        (attention("none", sequences=70_000, tokens=1), "which is more than CUDA has"),
    ],
)
def test_what_cannot_be_launched_is_said_in_a_sentence(launch, call, words):
    [result] = launch([call])
    assert words in result["error"]


def test_without_a_driver_the_library_loads_and_says_so(launch):
    [result] = launch([Call()], driver=False)
    assert "libcuda.so.1" in result["error"]
