"""A clock that tests move."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told: `clock.now += seconds`."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock
