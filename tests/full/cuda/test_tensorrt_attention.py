"""The plugin SharpAttention of libsharp_trt.so, driven as by TensorRT. Buffers have the addresses below."""

import pytest

from tests.full.cuda.plugin_driver import events, run_driver, values

QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, PAST_LENS, TOTAL_LENS, HEAD_PARAMS, SLOPES, FLAG = (
    4096 * number for number in range(1, 11)
)
OUTPUT, PRESENT_KEY, PRESENT_VALUE, STATS = (4096 * number for number in range(101, 105))
WORKSPACE = 1 << 30
ROW = 64 * 2  # bytes of a key or value


@pytest.fixture(scope="module")
def said(libraries):
    return run_driver("tensorrt_attention_driver.cc", libraries)


def copies(lines):
    """Return (to, from, bytes, rows, pitches) of every copy."""
    found = [values(event) for event in events(lines) if event.startswith("copy rows")]
    return [(*(int(copy[name]) for name in ("to", "from", "bytes", "rows")), copy["pitches"]) for copy in found]


def launches(lines):
    return [event for event in events(lines) if event.startswith("launch")]


def test_the_plugin_has_all_capabilities_with_aliasing(said):
    assert said["plugin"] == ["SharpAttention 1 '' outputs 4"]
    assert said["capability"] == ["PLUGIN_V3ONE_CORE 1.0", "PLUGIN_V3ONE_BUILD 2.0", "PLUGIN_V3ONE_RUNTIME 1.0"]


def test_attributes_survive_cloning_and_serialization(said):
    assert said["built"] == said["cloned"] == said["deserialized"] == said["deserialized-old"]
    assert said["built"][0].startswith("adaptive_softmax scale=0.125 alpha=2 temperature_coefficients=")


def test_the_types_of_the_format_sweep(said):
    same = [f"{dtype} {dtype}" for dtype in ("float32", "float16", "bfloat16")]
    # In every model, the tensor that stands for an absent past is float32.
    absent = ["float32 float32", "float16 float32", "float16 float16", "bfloat16 float32", "bfloat16 bfloat16"]
    forms = {"none": absent, "concatenating": same, "shared": same}
    assert said["sweep"] == [f"{form} {types}" for form, taken in forms.items() for types in taken]
    assert said["wrong"] == []


def test_shapes_and_types_of_the_outputs(said):
    assert set(said["shapes"]) == {"none 0", "concatenating 0", "shared 0"}
    keys = {"none": "new_keys", "concatenating": "past+new_keys", "shared": "past"}
    assert said["output"] == [
        line
        # Optional inputs may end early.
        for form, count in (("none", 10), ("concatenating", 10), ("shared", 10), ("none", 3), ("concatenating", 5))
        for line in (
            f"{form} {count} bfloat16 batch q_heads queries value_dim",
            f"{form} {count} bfloat16 batch kv_heads {keys[form]} head_dim",
            f"{form} {count} bfloat16 batch kv_heads {keys[form]} value_dim",
            f"{form} {count} float32 batch q_heads queries 5",
        )
    ]


def test_only_a_shared_buffer_is_aliased(said):
    shared, other = "-1 3 4 -1", "-1 -1 -1 -1"
    assert said["aliases"] == [other, other, shared, other, other]
    # A plugin knows its form only after it was configured with its inputs. Its clones then know it, too.
    assert said["unasked"] == [other]
    assert said["configured"] == said["clone"] == [shared]


def test_the_workspace_has_no_room_for_presents(said):
    bytes_of = {form: int(said[f"workspace-{form}"][0]) for form in ("none", "concatenating", "shared")}
    assert [said[f"configured-{form}"] for form in bytes_of] == [["0"]] * 3
    assert 0 < max(bytes_of.values()) < 2 * 3 * 2 * 105 * ROW


def test_without_a_past_the_keys_are_read_where_they_are(said):
    assert said["none"][:2] == ["shape 0", "enqueue 0"]
    # In the form without a past, the presents are copies of the keys and values.
    assert copies(said["none"]) == [
        (PRESENT_KEY, KEY, 5 * ROW, 6, f"{5 * ROW},{5 * ROW}"),
        (PRESENT_VALUE, VALUE, 5 * ROW, 6, f"{5 * ROW},{5 * ROW}"),
    ]
    first, prefill = map(values, launches(said["none"]))
    assert (first["key_cache"], first["value_cache"]) == (str(KEY), str(VALUE))
    passed = {"query": QUERY, "output": OUTPUT, "stats": STATS, "collect_stats": FLAG, "slots": 5}
    assert {name: int(prefill[name]) for name in passed} == passed
    # Empty tensors stand for absent inputs.
    assert prefill["head_params"] == prefill["alibi_slopes"] == first["past_lens"] == first["total_lens"] == "0"


def test_while_tensorrt_builds_the_outputs_are_zeros_and_no_kernel_runs(said):
    assert said["building"][:2] == ["shape 0", "enqueue 0"]
    assert events(said["building"]) == [
        f"set to={OUTPUT} value=0 bytes={3 * 8 * 5 * 64 * 2}",
        f"set to={STATS} value=0 bytes={3 * 8 * 5 * 5 * 4}",
    ]


