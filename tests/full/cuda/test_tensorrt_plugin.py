"""libsharp_trt.so, driven as by TensorRT: its registry, expression builder and the CUDA driver are fakes."""

import subprocess

import pytest

from sharp.plugins.op.schema import ATTRIBUTE_DEFAULTS, REQUIRED_ATTRIBUTES
from tests.full.cuda.plugin_driver import events, run_driver, values

ATTRIBUTES = (
    "adaptive_softmax scale=0.125 alpha=2 temperature_coefficients=-0.5,0.25,1.5 entropy_threshold=0.75 softcap=0 "
    "window=4096 causal=1 key_bound=0 stats_columns=5"
)


@pytest.fixture(scope="module")
def said(libraries):
    return run_driver("tensorrt_driver.cc", libraries)


def test_the_creators_are_found_by_name_version_and_namespace(said):
    # "Attention" stands for SharpAttention in older engines. PagedAttention has version 2 for caches with scales, and
    # version 3 with a key screen.
    names = ("Attention/1", "PagedAttention/1", "PagedAttention/2", "PagedAttention/3", "SharpAttention/1")
    assert said["creator"] == [f"{name}/ PLUGIN CREATOR_V3ONE 1.0" for name in names]
    assert said["plugin"] == [
        "PagedAttention 1 '' outputs 4",
        "PagedAttention 2 '' outputs 6",
        "PagedAttention 3 '' outputs 5",
    ]


def test_every_attribute_of_the_op_is_a_field(said):
    fields = {name for name, _ in map(str.split, said["field"])}
    others = {"plugin_namespace", "plugin_version"}  # fields of TensorRT itself
    assert fields == {*REQUIRED_ATTRIBUTES, *ATTRIBUTE_DEFAULTS} - others


def test_the_plugin_has_all_capabilities_with_aliasing(said):
    assert said["capability"] == ["PLUGIN_V3ONE_CORE 1.0", "PLUGIN_V3ONE_BUILD 2.0", "PLUGIN_V3ONE_RUNTIME 1.0"]


def test_attributes_survive_cloning_and_serialization(said):
    assert said["built"] == said["cloned"] == said["deserialized"] == [ATTRIBUTES]


def test_the_timing_cache_tells_the_smallest_difference(said):
    assert said["other"] == [ATTRIBUTES.replace("alpha=2 ", "alpha=2.00000024 ")]


def test_attributes_that_a_node_leaves_out_have_the_defaults(said):
    assert said["defaults"] == [
        "softmax scale=0.125 alpha=1.5"
        " temperature_coefficients=-0.0370000005,0.481000006,-2.29999995,4.91699982,-1.79100001"
        " entropy_threshold=0.5 softcap=0 window=-1 causal=1 key_bound=0 stats_columns=4"
    ]


def test_the_types_of_the_format_sweep(said):
    pairs = ["float32 float32", "float32 float16", "float32 bfloat16", "float16 float16", "bfloat16 bfloat16"]
    scaled = [f"14 {dtype} {cache}" for dtype in ("float32", "float16", "bfloat16") for cache in ("int8", "fp8")]
    assert said["sweep"] == [f"{count} {pair}" for count in (12, 9) for pair in pairs] + scaled
    assert said["wrong"] == [] and said["right"] == ["12", "14", "14", "16"]


def test_shapes_types_and_aliases_of_the_outputs(said):
    assert said["shapes"] == said["types"] == ["status 0"] * 3
    assert said["output"][10:] == [
        "0 float32 tokens q_heads value_dim aliases -1",
        "1 bfloat16 blocks kv_heads head_dim block_size aliases 3",
        "2 bfloat16 blocks kv_heads block_size value_dim aliases 4",
        "3 float32 tokens q_heads 5 aliases -1",
        "4 int8 blocks kv_heads bytes aliases 14",
    ]
    assert said["output"][4:10] == [
        "0 float32 tokens q_heads value_dim aliases -1",
        "1 fp8 blocks kv_heads head_dim block_size aliases 3",
        "2 fp8 blocks kv_heads block_size value_dim aliases 4",
        "3 float32 tokens q_heads 5 aliases -1",
        "4 float32 blocks kv_heads aliases 12",
        "5 float32 blocks kv_heads aliases 13",
    ]
    assert said["output"][:4] == [
        "0 float32 tokens q_heads value_dim aliases -1",
        "1 bfloat16 blocks kv_heads head_dim block_size aliases 3",
        "2 bfloat16 blocks kv_heads block_size value_dim aliases 4",
        "3 float32 tokens q_heads 5 aliases -1",
    ]


