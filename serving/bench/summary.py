"""The figures of a measured load by which servers are compared."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sharp.serving.bench.load import Sample

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Percentiles:
    """Mean and percentiles in milliseconds; None if nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Summary:
    """The figures of a load.

    Attributes:
        requests: the number of requests that were sent.
        completed: the number of requests that got their whole completion.
        refused: the number of requests that met a full queue, with a time to come back.
        failed: the number of requests that ended in another way.
        seconds: the time from the first arrival to the last message.
        requests_per_second: completed requests per second.
        prompt_tokens_per_second: prompt tokens of completed requests per second.
        tokens_per_second: generated tokens of completed requests per second.
        cached_share: the share of the prompts' tokens that the prefix cache had.
        time_to_first_token: from arrival to the first token.
        inter_token_latency: from one message with tokens to the next, per token of the latter.
        total: from arrival to the last token.
    """

    requests: int
    completed: int
    refused: int
    failed: int
    seconds: float
    requests_per_second: float
    prompt_tokens_per_second: float
    tokens_per_second: float
    cached_share: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    total: Percentiles


def summarize(samples: Sequence[Sample]) -> Summary:
    """Return rates, counts and percentiles of latencies of a load, from a sample per request (at least one)."""
    completed = [sample for sample in samples if sample.error is None and sample.times]
    refused = sum(sample.refused for sample in samples)
    began = min(sample.arrival for sample in samples)
    seconds = max((sample.times[-1] for sample in completed), default=began) - began
    prompts = sum(sample.prompt_tokens for sample in completed)
    between = [
        (later - earlier) / count
        for sample in completed
        for earlier, later, count in zip(sample.times, sample.times[1:], sample.counts[1:], strict=False)
    ]
    per_second = 1 / seconds if seconds else 0.0
    return Summary(
        requests=len(samples),
        completed=len(completed),
        refused=refused,
        failed=len(samples) - len(completed) - refused,
        seconds=seconds,
        requests_per_second=len(completed) * per_second,
        prompt_tokens_per_second=prompts * per_second,
        tokens_per_second=sum(sum(sample.counts) for sample in completed) * per_second,
        cached_share=sum(sample.cached_tokens for sample in completed) / prompts if prompts else 0.0,
        time_to_first_token=_percentiles([sample.times[0] - sample.arrival for sample in completed]),
        inter_token_latency=_percentiles(between),
        total=_percentiles([sample.times[-1] - sample.arrival for sample in completed]),
    )


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    """Return mean and percentiles in milliseconds of times in seconds; all None if there are no times."""
    if not seconds:
        return Percentiles(None, None, None, None)
    milliseconds = 1000 * np.array(seconds)
    return Percentiles(float(milliseconds.mean()), *map(float, np.percentile(milliseconds, PERCENTILES)))
