"""One client cannot keep others waiting: not by many requests, not by priorities, not by long prompts."""

import heapq
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from sharp.serving import SamplingParams
from sharp.serving.api.errors import QueueFullError
from sharp.serving.api.events import Failed, Finished
from sharp.serving.engine.block_manager import BlockHashes, BlockManager
from sharp.serving.engine.scheduler import Scheduler
from sharp.serving.engine.sequence import PRIORITY_SECONDS, Sequence
from sharp.serving.text.stop_condition import StopCondition
from tests.serving.running_engine import prepared

HONEST = 50
BLOCK = 16
UNTIL = 1000


@dataclass(frozen=True)
class Load:
    """The requests of a client: `outstanding` at any time or, with `pause`, one at a time with random pauses."""

    prompt: int
    generated: int
    outstanding: int = 1
    priority: int = 0
    pause: float = 0.0


@dataclass
class Simulation:
    """A simulation of the scheduler and its blocks, without a model.

    A step takes 1 unit of time, and more for more tokens. All times are in that unit.
    """

    fair: bool
    loads: dict[str, Load]
    blocks: int = 4096
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, until: float) -> "Simulation":
        blocks, random_ = BlockManager(self.blocks, BLOCK), random.Random(1)
        scheduler = Scheduler(blocks, 512, 64, 64)
        arrivals = [
            (random_.uniform(0, load.pause), name, turn)
            for name, load in self.loads.items()
            for turn in range(load.outstanding)
        ]
        heapq.heapify(arrivals)
        came: dict[int, float] = {}
        now, number = 0.0, 0
        while now < until:
            while arrivals and arrivals[0][0] <= now:
                when, name, _ = heapq.heappop(arrivals)
                load = self.loads[name]
                ids = [random_.randrange(1000) for _ in range(load.prompt)]
                request = prepared(f"{number}", ids, SamplingParams(temperature=0), load.generated)
                client, priority = (name, load.priority) if self.fair else ("", load.priority)
                hashes, stop = BlockHashes(b"", BLOCK), StopCondition(request.params, None, (), ids[-1])
                sequence = Sequence(request, number, 0, hashes, stop, client, priority)
                sequence.rank = (when + PRIORITY_SECONDS * sequence.priority, number)
                sequence.name = name
                came[number] = when
                scheduler.add(sequence)
                number += 1
            plan = scheduler.schedule()
            now += 1 + sum(chunk.width for chunk in plan.chunks) / 256
            for chunk in plan.chunks:
                one = chunk.sequence
                blocks.register(one.number, *one.advance(chunk.tokens))
                if chunk.samples:
                    one.token_ids.append(random_.randrange(1000))
                    if one.generated == one.request.max_new_tokens:
                        scheduler.remove(one)
                        self.seconds.setdefault(one.name, []).append(now - came[one.number])
                        rest = random_.expovariate(1 / self.loads[one.name].pause) if self.loads[one.name].pause else 0
                        heapq.heappush(arrivals, (now + rest, one.name, number + one.number))
        blocks.check_integrity()
        return self

    def p99(self) -> float:
        """Return the 99th percentile of the durations of the honest clients' completed requests."""
        honest = [seconds for name, of in self.seconds.items() if name != "greedy" for seconds in of]
        return float(np.percentile(honest, 99)) if honest else float("inf")


def honest():
    return {f"honest {number}": Load(prompt=48, generated=16, pause=400.0) for number in range(HONEST)}


@pytest.fixture(scope="module")
def alone():
    return Simulation(True, honest()).run(UNTIL).p99()


@pytest.mark.parametrize(
    "greedy",
    [
        Load(prompt=32, generated=200, outstanding=400),
        Load(prompt=32, generated=40, outstanding=200, priority=-10),
        Load(prompt=2000, generated=8, outstanding=200),
    ],
    ids=["many", "priority", "long prompts"],
)
def test_one_greedy_client_at_most_doubles_the_time_of_fifty_honest_ones(alone, greedy):
    """Beside a greedy client, honest clients' p99 is at most twice their p99 without it.

    The greedy client gets the capacity that the honest clients leave.
    """
    beside = Simulation(True, {**honest(), "greedy": greedy}).run(UNTIL)
    assert beside.p99() <= 2 * alone
    assert len(beside.seconds["greedy"]) >= 10
    unfair = Simulation(False, {**honest(), "greedy": greedy}).run(UNTIL)
    assert unfair.p99() > 3 * alone


