"""What libsharp_cuda.so launches, written down by a fake driver, against the description that Triton's wrapper uses."""

import random
from itertools import pairwise

import pytest

from sharp.plugins.triton.options import Options, power_name
from sharp.plugins.triton.variants import Shapes, kernels, scratch
from tests.cuda.native import OTHER_SHARED, PREFILL_SHARED
from tests.cuda.process import BUFFERS, Call

MULTIPROCESSORS = 132
ADDRESSES = {name: 4096 * (index + 1) for index, name in enumerate(BUFFERS)}


def options_of(call: Call) -> Options:
    return Options(
        call.normalizer,
        call.dtype,
        call.dtype,
        call.head_dim,
        call.head_dim,
        16,
        statistics=True,
        alibi="alibi_slopes" not in call.absent,
        softcap=call.softcap != 0,
        power=power_name(call.alpha) if call.normalizer == "entmax" else "",
    )


def shapes_of(call: Call) -> Shapes:
    return Shapes(call.tokens, call.sequences, call.max_blocks, call.q_heads, call.kv_heads, MULTIPROCESSORS)


def launches(result: dict) -> list[tuple[str, dict[str, str]]]:
    """Name and values of every launch of a call that went well."""
    assert result["error"] is None, result["error"]
    lines = [event.split() for event in result["events"] if event.startswith("launch ")]
    return [(line[1], dict(word.split("=") for word in line[2:])) for line in lines]


def drawn_calls(count: int) -> list[Call]:
    draw = random.Random(7)
    calls = []
    for _ in range(count):
        normalizer = draw.choice(["softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2"])
        kv_heads = draw.choice([1, 2, 8])
        absent = [name for name in ("alibi_slopes", "collect_stats") if draw.random() < 0.5]
        calls.append(
            Call(
                normalizer,
                dtype=draw.choice(["float16", "float32"]),
                alpha=draw.choice([1.5, 2.0, 1.25]),
                softcap=draw.choice([0.0, 30.0]),
                window=draw.choice([-1, 64]),
                tokens=draw.choice([1, 2, 17, 300, 8192]),
                sequences=draw.choice([1, 3, 32]),
                max_blocks=draw.choice([1, 64, 5000]),
                q_heads=kv_heads * draw.choice([1, 4, 20]),
                kv_heads=kv_heads,
                head_dim=draw.choice([64, 128]),
                parameters=2 if normalizer == "ssa" else 0,
                absent=absent + ([] if normalizer == "ssa" else ["head_params"]),
            )
        )
    return calls


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_call_launches_what_the_variants_say(launch, capability):
    calls = drawn_calls(60)
    for call, result in zip(calls, launch(calls, capability), strict=True):
        expected = [kernel for kernel in kernels(options_of(call), capability) if kernel.needed(shapes_of(call))]
        found = launches(result)
        assert [name for name, _ in found] == [
            f"{kernel.name}@sm_{capability}{'a' * (capability >= 90)}" for kernel in expected
        ]
        for kernel, (_, values) in zip(expected, found, strict=True):
            assert values["grid"] == ",".join(map(str, kernel.grid(shapes_of(call)))), (call, kernel.name)
            assert values["threads"] == str(32 * kernel.warps)
            assert values["shared"] == str(PREFILL_SHARED if kernel.name == "prefill" else OTHER_SHARED)
            assert values["stream"] == "77"


