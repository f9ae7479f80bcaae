"""A load of requests that arrive at random at a server, with the time of every message of their streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sharp.serving.api.errors import InputError, QueueFullError, SharpError

if TYPE_CHECKING:  # gRPC and numpy are not for the help of the command, which shows the defaults of `Load`
    from sharp.serving.client import AsyncClient

MOST_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Load:
    """The requests that arrive at a server.

    Attributes:
        requests: the number of requests.
        rate: arrivals a second, a Poisson process; None: all at once.
        prompt_tokens: mean tokens of a prompt.
        completion_tokens: mean tokens of a completion; each is as long as requested, whatever the model generates.
        spread: lengths are uniform between mean (1 - spread) and mean (1 + spread).
        shared_tokens: tokens that all prompts begin with.
        concurrency: most requests that are open at a time; None: no limit.
        seed: the seed of arrivals, lengths and tokens.

    Raises:
        InputError: a value cannot be used.
    """

    requests: int = 100
    rate: float | None = None
    prompt_tokens: int = 128
    completion_tokens: int = 64
    spread: float = 0.0
    shared_tokens: int = 0
    concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("requests", 1, MOST_REQUESTS),
            ("prompt_tokens", 1, MOST_REQUESTS),
            ("completion_tokens", 1, MOST_REQUESTS),
            ("shared_tokens", 0, MOST_REQUESTS),
        ):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)}; it must be from {low} to {high}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InputError(f"rate is {self.rate}; it must be above 0")
        if not 0 <= self.spread < 1:
            raise InputError(f"spread is {self.spread}; it must be at least 0 and below 1")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency is {self.concurrency}; it must be at least 1")


@dataclass
class Sample:
    """One request of a load. Times are in seconds from the start of the load.

    `arrival` is when the request was due or, in a load without a rate, when it was sent. `times` has the arrival of
    every message with tokens, and `counts` the number of its tokens. `error` says why the request failed; None if it
    did not. `refused` says that the server was full.
    """

    arrival: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False


async def run_load(client: AsyncClient, load: Load, on_end: Callable[[], None] = lambda: None) -> list[Sample]:
    """Send the requests of `load` and return their samples once all have ended; call `on_end` after each.

    A request that fails raises nothing: its sample has the error.

    Raises:
        InputError: a request does not fit the server's context.
        SharpError: no server responds.
    """
    from sharp.serving.api.events import Delta, FinishReason
    from sharp.serving.api.sampling_params import SamplingParams
    from sharp.serving.client.channel import CUT_SHORT

    info = await client.model_info()
    rng = random.Random(load.seed)  # noqa: S311 - no secret
    taken = set(info.eos_token_ids)
    vocabulary = [token for token in range(info.vocab_size) if token not in taken]
    longest = load.shared_tokens + round((load.prompt_tokens + load.completion_tokens) * (1 + load.spread))
    if longest > info.max_context:
        raise InputError(f"a request may have {longest} tokens, but the server's context is {info.max_context}")
    shared = rng.choices(vocabulary, k=load.shared_tokens)
    running = asyncio.Semaphore(load.concurrency or load.requests)
    began = time.monotonic()

    async def send(sample: Sample, prompt: list[int], completion_tokens: int) -> None:
        """Send one request, within the limit of concurrency, and record its times and tokens in `sample`."""
        async with running:
            if load.rate is None:
                sample.arrival = time.monotonic() - began
            params = SamplingParams(max_tokens=completion_tokens, ignore_eos=True, temperature=0, repetition_penalty=1)
            try:
                async for event in client.stream(prompt, params):
                    if isinstance(event, Delta):
                        sample.times.append(time.monotonic() - began)
                        sample.counts.append(len(event.token_ids))
                    elif event.reason is FinishReason.CANCELLED:
                        sample.error = CUT_SHORT
                    else:
                        sample.cached_tokens = event.usage.cached_tokens
            except SharpError as error:
                sample.error, sample.refused = str(error), isinstance(error, QueueFullError)
        on_end()

    samples, arrival = [], 0.0
    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.requests):
            if load.rate is not None:
                arrival += rng.expovariate(load.rate)
                await asyncio.sleep(began + arrival - time.monotonic())
            prompt = shared + rng.choices(vocabulary, k=_length(load.prompt_tokens, load.spread, rng))
            samples.append(Sample(arrival, len(prompt)))
            tasks.create_task(send(samples[-1], prompt, _length(load.completion_tokens, load.spread, rng)))
    return samples


def _length(mean: int, spread: float, rng: random.Random) -> int:
    """Return a random length of at least 1 token, uniform within `mean` * (1 - spread) and `mean` * (1 + spread)."""
    return max(1, round(rng.uniform(mean * (1 - spread), mean * (1 + spread))))
