"""No request of up to 1 MB takes much CPU time or memory of a server.

`python -m tests.full.budgets` shows the times, too.
"""

from pathlib import Path

from tests.full.budgets.measure import budget_server, costs

MOST_MEMORY = 200 * 10**6
MOST_CPU_SECONDS = 10.0  # far above usual costs, so that only another order of growth exceeds it, not a busy machine


def test_every_kind_of_request_stays_within_its_budget(tmp_path: Path) -> None:
    with budget_server(tmp_path) as running:
        found = dict(costs(running, quiet_seconds=0.0))  # times of the other stream are not checked
    assert {name: one.memory for name, one in found.items() if one.memory > MOST_MEMORY} == {}
    assert {name: one.cpu_seconds for name, one in found.items() if one.cpu_seconds > MOST_CPU_SECONDS} == {}
    known = {"200", "400", "429", "OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}  # a busy server may refuse
    assert {name: one.status for name, one in found.items() if one.status not in known} == {}
