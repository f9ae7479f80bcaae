"""An engine goes on after any fault: every request ends, and requests that are not hit keep their tokens."""

import logging

import pytest

from sharp.core.manifest import read_manifest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig
from sharp.serving.text.tokenizer import Tokenizer
from tests.full.faults.injection import FAULTS, check_fault

LOADS = 2
CALLS = (1, 2, 5, 13, 34)


@pytest.fixture(scope="module")
def model(hashing):
    manifest = read_manifest(hashing)
    backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
    return backend, manifest, Tokenizer(hashing / "tokenizer.json")


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_at_any_call(model, name: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)  # because every fault is logged with its traceback
    injections = sum(check_fault(model, name, seed, call) for seed in range(LOADS) for call in CALLS)
    assert injections >= LOADS, "the fault was hardly ever reached"