def test_the_past_is_copied_before_the_new_keys(said):
    assert said["concatenating"][:2] == ["shape 0", "enqueue 0"]
    assert copies(said["concatenating"]) == [
        (PRESENT_KEY, PAST_KEY, 100 * ROW, 6, f"{100 * ROW},{105 * ROW}"),
        (PRESENT_VALUE, PAST_VALUE, 100 * ROW, 6, f"{100 * ROW},{105 * ROW}"),
    ]
    first, prefill = map(values, launches(said["concatenating"]))
    assert (first["key"], first["key_cache"], first["past"], first["slots"]) == (
        str(KEY),
        str(PRESENT_KEY),
        "100",
        "105",
    )
    assert prefill["value_cache"] == str(PRESENT_VALUE)
    assert WORKSPACE < int(prefill["query_start"]) < WORKSPACE + int(said["workspace-concatenating"][0])


def test_a_past_of_no_keys_may_have_no_memory(said):
    assert said["empty"] == said["none"]


def test_a_shared_buffer_is_updated_in_place(said):
    assert said["placed"][:2] == ["shape 0", "enqueue 0"]
    assert not copies(said["placed"])
    first, prefill = map(values, launches(said["placed"]))
    assert (first["key_cache"], first["past_lens"], first["slots"]) == (str(PAST_KEY), str(PAST_LENS), "100")
    assert prefill["value_cache"] == str(PAST_VALUE)


def test_without_aliasing_the_buffer_is_copied_first(said):
    assert said["copied"][:2] == ["shape 0", "enqueue 0"]
    assert copies(said["copied"]) == [
        (PRESENT_KEY, PAST_KEY, 100 * ROW, 6, f"{100 * ROW},{100 * ROW}"),
        (PRESENT_VALUE, PAST_VALUE, 100 * ROW, 6, f"{100 * ROW},{100 * ROW}"),
    ]
    assert values(launches(said["copied"])[-1])["key_cache"] == str(PRESENT_KEY)


def test_presents_without_memory_are_refused(said):
    # By its headers, TensorRT gives every output memory.
    assert said["unread"] == ["shape 0", "enqueue 1"]


def test_a_single_token_is_decoded(said):
    assert said["token"][:2] == ["shape 0", "enqueue 0"]
    functions = ("write_present", "decode_observe", "decode_solve", "decode_settled", "merge")
    assert [event.split()[1] for event in launches(said["token"])] == [f"{name}@sm_90a" for name in functions]
    assert all(values(event)["stream"] == "55" for event in launches(said["token"]))


def test_optional_inputs_reach_the_kernels(said):
    first, prefill = map(values, launches(said["given"]))
    assert (first["past_lens"], first["total_lens"], first["counted"]) == (str(PAST_LENS), str(TOTAL_LENS), "1")
    assert (prefill["head_params"], prefill["alibi_slopes"], prefill["parameters"]) == (
        str(HEAD_PARAMS),
        str(SLOPES),
        "1",
    )


def test_a_node_may_end_before_its_optional_inputs(said):
    assert said["short"][:2] == ["shape 0", "enqueue 0"]
    assert f"set to={WORKSPACE} value=0 bytes=1" in events(said["short"])  # sets collect_stats to false
    assert values(launches(said["short"])[-1])["collect_stats"] == str(WORKSPACE)


def test_what_is_wrong_is_logged_in_a_sentence(said):
    assert {line.split()[1] for line in said["refused"]} == {"1"}
    *sentences, kernel = said["log"]
    assert sentences == [
        "1 SharpAttention: has_presents says otherwise than the buffers",
        "1 SharpAttention: key has shape [3, 2, 5, 64]; kv_heads must divide q_heads, 7",
        "1 SharpAttention: key has shape [3, 2, 5, 32]; it must be [batch, kv_heads, new_keys, head_dim] "
        "= [3, 2, 5, 64]",
        "1 SharpAttention: value has shape [3, 2, 4, 64]; it must be [batch, kv_heads, new_keys, value_dim] "
        "= [3, 2, 5, 64]",
        "1 SharpAttention: past_key has shape [3, 2, 64]; it must have the dimensions "
        "[batch, kv_heads, capacity, head_dim]",
        "1 SharpAttention: past_key and past_value must be given together, and past_lens only with them",
        "1 SharpAttention: past_key has shape [2, 2, 100, 64]; it must be [batch, kv_heads, capacity, head_dim] "
        "= [3, 2, 100, 64]",
        "1 SharpAttention: past_value has shape [3, 2, 99, 64]; it must be [batch, kv_heads, capacity, value_dim] "
        "= [3, 2, 100, 64]",
        "1 SharpAttention: past_key and past_value must be given together, and past_lens only with them",
        "1 SharpAttention: total_lens has shape [4]; it must be [batch] = [3]",
        "1 SharpAttention: head_params has 2 columns; adaptive_softmax takes 1 (the sink)",
        "1 SharpAttention: alibi_slopes has shape [2]; it must be [q_heads] = [8]",
        "1 SharpAttention: it has 2 inputs, but must have 3 to 10",
        "1 SharpAttention: ssa needs head_params [q_heads, 2]: b and n of every head",
    ]
    assert kernel.startswith("1 SharpAttention: libsharp_cuda.so has no kernel write_present bfloat16")
