"""Greedy tokens under preemption, chunked prompts and prefix hits are those of the PyTorch model."""

import pytest
import torch

from sharp.models.checkpoint import load_checkpoint
from sharp.serving import LLM, SamplingParams
from sharp.serving.config import EngineConfig
from sharp.serving.engine.events import Delta, Failed
from tests.end_to_end.commands import CHECKPOINT

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
    # Room for two or three of ten requests, and prompts in chunks while others decode.
    config = EngineConfig(cache_tokens=272, max_batch_tokens=64, max_sequences=8, prefill_chunk_tokens=24)
    llm = LLM(export(CHECKPOINT, "ssa"), engine=config)
    engine = llm._engine
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [llm.model.prepare(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)]
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for step in range(10_000):
        if step % 3 == 0 and step // 3 < len(requests):
            engine.add(requests[step // 3])
        elif not engine.has_work:
            break
        for event in engine.step():
            assert not isinstance(event, Failed)
            if isinstance(event, Delta):
                answers[event.request_id] += event.token_ids
        engine.check_integrity()
    report = engine.report()
    assert report.preemptions > 0
    assert report.prefix_cache_hits > 0
    for request in requests:
        answer = answers[request.request_id]
        tokens = torch.tensor([[*request.prompt_ids, *answer]])
        with torch.no_grad():
            logits = model(tokens)[0]
        # Every generated token is the most likely one after all that stand before it.
        assert logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == answer
        assert len(answer) == TOKENS
