"""`sharp plan` computes its documented formula, from archived measurements where there are some."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.serving.api.errors import InputError
from sharp.serving.capacity.cli import plan
from sharp.serving.capacity.devices import find_device, read_devices
from sharp.serving.capacity.plan import (
    ENGINE_SECONDS,
    ENGINE_STREAMS,
    FORMULA,
    WEIGHT_BYTES,
    ExpectedLoad,
    ModelFacts,
    make_plan,
)
from sharp.serving.capacity.speed import Speed, speed_of

RESULTS = Path(__file__).parents[3] / "bench" / "results"
GENERATION = json.loads((RESULTS / "generation.json").read_text())
MODEL = ModelFacts("m", 2_000_000_000, 1e9, 100_000.0, 16 * 16 * 128, 8192, "float16", None)
SPEED = Speed(1e12, 1e14, measured=False, origin="")
LOAD = ExpectedLoad(context=4096, completion_tokens=512, rate=100.0, max_sequences=64)


def run(folder, *options):
    return CliRunner().invoke(plan, [str(folder), *map(str, options)])


def test_the_formula_in_numbers():
    made = make_plan(MODEL, LOAD, 40e9, SPEED, price=2.0)
    assert made.batch == 64  # the memory would allow (36e9 - 2e9) / 409.6e6 = 83
    assert made.cache_bytes == 64 * 4096 * 100_000
    step = (2e9 + 64 * 100_000 * (3584 + 256)) / 1e12 + 1.21e-3 * 4
    assert made.step_seconds == pytest.approx(step)
    first = (2 * 1e9 * 3584 + 16 * 16 * 128 * 3584**2) / 1e14
    assert made.first_token_seconds == pytest.approx(first)
    each = 0.7 / (first + 512 * step / 64)
    assert made.requests_per_second == pytest.approx(each)
    assert made.servers == math.ceil(100 / each)
    assert made.batch_tokens_per_second == pytest.approx(64 / step)
    assert made.price_per_hour == 2.0 * made.servers
    assert made.price_per_million_tokens == pytest.approx(made.price_per_hour / (100 * 512 * 3600) * 1e6)


def test_memory_limits_the_batch_and_arithmetic_the_step():
    small = make_plan(MODEL, LOAD, 4e9, SPEED, None)
    assert small.batch == int((3.6e9 - 2e9) // (4096 * 100_000)) == 3
    assert small.memory_bytes <= 4e9
    assert small.price_per_hour is None
    slow = make_plan(MODEL, LOAD, 40e9, Speed(1e15, 1e12, measured=False, origin=""), None)
    assert slow.step_seconds == pytest.approx(2 * 1e9 * 64 / 1e12 + 1.21e-3 * 4)


def test_more_load_never_needs_fewer_servers():
    servers = [
        make_plan(MODEL, ExpectedLoad(4096, 512, rate, 64), 40e9, SPEED, None).servers
        for rate in (0.01, 1, 10, 100, 1000)
    ]
    assert servers == sorted(servers)
    assert servers[0] == 1
    assert servers[-1] > 1


@pytest.mark.parametrize(
    ("load", "memory", "message"),
    [
        (ExpectedLoad(8193, 512, 1, 64), 40e9, "context is 8193; m takes at most 8192"),
        (ExpectedLoad(512, 512, 1, 64), 40e9, "completion_tokens is 512; it must be below the context, 512"),
        (LOAD, 2.5e9, "m does not fit: weights of 2.00 GB"),
    ],
)
def test_what_cannot_be_is_one_sentence(load, memory, message):
    with pytest.raises(InputError, match=message):
        make_plan(MODEL, load, memory, SPEED, None)


def test_what_was_measured_comes_out_again():
    """The plan reproduces the archived decoding speed and first token of SmolLM2, apart from the engine's share."""
    plain = next(row for row in GENERATION["rows"] if row["runtime"] == "sharp float32")
    speed = speed_of("x86-2-cores", read_devices(None)["x86-2-cores"], "float32", None, RESULTS)
    assert speed.measured
    assert GENERATION["date"] in speed.origin
    model = ModelFacts("smollm2", plain["weight_bytes"], plain["weight_bytes"] / 4, 1.0, 0, 8192, "float32", None)
    prompt, completion = GENERATION["prompt_tokens"], GENERATION["answer_tokens"]
    made = make_plan(model, ExpectedLoad(prompt + completion, completion, 1.0, 1), 24e9, speed, None)
    assert made.first_token_seconds * 1e3 == pytest.approx(plain["first_token_ms"])
    assert made.stream_tokens_per_second == pytest.approx(plain["decode_tokens_per_second"], rel=0.06)