def test_arguments_are_those_of_the_problem(launch):
    present = Call("adaptive_softmax", softcap=20.0, window=9, parameters=3, absent=[])
    [result] = launch([present])
    for _, values in launches(result):
        for name in set(values) & set(ADDRESSES):
            assert values[name] == str(ADDRESSES[name]), name
        numbers = {"tokens": 5, "sequences": 2, "q_heads": 8, "kv_heads": 2, "max_blocks": 20, "parameters": 3}
        numbers |= {"window": 9, "causal": 1, "scale": 0.125, "softcap": 20, "entropy_threshold": 0.5}
        # Two coefficients, highest power first: the polynomial's last two terms.
        numbers |= dict.fromkeys(("t0", "t1", "t2", "t3", "t4", "t5"), 0) | {"t6": 0.5, "t7": 0.25}
        for name in set(values) & set(numbers):
            assert float(values[name]) == numbers[name], name
        # What Triton hides behind a kernel's own parameters.
        assert values["global_scratch"] == values["profile_scratch"] == "0"
    assert any("t7" in values for _, values in launches(result))
    assert not any(event.startswith("set ") for event in result["events"])


def test_scratch_buffers_do_not_overlap_and_fit_the_workspace(launch):
    calls = drawn_calls(40)
    for call, result in zip(calls, launch(calls), strict=True):
        sizes = {name: 4 * count for name, count in scratch(options_of(call), shapes_of(call)).items()}
        places = {}
        for _, values in launches(result):
            places.update({name: int(values[name]) for name in sizes if sizes[name] and name in values})
        assert {"sums", "outputs"} <= set(places)
        regions = sorted((place, place + sizes[name]) for name, place in places.items())
        if "collect_stats" in call.absent:
            flag = call.workspace
            assert f"set to={flag} value=0 bytes=1" in result["events"]
            regions.insert(0, (flag, flag + 1))
        assert regions[0][0] >= call.workspace and regions[-1][1] <= call.workspace + result["bytes"]
        assert all(place % 256 == 0 for place, _ in regions)
        assert all(end <= start for (_, end), (start, _) in pairwise(regions))


def test_the_workspace_of_the_largest_call_is_enough_for_smaller_ones(launch):
    largest = Call("entmax", tokens=64, sequences=64, max_blocks=500, only="workspace")
    smaller = [
        Call("entmax", tokens=64, sequences=sequences, max_blocks=blocks, only="workspace")
        for sequences in (1, 2, 3, 5, 8, 13, 31, 63)
        for blocks in (1, 16, 17, 100, 500)
    ]
    most, *others = (result["bytes"] for result in launch([largest, *smaller]))
    assert max(others) <= most


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        (80, "sm_80"),
        (86, "sm_86"),
        (87, "sm_86"),  # the newest of the same major version that it can run
        (89, "sm_86"),
        (90, "sm_90a"),
        (100, "sm_100a"),
        (103, "compute_80"),  # sm_100a is for 10.0 only
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
    assert loaded == ["write_cache", "prefill", "decode_stream", "merge"]
    assert not [event for event in called["events"] + again["events"] if event.startswith("kernel ")]
    assert len(launches(called)) == len(launches(again)) == 4


def test_nothing_is_launched_for_nothing(launch):
    none, no_sequences = launch([Call(tokens=0), Call(tokens=3, sequences=0)])
    assert none["error"] is None and not launches(none)
    assert [name.split("@")[0] for name, _ in launches(no_sequences)] == ["write_cache"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call(head_dim=72), "has no kernel write_cache float16 float16 72 72 16 for compute capability 9.0"),
        (Call(q_heads=7), "kv_heads must divide q_heads"),
        (Call("ssa"), "ssa needs head_params"),
        (Call(shifted="key_cache"), "key_cache must lie at a multiple of 16 bytes"),
        (Call(absent=["output"]), "a buffer is null that every call needs"),
        (Call(tokens=1 << 40, sequences=1), "which is more than CUDA has"),
        (Call(workspace=0), "the workspace is null"),
        (Call(dtype="int8"), "there is no such type"),
    ],
)
def test_what_cannot_be_launched_is_said_in_a_sentence(launch, call, words):
    [result] = launch([call])
    assert words in result["error"]


def test_without_a_driver_the_library_loads_and_says_so(launch):
    [result] = launch([Call()], driver=False)
    assert "libcuda.so.1" in result["error"]