def test_a_step_updates_the_caches_in_place(said):
    assert said["aliased"][:2] == ["shape 0", "enqueue 0"]
    launches = events(said["aliased"])
    functions = ("write_cache", "decode_observe", "decode_solve", "decode_settled", "merge", "prefill")
    assert [event.split()[1] for event in launches] == [f"{name}@sm_90a" for name in functions]
    for event in launches:
        passed = values(event)
        assert passed["stream"] == "55"
        for name, number in {"query": 1, "key": 2, "value": 3, "key_cache": 4, "value_cache": 5, "output": 101}.items():
            assert passed.get(name, str(4096 * number)) == str(4096 * number)
        assert passed.get("collect_stats", str(4096 * 12)) == str(4096 * 12)
        assert passed.get("stats", str(4096 * 104)) == str(4096 * 104)
        # Empty tensors stand for absent inputs.
        assert passed.get("alibi_slopes", "0") == passed.get("head_params", "0") == "0"
        assert int(passed.get("sums", 1 << 30)) < (1 << 30) + int(said["workspace"][0])


def test_without_aliasing_the_caches_are_copied_first(said):
    assert said["copied"][:2] == ["shape 0", "enqueue 0"]
    first, second, *launches = events(said["copied"])
    size = 100 * 2 * 64 * 16 * 2
    assert first == f"copy to={4096 * 102} from={4096 * 4} bytes={size} stream=55"
    assert second == f"copy to={4096 * 103} from={4096 * 5} bytes={size} stream=55"
    assert values(launches[0])["key_cache"] == str(4096 * 102)
    assert values(launches[-1])["value_cache"] == str(4096 * 103)
    assert len(launches) == 6


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_cache_of_8_bits_is_updated_with_its_scales(said, cache):
    assert said[cache] == ["configure 0"]
    assert said[f"{cache}-aliased"][:2] == said[f"{cache}-copied"][:2] == ["shape 0", "enqueue 0"]
    launches = events(said[f"{cache}-aliased"])
    assert len(launches) == 6
    addresses = {"key_cache": 4, "value_cache": 5, "key_scale": 13, "value_scale": 14}
    written = values(launches[0])
    assert {name: written[name] for name in addresses} == {name: str(4096 * at) for name, at in addresses.items()}
    for event in launches:
        assert all(values(event).get(name, str(4096 * at)) == str(4096 * at) for name, at in addresses.items())
    *copies, written = events(said[f"{cache}-copied"])[:5]
    sizes = [100 * 2 * 64 * 16] * 2 + [100 * 2 * 4] * 2
    assert copies == [
        f"copy to={4096 * to} from={4096 * source} bytes={size} stream=55"
        for to, source, size in zip((102, 103, 105, 106), addresses.values(), sizes, strict=True)
    ]
    assert [values(written)[name] for name in addresses] == [str(4096 * to) for to in (102, 103, 105, 106)]
    # While TensorRT builds, all outputs are zeros.
    outputs = [(101, 5 * 8 * 64 * 2), (102, sizes[0]), (103, sizes[0]), (104, 5 * 8 * 5 * 4)]
    outputs += [(105, sizes[2]), (106, sizes[2])]
    assert events(said[f"{cache}-building"]) == [f"set to={4096 * to} value=0 bytes={size}" for to, size in outputs]


def test_a_key_screen_is_updated_with_the_cache(said):
    assert said["screen"] == ["configure 0"]
    assert said["screen-aliased"][:2] == said["screen-copied"][:2] == ["shape 0", "enqueue 0"]
    launches = events(said["screen-aliased"])
    names = [event.split()[1].partition("@")[0] for event in launches]
    assert names[0] == "write_screened_cache" and "decode_screen" in names
    for event in (launches[0], launches[names.index("decode_screen")]):
        passed = values(event)
        assert passed["key_screen"] == str(4096 * 15) and passed.get("key_shift", str(4096 * 16)) == str(4096 * 16)
    *copies, written = events(said["screen-copied"])[:4]
    sizes = [100 * 2 * 64 * 16 * 2] * 2 + [100 * 2 * 16 * 72]
    assert copies == [
        f"copy to={4096 * to} from={4096 * source} bytes={size} stream=55"
        for to, source, size in zip((102, 103, 105), (4, 5, 15), sizes, strict=True)
    ]
    assert values(written)["key_screen"] == str(4096 * 105) and values(written)["key_shift"] == "0"
    assert events(said["screen-building"])[-1] == f"set to={4096 * 105} value=0 bytes={sizes[2]}"