def test_a_step_of_many_streams_is_near_what_was_measured():
    """The planned step of 16 streams is near the step that bench/metrics.py measured.

    The plan uses measurements of one stream only.
    """
    measured = json.loads((RESULTS / "metrics.json").read_text())
    plain = next(row for row in GENERATION["rows"] if row["runtime"] == "sharp float32")
    speed = speed_of("x86-2-cores", read_devices(None)["x86-2-cores"], "float32", None, RESULTS)
    model = ModelFacts("smollm2", plain["weight_bytes"], plain["weight_bytes"] / 4, 46_080.0, 0, 8192, "float32", None)
    made = make_plan(model, ExpectedLoad(measured["context"] + 1, 1, 1.0, measured["streams"]), 24e9, speed, None)
    planned = made.step_seconds * 1e3
    assert measured["row"]["step_ms"] < planned < 1.35 * measured["row"]["step_ms"]
    page = (RESULTS.parents[1] / "docs" / "deploy.md").read_text()
    assert f"measured {measured['row']['step_ms']:.0f} ms, planned {planned:.0f}" in page


def test_constants_are_those_of_the_results():
    engine = json.loads((RESULTS / "engine_step.json").read_text())
    greedy = next(row for row in engine["rows"] if row["case"] == "greedy")
    assert (greedy["engine_ms"] / 1e3, engine["streams"]) == (ENGINE_SECONDS, ENGINE_STREAMS)
    assert f"e = {greedy['engine_ms']} ms" in FORMULA
    assert f"B/{engine['streams']}" in FORMULA
    files = (RESULTS / "precision.json", RESULTS / "precision_int4_128.json")
    sizes = {row["weights"]: row["mb"] for file in files for row in json.loads(file.read_text())["rows"]}
    for name in ("int8", "int4", "int4-128"):
        assert WEIGHT_BYTES[name] == pytest.approx(4 * sizes[name] / sizes["float32"], abs=0.01)


@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
def test_what_was_not_measured_is_called_an_estimate(quantization):
    devices = read_devices(None)
    speed = speed_of("h100-sxm", devices["h100-sxm"], "float32", quantization, RESULTS)
    assert not speed.measured
    assert "an estimate: nothing was measured on h100-sxm" in speed.origin
    assert speed.bytes_per_second == 0.6 * 3350e9
    assert speed.operations_per_second == 0.4 * 989e12 / 2
    assert "operations in float32" in speed.origin
    half = speed_of("h100-sxm", devices["h100-sxm"], "float16", quantization, RESULTS)
    assert half.operations_per_second == 0.4 * 989e12
    here = speed_of("x86-2-cores", devices["x86-2-cores"], "float32", quantization, RESULTS)
    assert here.measured
    assert not speed_of("x86-2-cores", devices["x86-2-cores"], "float32", quantization, None).measured
    # The archived file of this machine has measurements of float32 only.
    assert speed_of("epyc-2-cores", devices["epyc-2-cores"], "float32", quantization, RESULTS).measured == (
        quantization is None
    )


def test_every_device_has_a_source_and_a_date():
    for name, device in read_devices(None).items():
        assert len(device.source) > 10, name
        assert len(device.date) == len("2026-11-21")
        assert device.price_per_hour is None


def test_numbers_of_processors_are_those_of_their_cores_and_channels():
    """The operations and the bandwidth of a processor are the products that its source states."""
    sources = {
        name: (
            device,
            re.search(
                r"(\d+) cores x ([\d.]+) GHz x (\d+) operations, (\d+) channels x 8 bytes x DDR\d-(\d+)", device.source
            ),
        )
        for name, device in read_devices(None).items()
    }
    processors = {name: (device, found) for name, (device, found) in sources.items() if found is not None}
    assert {"epyc-9654", "xeon-8480+", "graviton4"} <= processors.keys()
    for name, (device, found) in processors.items():
        cores, gigahertz, operations, channels, transfers = map(float, found.groups())
        assert device.tflops == pytest.approx(cores * gigahertz * operations / 1e3, rel=0.005), name
        assert device.operations_per_second("float32") == device.tflops * 1e12
        assert device.bandwidth_gb_s == pytest.approx(channels * 8 * transfers / 1e3)
        assert device.memory_gb == 32 * channels


