"""The time per token of decoding, one sequence at a time in this process, with several models interleaved."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from sharp.core.manifest import read_manifest
from sharp.serving.api.errors import InputError
from sharp.serving.api.events import Delta
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.llm import LLM
from sharp.serving.text.tokenizer import tokenize


@dataclass(frozen=True)
class Latency:
    """The milliseconds per token of one model after a prompt of `prompt_tokens` tokens: best and median of the passes.

    `times_as_fast` compares with the first model; it is the median of the passes' ratios.
    """

    model: str
    prompt_tokens: int
    best: float
    median: float
    times_as_fast: float


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
    """Measure decoding after prompts of these lengths, with the models interleaved in every pass.

    A prompt is the beginning of `text`, or else of Python's documentation, because what sparse attention reads depends
    on the text. The prompt's keys are computed once and come from the prefix cache in every pass. Every step computes
    one token.

    The result has a row for each length and folder, all folders of the first length first. `on_pass` is called after
    each pass of a model.

    Raises:
        NotFoundError: there is no model folder.
        InputError: a folder cannot be used, a prompt is longer than a model's context, the text is too short, or all
            tokens of a completion come in one piece of text.
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
        # The prefix cache keeps the prompt's last block beside the block that is being written, hence the second block.
        # Without draft tokens, because with them the speed depends on the text: a repetition gets nine tokens a step.
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
            ratio = statistics.median(first / own for first, own in zip(times[0], found, strict=True))
            rows.append(Latency(str(folder), length, min(found), statistics.median(found), ratio))
    return rows


def _milliseconds_a_token(llm: LLM, prompt: list[int], completion_tokens: int) -> float:
    """Complete `prompt` once, and return the mean milliseconds per token between the first token and the last.

    Raises:
        InputError: all tokens came in one piece of text, so there is no time between two.
    """
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
