"""The value of sending requests with the same prompt prefix to the same server: a simulation, nothing is served.

python -m bench.routing [--replicas 1000] [--output bench/results/routing.json] [--plot bench/notes/routing.png]

Requests arrive as a Poisson process. Each begins with one of many shared prefixes, which are popular by Zipf's law,
and goes on with tokens of its own. A replica reads prompts one after the other, at a fixed speed, without what its
prefix cache has (least recently used prefixes go first), and then spends a fixed time on the completion. The time to
the first token is the wait and the reading. Rates are given as the load on the servers if no cache had anything.
"""

import bisect
import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import numpy as np

POLICIES = ("random", "least-loaded", "prefix", "bounded-prefix")
RING_POINTS = 16  # of each replica
CANDIDATES = 4
BOUND = 1.25
SLACK_SECONDS = 0.1  # so that a queue of one request does not count


@dataclass(frozen=True)
class RoutingWorkload:
    """The requests and the servers; sizes are in tokens, `tokens_per_second` is the speed at which prompts are read.

    `zipf` is the exponent of the prefixes' popularity. `cache_tokens` is the prefix cache of one replica. `load` is the
    load on the servers if no cache had anything; 1 is all that they can do.
    """

    replicas: int = 1000
    requests: int = 400_000
    prefixes: int = 20_000
    zipf: float = 1.0
    prefix_tokens: int = 2048
    own_tokens: int = 256
    tokens_per_second: float = 20_000.0
    completion_seconds: float = 0.05
    cache_tokens: int = 65_536
    load: float = 0.7


@dataclass(frozen=True)
class RoutingResult:
    """The outcome of a simulation: `hit_rate`, the share of prompt tokens that caches had, and times in seconds.

    `median` and `p99` are of the time to the first token. `busiest` is the time that the busiest replica worked, over
    the mean of all replicas.
    """

    hit_rate: float
    median: float
    p99: float
    busiest: float  # time that the busiest replica worked, over the mean


class Replica:
    """A simulated server: the time at which its work will be done, and the prefixes in its cache.

    `capacity` is the size of the cache in tokens, `worked` the seconds of work so far.
    """

    def __init__(self, capacity: int) -> None:
        self.free_at = 0.0
        self.worked = 0.0
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._capacity = self._room = capacity

    def has(self, prefix: int, tokens: int) -> bool:
        """Return whether the cache had the prefix of `tokens` tokens, and keep it as the one used last.

        A prefix that is larger than the cache is not kept. Prefixes that were not used for longest make room.
        """
        if prefix in self._cache:
            self._cache.move_to_end(prefix)
            return True
        if tokens <= self._capacity:
            self._cache[prefix] = tokens
            self._room -= tokens
            while self._room < 0:
                self._room += self._cache.popitem(last=False)[1]
        return False


class Ring:
    """Consistent hashing: the replicas that a prefix may go to, the same ones as long as they are there."""

    def __init__(self, replicas: int) -> None:
        points = [(_hash(f"replica {r} {p}"), r) for r in range(replicas) for p in range(RING_POINTS)]
        self._hashes, self._owners = zip(*sorted(points), strict=True)
        self._replicas = replicas
        self._known: dict[int, list[int]] = {}

    def candidates(self, prefix: int) -> list[int]:
        """Return the first different replicas (their indices) along the ring for a prefix, up to four."""
        if prefix not in self._known:
            at = bisect.bisect(self._hashes, _hash(f"prefix {prefix}"))
            found: dict[int, None] = {}
            while len(found) < min(CANDIDATES, self._replicas):
                found[self._owners[at % len(self._owners)]] = None
                at += 1
            self._known[prefix] = list(found)
        return self._known[prefix]