def test_a_priority_is_heeded_among_the_requests_of_its_client_only(start_engine):
    running = start_engine(max_sequences=1)
    for name, client, priority in (
        ("low", "a", 1),
        ("urgent", "a", -10),
        ("other", "b", 10),
        ("middle", "a", 0),
    ):
        running.add(name, [1], 2, client=client, priority=priority)
    running.run()
    order = running.order()
    assert [name for name in order if name != "other"] == ["urgent", "middle", "low"]
    assert order.index("other") == 1


def test_who_waits_long_enough_goes_before_a_better_priority(start_engine, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("sharp.serving.engine.sequence.time.perf_counter", lambda: now[0])
    running = start_engine(max_sequences=1)
    running.add("running", [1], 3)
    running.step()
    running.add("old", [1], 1, priority=2**31 - 1)  # counts as priority 10
    now[0] += 10 * PRIORITY_SECONDS + 1
    running.add("new", [1], 1, priority=0)
    running.run()
    assert running.order() == ["running", "old", "new"]


@pytest.mark.parametrize("settings", [{"priorities": False}, {"fair_shares": False}])
def test_what_is_switched_off_has_no_effect(start_engine, settings):
    running = start_engine(max_sequences=1, **settings)
    for number in range(3):
        running.add(f"a{number}", [1], 1, client="a")
    running.add("b", [1], 1, client="b", priority=-1)
    running.run()
    fair = "fair_shares" not in settings
    assert running.order() == (["a0", "b", "a1", "a2"] if fair else ["b", "a0", "a1", "a2"])


def test_a_client_that_runs_less_takes_the_place_of_one_that_runs_more(start_engine):
    running = start_engine(max_sequences=4)
    for number in range(6):
        running.add(f"greedy {number}", [number], 40, client="greedy")
    running.step(3)
    running.add("honest", [100], 3, client="honest")
    running.step(6)
    assert running.order() == ["honest"]
    running.run()
    assert [running.tokens(f"greedy {number}") for number in range(6)] == [
        list(range(number + 1, number + 41)) for number in range(6)
    ]
    assert running.engine.report().preemptions >= 1


def test_blocks_are_taken_from_the_client_that_holds_most(start_engine):
    running = start_engine(blocks=8, max_sequences=8)  # 32 tokens
    for number in range(2):
        running.add(f"greedy {number}", range(8), 7, client="greedy")
    running.step()
    running.add("honest", range(50, 58), 3, client="honest")
    running.run()
    assert running.order()[0] == "honest"
    assert running.tokens("honest") == [58, 59, 60]
    assert all(len(running.tokens(f"greedy {number}")) == 7 for number in range(2))


def test_in_a_full_queue_the_client_that_waits_with_most_gives_way(start_engine):
    """If the queue is full, a request of the client with most waiting requests gives way to another client's.

    Once a single client with enough requests had all others refused.
    """
    running = start_engine(max_sequences=1, max_waiting_requests=4)
    running.add("running", [1], 6, client="greedy")
    running.step()
    for number in range(4):
        running.add(f"greedy {number}", [1], 1, client="greedy")
    with pytest.raises(QueueFullError):
        running.add("greedy 4", [1], 1, client="greedy")
    running.add("honest", [1], 1, client="honest")
    running.step()
    (failed,) = running.of(Failed)
    assert (failed.request_id, type(failed.error)) == ("greedy 3", QueueFullError)
    running.run()
    assert {finished.request_id for finished in running.of(Finished)} == {
        "running",
        "honest",
        *(f"greedy {n}" for n in range(3)),
    }
    assert running.engine.report().refused == 2


@pytest.mark.parametrize("field_", ["isolation", "cache_salt"])
def test_what_one_client_computed_another_one_does_not_find(start_engine, field_):
    running = start_engine()
    for name, salt in (("first", "a"), ("other", "b"), ("again", "a")):
        running.add(name, range(12), 1, **{field_: salt})
        running.run()
    assert running.chunks() == [[12], [12], [4]]
    assert [finished.usage.cached_tokens for finished in running.of(Finished)] == [0, 0, 8]


def test_what_a_client_can_still_tell_is_how_much_others_compute(start_engine):
    """A probe never hits blocks of another client, whatever that client sent.

    Only how much others compute can be told, because their blocks evict the blocks of the prober.
    """
    for sent, cached in ((range(100, 112), 8), (range(12), 8), (range(100, 146), 0)):
        running = start_engine(blocks=12)
        running.add("own", range(12), 1, isolation="prober")
        running.run()
        running.add("secret", sent, 1, isolation="victim")
        running.run()
        running.add("trial", range(100, 112), 1, isolation="prober")
        running.run()
        assert running.of(Finished, "trial")[0].usage.cached_tokens == 0
        running.add("probe", range(12), 1, isolation="prober")
        running.run()
        assert running.of(Finished, "probe")[0].usage.cached_tokens == cached
