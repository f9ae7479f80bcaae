"""The simulation of bench/notes/routing.md agrees with queueing theory, with counting, and with the page's results."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.routing import CANDIDATES, POLICIES, Replica, Ring, RoutingWorkload, simulate

ROOT = Path(__file__).parents[2]
SMALL = RoutingWorkload(replicas=40, requests=20_000, prefixes=400)
RESULTS = json.loads((ROOT / "bench" / "results" / "routing.json").read_text())
PAGE = (ROOT / "bench" / "notes" / "routing.md").read_text()


def test_without_a_cache_the_wait_is_that_of_theory():
    """Random routing without a cache makes M/D/1 queues, whose waiting times theory gives."""
    workload = replace(SMALL, requests=100_000, cache_tokens=0, load=0.5)
    outcome = simulate(workload, "random")
    assert outcome.hit_rate == 0.0
    service = 2304 / 20_000 + 0.05
    read = 2304 / 20_000
    # At a load of one half, half of the requests find an idle server.
    assert outcome.median == pytest.approx(read, abs=0.02)
    # For long t, P(wait > t) = C exp(-a t / service), with load (exp a - 1) = a and C = (1 - load) / (load exp a - 1).
    # At a load of one half a = 1.256 and C = 0.66, so one request in a hundred waits longer than ln(66) / 1.256
    # services.
    assert outcome.p99 - read == pytest.approx(service * 3.34, rel=0.1)


def test_an_endless_cache_reads_every_prefix_once_per_replica_that_sees_it():
    endless = replace(SMALL, cache_tokens=10**9, load=0.3)
    share = endless.prefix_tokens / (endless.prefix_tokens + endless.own_tokens)
    together = simulate(endless, "prefix")
    assert share * 0.97 < together.hit_rate <= share
    assert simulate(endless, "random").hit_rate < together.hit_rate


def test_policies_differ_as_they_should():
    outcomes = {policy: simulate(SMALL, policy) for policy in POLICIES}
    assert outcomes["bounded-prefix"].hit_rate > 2 * outcomes["random"].hit_rate
    assert outcomes["least-loaded"].p99 < outcomes["random"].p99
    # Routing by prefix alone sends every request with a popular prefix to one server, which is then overloaded.
    assert outcomes["prefix"].p99 > 10 * outcomes["bounded-prefix"].p99
    assert outcomes["bounded-prefix"].busiest < outcomes["prefix"].busiest
    assert simulate(SMALL, "random", seed=1) == simulate(SMALL, "random", seed=1)


def test_a_cache_gives_up_what_was_used_longest_ago():
    replica = Replica(200)
    assert [replica.has(prefix, 100) for prefix in (1, 2, 1, 3, 1, 2)] == [False, False, True, False, True, False]
    assert not replica.has(9, 201)
    assert not replica.has(9, 201)


def test_the_ring_moves_few_prefixes_when_a_replica_comes():
    before, after = Ring(50), Ring(51)
    moved = [prefix for prefix in range(2000) if before.candidates(prefix)[0] != after.candidates(prefix)[0]]
    assert len(moved) < 2000 * 3 / 51
    assert all(after.candidates(prefix)[0] == 50 for prefix in moved)
    assert len(set(before.candidates(7))) == CANDIDATES


def test_the_page_has_the_numbers_of_the_results():
    rows = re.findall(r"^\| ([\d.]+) \| ([\w-]+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    found = {
        (float(load), policy): (float(hits), float(median), float(p99)) for load, policy, hits, median, p99 in rows
    }
    assert found == {
        (row["load"], row["policy"]): (
            round(100 * row["hit_rate"], 1),
            round(row["median"], 3),
            round(row["p99"], 2),
        )
        for row in RESULTS["rows"]
    }
    assert RESULTS["workload"]["replicas"] == 1000
    assert RESULTS["date"] in PAGE
    assert (ROOT / "bench" / "notes" / "routing.png").stat().st_size > 10_000