def _hash(text: str) -> int:
    """Return a 64-bit hash of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def chooser(policy: str, replicas: list[Replica], generator: random.Random) -> Callable[[int, float], int]:
    """Return a function that chooses the index of the replica for a request, given its prefix and the time in seconds.

    `policy` is one of `POLICIES`; any other name acts as the last, "bounded-prefix".
    """
    count = len(replicas)
    if policy == "random":
        return lambda _prefix, _now: generator.randrange(count)

    def less_loaded(_prefix: int, _now: float) -> int:
        """Return the less loaded of two random replicas."""
        return min(generator.randrange(count), generator.randrange(count), key=lambda index: replicas[index].free_at)

    if policy == "least-loaded":
        return less_loaded
    ring, waiting = Ring(count), _MeanWait(replicas)
    if policy == "prefix":
        return lambda prefix, _now: ring.candidates(prefix)[0]

    def bounded(prefix: int, now: float) -> int:
        """Return the first candidate with not much more to do than the mean, or else the less loaded of two."""
        limit = BOUND * waiting.mean(now) + SLACK_SECONDS
        near = (index for index in ring.candidates(prefix) if replicas[index].free_at - now <= limit)
        chosen = next(near, None)
        return less_loaded(prefix, now) if chosen is None else chosen

    return bounded


class _MeanWait:
    """The mean work in the queues, updated only now and then, because a router's knowledge is a little old, too."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas, self._asked, self._mean = replicas, 0, 0.0

    def mean(self, now: float) -> float:
        """Return the replicas' mean wait in seconds at time `now`, computed once per round of requests."""
        if self._asked % len(self._replicas) == 0:
            self._mean = sum(max(0.0, replica.free_at - now) for replica in self._replicas) / len(self._replicas)
        self._asked += 1
        return self._mean


def simulate(workload: RoutingWorkload, policy: str, seed: int = 0) -> RoutingResult:
    """Let the requests of `workload` come one after the other, under a policy of `POLICIES`, and return the outcome.

    The first fifth of the requests fills the caches and counts only for `busiest`.
    """
    generator = np.random.default_rng(seed)
    w = workload
    popularity = np.arange(1, w.prefixes + 1) ** -w.zipf
    requested = generator.choice(w.prefixes, w.requests, p=popularity / popularity.sum())
    full = (w.prefix_tokens + w.own_tokens) / w.tokens_per_second + w.completion_seconds
    arrivals = np.cumsum(generator.exponential(full / (w.load * w.replicas), w.requests))
    replicas = [Replica(w.cache_tokens) for _ in range(w.replicas)]
    choose = chooser(policy, replicas, random.Random(seed))
    first_token = np.empty(w.requests)
    hits = np.zeros(w.requests, bool)
    for number, (prefix, now) in enumerate(zip(requested.tolist(), arrivals.tolist(), strict=True)):
        replica = replicas[choose(prefix, now)]
        hits[number] = replica.has(prefix, w.prefix_tokens)
        read = (w.own_tokens + (0 if hits[number] else w.prefix_tokens)) / w.tokens_per_second
        begin = max(now, replica.free_at)
        first_token[number] = begin + read - now
        replica.free_at = begin + read + w.completion_seconds
        replica.worked += read + w.completion_seconds
    counted = slice(w.requests // 5, None)
    worked = [replica.worked for replica in replicas]
    return RoutingResult(
        hit_rate=float(hits[counted].mean()) * w.prefix_tokens / (w.prefix_tokens + w.own_tokens),
        median=float(np.median(first_token[counted])),
        p99=float(np.quantile(first_token[counted], 0.99)),
        busiest=max(worked) / (sum(worked) / len(worked)),
    )


@click.command()
@click.option("--replicas", default=RoutingWorkload.replicas, show_default=True)
@click.option("--requests", default=RoutingWorkload.requests, show_default=True)
@click.option("--loads", default="0.5,0.7,0.9,1.1,1.3", show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
@click.option("--plot", "picture", type=click.Path(path_type=Path))
def main(replicas: int, requests: int, loads: str, output: Path | None, picture: Path | None) -> None:
    """Simulate every routing policy at every load, print the outcomes, and write them to --output."""
    rows: list[dict[str, Any]] = []
    for load in map(float, loads.split(",")):
        workload = RoutingWorkload(replicas=replicas, requests=requests, load=load)
        for policy in POLICIES:
            outcome = simulate(workload, policy)
            rows.append({"policy": policy, "load": load, **{k: round(v, 4) for k, v in asdict(outcome).items()}})
            print(rows[-1], flush=True)
    common = asdict(RoutingWorkload(replicas=replicas, requests=requests))
    del common["load"]
    result = {"benchmark": "routing", "date": str(date.today()), "simulated": True, "workload": common, "rows": rows}
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if picture is not None:
        plot(rows, picture)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the hit rate and the 99th percentile of the time to the first token over the load, to the file `path`."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for policy in POLICIES:
        mine = [row for row in rows if row["policy"] == policy]
        loads = [row["load"] for row in mine]
        left.plot(loads, [100 * row["hit_rate"] for row in mine], marker="o", label=policy)
        right.plot(loads, [row["p99"] for row in mine], marker="o", label=policy)
    left.set(ylabel="prompt tokens from a cache (%)", ylim=(0, 100))
    right.set(ylabel="time to first token, 99th percentile (s)", yscale="log")
    for axes in (left, right):
        axes.set_xlabel("load, if no cache had anything")
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