def test_the_command(counting, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        "[l4]\nprice_per_hour = 0.5\n"
        '[mine]\nmemory_gb = 1\nbandwidth_gb_s = 10\ntflops = 1\nsource = "an assumption"\ndate = "2026-01-01"\n'
    )
    load = ("--context", 128, "--completion-tokens", 64, "--rate", 4)
    shown = run(counting, "--gpu", "mine", *load, "--devices", own, "--price", 2)
    assert shown.exit_code == 0, shown.output
    for text in ("an estimate", "an assumption", FORMULA.splitlines()[1], "servers", "an hour"):
        assert text in shown.output
    read = run(counting, "--gpu", "l4", *load, "--devices", own, "--json")
    found = json.loads(read.output)
    assert found["plan"]["price_per_hour"] == 0.5 * found["plan"]["servers"]
    assert found["model"]["cache_bytes_per_token"] == 8.0  # a key and a value of one channel in float32
    assert found["model"]["weight_bytes"] == (counting / "model.onnx").stat().st_size
    assert "give --price" in run(counting, "--gpu", "h100", *load).output


def test_a_key_screen_is_memory_of_each_token(counting, tmp_path):
    folder = tmp_path / "screened"
    shutil.copytree(counting, folder)
    file = folder / "sharp.json"
    manifest = json.loads(file.read_text())
    manifest["cache"]["key_screens"] = [0]
    file.write_text(json.dumps(manifest))
    options = ("--gpu", "l4", "--context", 128, "--completion-tokens", 64, "--rate", 4, "--json")
    without, screened = (json.loads(run(model, *options).output)["model"] for model in (counting, folder))
    # The screen of one channel has a word of 4 integers, a scale and a distance.
    assert screened["cache_bytes_per_token"] - without["cache_bytes_per_token"] == 4 + 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "h"), "there is no device 'h'; there are: a100-sxm-80gb, h100-sxm"),
        (("--gpu", "l4", "--context", 129), "context is 129; counting takes at most 128"),
        (("--gpu", "l4", "--rate", 0), "--rate"),
        (("--gpu", "l4", "--rate", "inf"), "rate is inf; it must be above 0 and at most 1e+09 requests a second"),
        (("--gpu", "l4", "--rate", "nan"), "rate is nan; it must be above 0"),
        (("--gpu", "l4", "--price", "nan"), "price is nan; it must be a number at least 0"),
        (("--gpu", "l4", "--devices", "none.toml"), "none.toml is not a TOML file of devices"),
    ],
)
def test_wrong_options_are_one_sentence(counting, options, message):
    given = {"--gpu": "l4", "--context": 128, "--rate": 1, "--completion-tokens": 8}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    result = run(counting, *(part for pair in given.items() for part in pair))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[l4]\nmemory = 1", "l4.memory: Extra inputs are not permitted"),
        ("[mine]\nmemory_gb = 1", "mine.bandwidth_gb_s: Field required"),
        ("l4 = 1", "l4 must be a table"),
        ("[l4]\ntflops = 0", "l4.tflops: Input should be greater than 0"),
        ("[l4]\nmemory_gb = inf", "l4.memory_gb: Input should be a finite number"),
        ("[l4", "is not a TOML file of devices"),
    ],
)
def test_a_wrong_table_is_one_sentence(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_devices(tmp_path / "own.toml")


def test_damaged_results_are_one_sentence(tmp_path):
    (tmp_path / "generation.json").write_text('{"rows": []}')
    with pytest.raises(InputError, match=r"is not what bench/generation.py writes"):
        speed_of("x86-2-cores", read_devices(None)["x86-2-cores"], "float32", None, tmp_path)


def test_a_model_without_a_paged_cache_is_refused(counting, tmp_path):
    folder = tmp_path / "contiguous"
    folder.mkdir()
    for path in counting.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "sharp.json").read_text())
    manifest["cache"]["form"] = "contiguous"
    (folder / "sharp.json").write_text(json.dumps(manifest))
    result = run(folder, "--gpu", "l4", "--context", 128, "--completion-tokens", 8, "--rate", 1)
    assert result.exit_code == 2
    assert "was exported with --cache contiguous" in result.output


def test_a_device_is_found_whatever_the_case_of_its_name():
    devices = {"MyGPU": read_devices(None)["h100-sxm"]}
    assert find_device(devices, "mygpu")[0] == find_device(devices, "MyG")[0] == "MyGPU"
