"""Faults in an engine that runs a random load, and the invariants that hold after each fault."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from sharp.core.manifest import Manifest
from sharp.serving import SamplingParams
from sharp.serving.api.errors import AlreadyExistsError, QueueFullError
from sharp.serving.api.events import Delta, Event, Failed, Finished
from sharp.serving.backends import DecoderBackend, StepOutput
from sharp.serving.config import EngineConfig
from sharp.serving.engine import engine as engine_module
from sharp.serving.engine import step as step_module
from sharp.serving.engine.block_manager import BlockManager
from sharp.serving.engine.engine import Engine
from sharp.serving.engine.scheduler import Scheduler
from sharp.serving.engine.sequence import Sequence
from sharp.serving.text.stop_condition import StopCondition
from sharp.serving.text.tokenizer import Tokenizer
from tests.serving.running_engine import prepared

CONFIG = EngineConfig(
    max_batch_tokens=9, max_sequences=4, attention_interval=1, speculative_tokens=2, max_waiting_requests=8
)
BLOCKS = 12  # 12 blocks of 4 tokens are so few that sequences are preempted
MOST_STEPS = 2000


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        target: The object and the name of the function that fails. The object `backend` is the engine's own.
        error: The exception that the function raises, or None.
        output: A function that changes the output of the backend's step, where there is no error.
        most_lost: The most requests that the fault may fail. None means all requests of one step.
    """

    target: tuple[Any, str]
    error: BaseException | None = None
    output: Callable[[StepOutput], StepOutput] | None = None
    most_lost: int | None = None


def _logits(change: Callable[[np.ndarray], None]) -> Callable[[StepOutput], StepOutput]:
    def changed(output: StepOutput) -> StepOutput:
        logits = output.logits.copy()
        change(logits)
        return replace(output, logits=logits)

    return changed


def _fill(value: float, rows: slice) -> Callable[[StepOutput], StepOutput]:
    def fill(logits: np.ndarray) -> None:
        logits[rows] = value

    return _logits(fill)


STEP = ("backend", "step")
FAULTS = {
    "the backend raises": Fault(STEP, RuntimeError("a kernel failed")),
    "the backend has no memory": Fault(STEP, MemoryError("no memory")),
    "one row of logits is NaN": Fault(STEP, output=_fill(np.nan, slice(0, 1)), most_lost=1),
    "all logits are NaN": Fault(STEP, output=_fill(np.nan, slice(None))),
    "all logits are infinite": Fault(STEP, output=_fill(np.inf, slice(None))),
    "all logits are -infinity": Fault(STEP, output=_fill(-np.inf, slice(None))),
    "the backend returns too few rows": Fault(STEP, output=lambda output: replace(output, logits=output.logits[:0])),
    "the backend returns statistics of another size": Fault(
        STEP, output=lambda output: replace(output, stats=None if output.stats is None else output.stats[:, :0])
    ),
    "no memory for a block": Fault((BlockManager, "grow"), MemoryError()),
    "no memory for a shared block": Fault((BlockManager, "share"), MemoryError()),
    "no memory for a hash": Fault((BlockManager, "register"), MemoryError(), most_lost=1),
    "a look-up of cached blocks fails": Fault((BlockManager, "cached"), MemoryError()),
    "a sequence does not start": Fault((Sequence, "start"), MemoryError()),
    "a draft fails": Fault((Sequence, "draft"), MemoryError()),
    "the share-out of tokens fails": Fault((Scheduler, "_shares"), MemoryError()),
    "a preemption fails": Fault((Scheduler, "_preempt"), MemoryError()),
    "packing fails": Fault((step_module, "pack"), MemoryError()),
    "sampling fails": Fault((step_module, "sample"), FloatingPointError("a guide broke")),
    "logprobs fail": Fault((step_module, "sampled_logprobs"), MemoryError()),
    "logprobs of prompts fail": Fault((step_module, "prompt_logprobs"), MemoryError()),
    "draft tokens cannot be compared": Fault((step_module, "accepted_tokens"), MemoryError()),
    "statistics fail": Fault((engine_module, "AttentionRows"), MemoryError()),
    "the detokenizer fails": Fault((StopCondition, "push"), UnicodeError("half a character"), most_lost=1),
    "the rest of a text fails": Fault((StopCondition, "flush"), UnicodeError("half a character"), most_lost=1),
    "a token cannot be added": Fault((Sequence, "append"), MemoryError(), most_lost=1),
    "a sequence does not advance": Fault((Sequence, "advance"), MemoryError(), most_lost=1),
    "no memory for statistics of a request": Fault((Sequence, "observe"), MemoryError(), most_lost=1),
}


@contextmanager
def injected(fault: Fault, backend: DecoderBackend, call: int) -> Iterator[list[int]]:
    """Let the function of `fault` fail at its call number `call`; yield a list with the count of calls."""
    owner, name = fault.target
    owner = backend if owner == "backend" else owner
    original, calls = getattr(owner, name), [0]

    def failing(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] != call:
            return original(*arguments, **named)
        if fault.error is not None:
            raise fault.error
        assert fault.output is not None
        return fault.output(original(*arguments, **named))

    with mock.patch.object(owner, name, failing):
        yield calls


