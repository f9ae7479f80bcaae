"""The device of a model is chosen on machines that have all, some or nothing of what a GPU needs."""

import logging

import pytest
from click.testing import CliRunner

from sharp.core.errors import SharpError
from sharp.core.manifest import read_manifest
from sharp.serving.api.errors import DeviceLostError, InputError
from sharp.serving.backends import cuda_provider, load_backend
from sharp.serving.backends import onnxruntime as onnxruntime_backend
from sharp.serving.backends.cuda_provider import PROVIDER, check_session, choose_device
from sharp.serving.backends.lost_device import lost_device
from sharp.serving.cli import serve
from sharp.serving.config import BackendConfig
from tests.serving.processes import PORTS


def refuse(message):
    def refusing(*_):
        raise SharpError(message)

    return refusing


@pytest.fixture
def machine(monkeypatch):
    """Return a function that fakes a machine with a GPU, without the parts that its arguments name."""

    def has(*missing):
        providers = ["CPUExecutionProvider"] if "provider" in missing else [PROVIDER, "CPUExecutionProvider"]
        monkeypatch.setattr(cuda_provider.onnxruntime, "get_available_providers", lambda: providers)
        found = refuse("libsharp_cuda.so is not built") if "library" in missing else lambda runtime: f"/{runtime}"
        monkeypatch.setattr(cuda_provider, "library_path", found)
        gpu = refuse("there is no NVIDIA driver on this machine") if "driver" in missing else lambda number: number
        monkeypatch.setattr(cuda_provider, "find_device", gpu)

    return has


def test_a_gpu_is_used_where_everything_is_there(machine):
    machine()
    assert [choose_device(device, True) for device in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "CUDA", ""])
def test_devices_that_cannot_be(device):
    with pytest.raises(InputError, match="it must be auto, cpu, cuda or cuda:N"):
        BackendConfig(device=device)


def test_the_number_of_a_gpu_reaches_the_provider(counting, machine, monkeypatch):
    machine()
    requested = []
    monkeypatch.setattr(cuda_provider, "find_device", requested.append)

    def session(path, options, providers):
        requested.extend(providers)
        raise RuntimeError("there is no GPU here")

    monkeypatch.setattr(onnxruntime_backend.onnxruntime, "InferenceSession", session)
    config = BackendConfig(threads=1, kernels=False, device="cuda:2")
    with pytest.raises(InputError, match="there is no GPU here"):
        load_backend(counting, read_manifest(counting), config)
    number, (provider, options) = requested
    assert (number, provider, options["device_id"]) == (2, PROVIDER, "2")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("provider", "has no CUDAExecutionProvider; install onnxruntime-gpu in its place"),
        ("library", r"libsharp_cuda\.so is not built"),
        ("driver", "there is no NVIDIA driver"),
    ],
)
def test_what_is_missing_is_said_and_auto_stays_on_the_cpu(machine, caplog, missing, words):
    machine(missing)
    assert choose_device("auto", True) == "cpu"
    # Only users who have ONNX Runtime's package for GPUs are warned. Others do not expect a GPU.
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["the model runs on the CPU"] * (missing != "provider")
    with pytest.raises(InputError, match=f"--device cuda cannot be used: .*{words}"):
        choose_device("cuda", True)


def test_standard_ops_need_no_library_but_have_to_be_requested(machine):
    machine("library")
    assert choose_device("cuda", kernels=False) == "cuda"
    assert choose_device("auto", kernels=False) == "cpu"


def test_products_of_float32_are_computed_in_float32(counting, machine, monkeypatch):
    machine()
    requested = []

    def session(path, options, providers):
        requested.extend(providers)
        raise RuntimeError("there is no GPU here")

    monkeypatch.setattr(onnxruntime_backend.onnxruntime, "InferenceSession", session)
    with pytest.raises(InputError, match="there is no GPU here"):
        load_backend(counting, read_manifest(counting), BackendConfig(threads=1, kernels=False, device="cuda"))
    # TensorFloat-32 is ONNX Runtime's default. With it, verification to 1e-4 would mean nothing.
    [(provider, options)] = requested
    assert (provider, options["use_tf32"]) == (PROVIDER, "0")


def test_only_an_error_that_the_device_repeats_loses_it():
    def step(check):
        with lost_device(check):
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        step(lambda: None)
    with pytest.raises(DeviceLostError, match=r"lost to this process: an illegal address.*the step failed"):
        step(refuse("an illegal address"))


def test_a_provider_that_does_not_start_is_noticed(counting):
    # ONNX Runtime itself only warns, and computes on the CPU.
    backend = load_backend(counting, read_manifest(counting), BackendConfig(threads=1, kernels=False))
    assert backend.device == "cpu"
    with pytest.raises(InputError, match="could not start its CUDAExecutionProvider; its messages above"):
        check_session(backend._session)


@pytest.mark.skipif(PROVIDER in cuda_provider.onnxruntime.get_available_providers(), reason="for machines without")
def test_the_server_says_what_is_missing_in_one_sentence(counting):

    result = CliRunner().invoke(serve, [str(counting), "--device", "cuda", "--no-kernels", *PORTS])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1].startswith("Error: --device cuda cannot be used: onnxruntime ")
    result = CliRunner().invoke(serve, [str(counting), "--device", "tpu"])
    assert (result.exit_code, result.output) == (2, "Error: device is 'tpu'; it must be auto, cpu, cuda or cuda:N\n")
