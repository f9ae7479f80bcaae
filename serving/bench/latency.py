"""How long a token of decoding takes, one sequence at a time, in this process: several models, interleaved."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from sharp.plugins.manifest import read_manifest
from sharp.serving.api.errors import InputError
from sharp.serving.api.events import Delta
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.llm import LLM
from sharp.serving.text.tokenizer import tokenize


@dataclass(frozen=True)
class Latency:
    """Milliseconds a token of one model after `prompt_tokens`."""

    model: str
    prompt_tokens: int
    best: float
    median: float
    times_as_fast: float  # as the first model: the median of the passes' ratios


def measure_latency(
    folders: Sequence[Path],
    prompt_tokens: Sequence[int],
    *,
    completion_tokens: int,
    passes: int,
    text: str | None = None,
    backend: BackendConfig | None = None,
    on_pass: Callable[[], None] = lambda: None,
) -> list[Latency]:
    """Decode after prompts of these lengths, the models interleaved in every pass.

    A prompt is the beginning of `text`, of Python's documentation without it: sparse attention reads what a text makes
    it read. Its keys are computed once and come from the prefix cache in every pass. Every step computes one token.

    Raises:
        InputError: a folder cannot be used, a prompt is longer than a model's context or the text is too short.
    """
    longest = max(prompt_tokens) + completion_tokens + 1
    text = "\n".join(topics.values()) if text is None else text
    models, prompts = [], []
    for folder in folders:
        manifest = read_manifest(folder)
        if longest > manifest.max_context:
            raise InputError(
                f"{folder} has a context of {manifest.max_context} tokens, and {longest} are needed; give fewer, "
                f"or export it with --max-context {longest}"
            )
        # The prefix cache keeps the prompt's last block beside the one that is written on.
        # Draft tokens would make a model's speed that of the text it writes: one that repeats itself gets nine a step.
        engine = EngineConfig(
            cache_tokens=longest + 2 * manifest.cache.block_size, attention_interval=0, speculative_tokens=0
        )
        llm = LLM(folder, backend=backend, engine=engine)
        tokens = tokenize(text[: 16 * longest], manifest, llm.model.tokenizer)
        if len(tokens) < max(prompt_tokens):
            raise InputError(
                f"the text has {len(tokens)} tokens, and {max(prompt_tokens)} are needed; give a longer one"
            )
        models.append(llm)
        prompts.append(tokens)
    rows = []
    for length in prompt_tokens:
        times: list[list[float]] = [[] for _ in models]
        for _ in range(passes):
            for found, llm, tokens in zip(times, models, prompts, strict=True):
                found.append(_milliseconds_a_token(llm, tokens[:length], completion_tokens))
                on_pass()
        for folder, found in zip(folders, times, strict=True):
            ratio = statistics.median(first / one for first, one in zip(times[0], found, strict=True))
            rows.append(Latency(str(folder), length, min(found), statistics.median(found), ratio))
    return rows


def _milliseconds_a_token(llm: LLM, prompt: list[int], completion_tokens: int) -> float:
    """Between the first token of a completion and its last."""
    params = SamplingParams(temperature=0, max_tokens=completion_tokens + 1, ignore_eos=True)
    began, ended, tokens = 0.0, 0.0, 0
    for event in llm.stream(prompt, params):
        if isinstance(event, Delta):
            ended = time.perf_counter()
            if began:
                tokens += len(event.token_ids)
            else:
                began = ended
    if not tokens:
        raise InputError(f"all {completion_tokens + 1} tokens came in one piece of text; give more completion tokens")
    return 1e3 * (ended - began) / tokens