def test_while_tensorrt_builds_the_outputs_are_zeros_and_no_kernel_runs(said):
    # TensorRT times plugins on made-up inputs, and a made-up query_start would let the kernels read anywhere.
    assert said["building"][:2] == said["building-copied"][:2] == ["shape 0", "enqueue 0"]
    output, stats = 5 * 8 * 64 * 2, 5 * 8 * 5 * 4
    zeros = [f"set to={4096 * 101} value=0 bytes={output}", f"set to={4096 * 104} value=0 bytes={stats}"]
    assert events(said["building"]) == zeros  # the caches are also inputs, and stay unchanged
    cache = 100 * 2 * 64 * 16 * 2
    copied = [f"set to={4096 * (102 + index)} value=0 bytes={cache}" for index in range(2)]
    assert events(said["building-copied"]) == [zeros[0], *copied, zeros[1]]


@pytest.mark.parametrize("other", ["smaller", "larger"])
def test_on_another_gpu_a_step_is_split_as_the_scratch_memory_was_sized(said, other):
    # With more multiprocessors, there would be more work items than memory for them.
    observe = values(events(said["long"])[1])
    assert observe["grid"].split(",")[0] == str(264 + 3)  # 4 programs for each of 132 multiprocessors, over 2 heads
    assert said[other] == said["long"]


def test_an_engine_of_another_compute_capability_is_refused(said):
    assert said["other-capability"] == ["1"]
    assert said["log"][0] == (
        "1 PagedAttention: the engine was built on a GPU of compute capability 9.0, and this one has 8.6; "
        "build it again here"
    )


def test_optional_inputs_reach_the_kernels(said):
    prefill = values(events(said["given"])[-1])
    assert (prefill["head_params"], prefill["alibi_slopes"], prefill["parameters"]) == (
        str(4096 * 10),
        str(4096 * 11),
        "1",
    )


def test_a_node_may_end_before_its_optional_inputs(said):
    assert said["short"][:2] == ["shape 0", "enqueue 0"]
    first, *launches = events(said["short"])
    assert first == f"set to={1 << 30} value=0 bytes=1"  # sets collect_stats to false
    assert values(launches[-1])["collect_stats"] == str(1 << 30)


def test_what_is_wrong_is_logged_in_a_sentence(said):
    assert said["refused"] == [
        "heads 1",
        "ranks 1",
        "blocks 1",
        "columns 1",
        "few 1",
        "scales 1",
        "screen 1",
        "unscaled 1",
    ]
    assert said["created"] == ["0"] * 5
    assert said["log"][1:] == [
        "1 PagedAttention: key has shape [5, 2, 64]; kv_heads must divide q_heads, 7",
        "1 PagedAttention: key_cache has shape [100, 2, 64]; it must have the dimensions "
        "[blocks, kv_heads, head_dim, block_size]",
        "1 PagedAttention: value_cache has shape [100, 2, 8, 64]; it must be [blocks, kv_heads, block_size, value_dim] "
        "= [100, 2, 16, 64]",
        "1 PagedAttention: head_params has 2 columns; adaptive_softmax takes 1 (the sink)",
        "1 PagedAttention: it has 5 inputs, but must have 9 to 12",
        "1 PagedAttention: value_scale has shape [100, 8]; it must be [blocks, kv_heads] = [100, 2]",
        "1 PagedAttention: key_screen has shape [100, 2, 1024]; it must be [blocks, kv_heads, screen_bytes] "
        "= [100, 2, 1152]",
        "1 PagedAttention: it has 12 inputs, but must have 14",
        "1 PagedAttention: attribute normalizer is 'softmin'; it must be one of softmax, ssa, adaptive_softmax, "
        "entmax, sigmoid, relu, relu2, softpick",
        "1 PagedAttention: attribute alpha is 1; it must be a finite number above 1 for entmax",
        "1 PagedAttention: attribute temperature_coefficients has 9 numbers; it must have 1 to 8",
        "1 PagedAttention: attribute scale is missing; every node must have it",
    ]
    # Without TensorRT's logger, errors go to stderr.
    assert said["stderr"] == ["Sharp: PagedAttention: there are no attributes"]


def test_only_what_tensorrt_looks_for_is_exported(libraries):
    def exported(name):
        listed = subprocess.run(["nm", "-D", "--defined-only", libraries / name], capture_output=True, text=True)
        return {line.split()[-1] for line in listed.stdout.splitlines()}

    assert exported("libsharp_trt.so") == {"getCreators", "setLoggerFinder"}
    assert all(name.startswith("sharp_cuda_") for name in exported("libsharp_cuda.so"))
    needed = subprocess.run(["readelf", "-d", libraries / "libsharp_trt.so"], capture_output=True, text=True).stdout
    assert "libnvinfer" not in needed and "libcudart" not in needed and "libcuda.so" not in needed
