"""After any fault the engine goes on: invariants hold, every request ends, and who is not hit has its own tokens."""

import logging

import pytest

from sharp.plugins.manifest import read_manifest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig
from sharp.serving.text.tokenizer import Tokenizer
from tests.full.faults.injection import CONFIG, FAULTS, Load, injected, run

LOADS = 5
CALLS = (1, 2, 5, 13, 34)


@pytest.fixture(scope="module")
def model(hashing):
    manifest = read_manifest(hashing)
    backend = load_backend(hashing, manifest, BackendConfig(threads=1, kernels=False))
    return backend, manifest, Tokenizer(hashing / "tokenizer.json")


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_at_any_call(model, name: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)  # every fault is logged with its traceback
    fault, injections = FAULTS[name], 0
    for seed in range(LOADS):
        load = Load.random(seed)
        right = run(*model, load)
        for call in CALLS:
            with injected(fault, model[0], call) as calls:
                found = run(*model, load)
            injections += calls[0] >= call
            failed = {request for request, how in found.ended.items() if how == "failed"}
            most = CONFIG.max_sequences if fault.most_lost is None else fault.most_lost
            assert len(failed) <= most, (seed, call, failed)
            aborted = {name for _, when, name, _ in load.requests if when is not None}
            for (request, index), tokens in right.tokens.items():
                if request in failed or "refused" in (right.ended[request], found.ended[request]):
                    continue
                own = found.tokens.get((request, index), [])
                length = min(len(own), len(tokens)) if request in aborted else len(tokens)
                assert own[:length] == tokens[:length], (seed, call, request)
    assert injections >= LOADS, "the fault was hardly ever reached"
