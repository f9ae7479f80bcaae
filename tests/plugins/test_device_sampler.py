"""The host samples tokens where no GPU sampler is found, and the log says why."""

import logging
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from sharp.core.errors import SharpError
from sharp.plugins.cuda import sampler
from sharp.plugins.doctor import machine


class Library:
    """A library that has the kernel for compute capability 9.0."""

    def __init__(self, path):
        pass

    def has_kernel(self, name, capability):
        return (name, capability) == ("sample_rows", 90)

    def prepare_sampling(self):
        pass


class Driver:
    """A driver that has no page-locked memory."""

    def __init__(self, number):
        pass

    @contextmanager
    def context(self):
        def call(function, *arguments):
            raise SharpError(f"{function}: out of memory")

        yield call


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        (90, "tokens are sampled on the host: cuMemHostAlloc: out of memory"),
        (75, "tokens are sampled on the host, as there is no kernel sample_rows for compute capability 7.5"),
    ],
)
def test_the_host_samples_instead(monkeypatch, caplog, capability, words):
    monkeypatch.setattr(sampler, "library_path", lambda runtime: f"/{runtime}")
    monkeypatch.setattr(sampler, "find_device", lambda number: SimpleNamespace(compute_capability=capability))
    monkeypatch.setattr(sampler, "Library", Library)
    monkeypatch.setattr(sampler, "Driver", Driver)
    with caplog.at_level(logging.WARNING):
        assert sampler.find_sampler(257, 0) is None
    assert words in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        (90, "the GPU's: sample_rows for compute capability 9.0 loads"),
        (75, "the host's: no kernel sample_rows for compute capability 7.5"),
    ],
)
def test_the_doctor_says_who_samples(monkeypatch, capability, words):
    monkeypatch.setattr(machine, "library_path", lambda runtime: f"/{runtime}")
    monkeypatch.setattr(machine, "find_device", lambda: SimpleNamespace(compute_capability=capability))
    monkeypatch.setattr(machine, "Library", Library)
    monkeypatch.setattr(machine, "Driver", lambda: SimpleNamespace(context=nullcontext))
    assert machine._sampler() == words


def test_the_doctor_says_why_a_library_does_not_load(monkeypatch, tmp_path):
    broken = tmp_path / "libsharp_cuda.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(machine, "library_path", lambda runtime: str(broken))
    assert machine._sampler().startswith(f"the host's: {broken} cannot be loaded: ")