@dataclass(frozen=True)
class Load:
    """Requests that follow from a seed: their content, and the steps at which each arrives and is aborted."""

    requests: tuple[tuple[int, int | None, str, Any], ...]  # step of arrival, step of abortion, id, GenerateRequest

    @classmethod
    def random(cls, seed: int) -> "Load":
        """Make prompts with common starts, logprobs and statistics.

        Some requests are aborted, and some have three completions.
        """
        generator = np.random.default_rng(seed)
        starts = [generator.integers(0, 256, 16).tolist() for _ in range(2)]
        requests = []
        for number in range(7):
            start = starts[int(generator.integers(2))][: int(generator.integers(1, 17))]
            params = SamplingParams(
                temperature=float(generator.choice([0, 0.8])),
                seed=number,
                n=int(generator.choice([1, 1, 3])),
                logprobs=int(generator.choice([0, 2])) or None,
                prompt_logprobs=int(generator.choice([0, 0, 1])) or None,
                stop=("zz",),
            )
            request = prepared(
                f"r{number}",
                [*start, number],
                params,
                int(generator.integers(1, 20)),
                attention=bool(generator.integers(2)),
                priority=int(generator.integers(-1, 2)),
            )
            aborted = int(generator.integers(1, 30)) if generator.integers(4) == 0 else None
            requests.append((int(generator.integers(0, 14)), aborted, request.request_id, request))
        return cls(tuple(requests))


@dataclass
class Outcome:
    """The outcome of a load: tokens by request and completion, the end of each request, and refused requests."""

    tokens: dict[tuple[str, int], list[int]]
    ended: dict[str, str]
    steps: int


def config_of(seed: int) -> EngineConfig:
    """Return a setting with asynchronous scheduling for odd seeds, half of these without drafts.

    Drafts make asynchronous scheduling wait.
    """
    if seed % 2:
        return replace(CONFIG, async_scheduling="on", speculative_tokens=seed % 4 - 1)
    return CONFIG


def run(model: tuple[DecoderBackend, Manifest, Tokenizer], load: Load, config: EngineConfig = CONFIG) -> Outcome:
    """Run a load to its end, with the invariants checked after every step.

    Raises:
        AssertionError, RuntimeError: An invariant does not hold.
    """
    backend, manifest, tokenizer = model
    engine = Engine(backend, manifest, tokenizer, BLOCKS, config)
    outcome = Outcome({}, {}, 0)
    unfinished: dict[str, int] = {}

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Delta):
                assert event.request_id in unfinished, "a token came after the end of its request"
                outcome.tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            elif isinstance(event, Finished):
                unfinished[event.request_id] -= 1
                outcome.ended.setdefault(event.request_id, str(event.reason))
            elif isinstance(event, Failed):
                unfinished[event.request_id] = 0
                outcome.ended[event.request_id] = "failed"
            if getattr(event, "request_id", None) in unfinished and not unfinished[event.request_id]:
                del unfinished[event.request_id]

    last = max(arrival for arrival, *_ in load.requests)
    while outcome.steps <= last or engine.has_work:
        for arrival, aborted, name, request in load.requests:
            if arrival == outcome.steps:
                try:
                    engine.add(request)
                    unfinished[name] = request.params.n
                except (QueueFullError, AlreadyExistsError):
                    outcome.ended[name] = "refused"
            if aborted == outcome.steps:
                take(engine.abort(name))
        take(engine.step())
        engine.check_integrity()
        outcome.steps += 1
        assert outcome.steps < MOST_STEPS, "the engine makes no progress"
    engine.close()  # otherwise an unfinished step would run beside the next engine's step, on the same backend
    assert not unfinished, f"{unfinished} never ended"
    assert engine.blocks.free == engine.blocks.blocks, "blocks are lost"
    engine.report()
    return outcome


def check_fault(model: tuple[DecoderBackend, Manifest, Tokenizer], name: str, seed: int, call: int) -> bool:
    """Whether the fault was reached in the load of a seed; checks the requests that the fault did not hit.

    Raises:
        AssertionError, RuntimeError: An invariant does not hold, or a request that was not hit has other tokens.
    """
    fault, load = FAULTS[name], Load.random(seed)
    right = run(model, load)
    with injected(fault, model[0], call) as calls:
        found = run(model, load, config_of(seed))
    failed = {request for request, how in found.ended.items() if how == "failed"}
    assert len(failed) <= (CONFIG.max_sequences if fault.most_lost is None else fault.most_lost), failed
    aborted = {request for _, when, request, _ in load.requests if when is not None}
    for (request, index), tokens in right.tokens.items():
        if request in failed or "refused" in (right.ended[request], found.ended[request]):
            continue
        own = found.tokens.get((request, index), [])
        length = min(len(own), len(tokens)) if request in aborted else len(tokens)
        assert own[:length] == tokens[:length], f"seed {seed}, call {call}: {request} has other tokens"
    return calls[0] >= call
