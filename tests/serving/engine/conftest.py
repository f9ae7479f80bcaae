"""A clock that moves only when a test moves it."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that only moves when told: `clock.now += seconds`."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock
