"""Greedy tokens under any schedule, with preemption, prefix hits and draft tokens, are those of the PyTorch model."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharp.core.manifest import read_manifest
from sharp.models.checkpoint import load_checkpoint
from sharp.serving import LLM, SamplingParams
from sharp.serving.api.events import Delta, Failed
from sharp.serving.api.request import GenerateRequest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.engine import Engine
from tests.exporter.tiny_hugging_face import SIZES, save, tiny
from tests.full.end_to_end.commands import CHECKPOINT
from tests.serving.running_engine import prepared

SYSTEM = "The package manager installs a program together with everything that it needs to run. "
PROMPTS = [
    *(SYSTEM + end for end in ("To remove it", "The administrator", "Each file", "A user who", "Before that")),
    *("To install a package, the", "The kernel", "Network interfaces", "x" * 90, "This manual page"),
]
TOKENS = 40


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(CHECKPOINT).eval()


def test_greedy_tokens_equal_pytorch_under_pressure(export, model):
    # The cache has room for two or three of ten requests, and prompts are computed in chunks while others decode.
    config = EngineConfig(cache_tokens=272, max_batch_tokens=64, max_sequences=8, prefill_chunk_tokens=24)
    llm = LLM(export(CHECKPOINT, "ssa"), engine=config)
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        llm.model.prepare(GenerateRequest(prompt, params, request_id=str(number)))
        for number, prompt in enumerate(PROMPTS)
    ]
    completions: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for step in range(10_000):
        if step % 3 == 0 and step // 3 < len(requests):
            engine.add(requests[step // 3])
        elif not engine.has_work:
            break
        for event in engine.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Delta):
                completions[event.request_id] += event.token_ids
        engine.check_integrity()
    report = engine.report()
    assert report.preemptions > 0
    assert report.prefix_cache_hits > 0
    for request in requests:
        completion = completions[request.request_id]
        tokens = torch.tensor([[*request.prompt_ids, *completion]])
        with torch.no_grad():
            logits = model(tokens)[0]
        # Every generated token is the most likely token after all tokens before it.
        assert logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == completion
        assert len(completion) == TOKENS


STARTS = [[(7 * place + 3 * number) % 80 + 3 for place in range(40)] for number in range(2)]
REQUEST = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 20),  # the step before which the request arrives
        "prompt": st.builds(
            lambda start, cut, end: [*STARTS[start][:cut], *end],
            st.integers(0, 1),
            st.integers(0, 40),
            st.lists(st.integers(3, SIZES["vocab_size"] - 1), min_size=1, max_size=20),
        ),
        "count": st.integers(1, 36),
        "priority": st.sampled_from([0, 0, 1]),
    }
)
CONFIG = st.builds(
    EngineConfig,
    max_batch_tokens=st.integers(8, 64),
    max_sequences=st.just(8),
    prefill_chunk_tokens=st.integers(1, 32),
    speculative_tokens=st.sampled_from([0, 3, 8]),
    async_scheduling=st.sampled_from(["off", "on"]),
)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_greedy_tokens_equal_hugging_face_under_any_schedule(architecture, export, tmp_path):
    model = tiny(architecture)
    folder = export(save(model, tmp_path / architecture), "softmax")
    manifest = read_manifest(folder)
    backend = load_backend(folder, manifest, BackendConfig(threads=1))
    happened = Counter()

    @settings(max_examples=40, deadline=None)
    @given(st.lists(REQUEST, min_size=2, max_size=8), CONFIG, st.integers(6, 16))
    def check(requests, config, blocks):
        engine = Engine(backend, manifest, None, blocks, config)
        completions = [[] for _ in requests]
        step = 0
        while engine.has_work or step <= max(request["arrival"] for request in requests):
            for number, request in enumerate(requests):
                if request["arrival"] == step:
                    params = SamplingParams(temperature=0, ignore_eos=True)
                    prompt, count = tuple(request["prompt"]), request["count"]
                    engine.add(prepared(str(number), prompt, params, count, priority=request["priority"]))
            for event in engine.step():
                assert not isinstance(event, Failed)
                if isinstance(event, Delta):
                    completions[int(event.request_id)] += event.token_ids
            engine.check_integrity()
            step += 1
            assert step < 10_000, "the engine makes no progress"
        report = engine.report()
        happened.update(
            preemptions=report.preemptions, hits=report.prefix_cache_hits, right_drafts=report.accepted_tokens
        )
        for request, tokens in zip(requests, completions, strict=True):
            assert len(tokens) == request["count"]
            with torch.no_grad():
                logits = model(torch.tensor([[*request["prompt"], *tokens]])).logits[0, len(request["prompt"]) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            # The tokens are the most likely ones everywhere, but rounding may decide between two equally likely tokens.
            assert (logits.max(1).values - chosen).max() <= 1e-4 * logits.abs().max()

    check()
    assert min(happened[what] for what in ("preemptions", "hits", "right_drafts")) > 0
