"""Servers over time as series for promtool: the situations that every alert meets in operation.

A scenario has servers that come, go, restart and miss scrapes. A case has the series of a sick server and of a healthy
server, and the labels of its alert.
"""

from dataclasses import dataclass, field
from typing import Any

HORIZON = 210
SICK_FROM = 20
OLD, NEW = "111111111111", "222222222222"
COUNTERS = ("_total", "_bucket", "_count", "_sum")


@dataclass(frozen=True)
class Server:
    """One server from the minute `begins` until before `ends`.

    In the minutes `down` its process is away. In the minutes `gaps` only the scrape is missing.
    """

    instance: str
    sick: bool
    begins: int = 0
    ends: int = HORIZON + 1
    model: str = "m"
    version: str = OLD
    down: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()

    def has(self, minute: int) -> bool:
        """Whether Prometheus has a sample of that minute."""
        return self.begins <= minute < self.ends and minute not in self.gaps


@dataclass(frozen=True)
class Scenario:
    """Servers, and the minutes at which alerts are looked at."""

    name: str
    servers: tuple[Server, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An alert and the series that cause it: values of gauges, and increases per minute of counters.

    Attributes:
        alert: The name of the alert.
        sick: Series of a sick server.
        well: Series of a healthy server.
        by: Labels of the alert.
        warm: Minutes for which a new server still has the healthy values.
        one_of_ten: Whether one sick server among ten causes the alert.
        delay: Minutes for which a sick server may be without the alert.
        lasting: Whether the alert fires as long as the server is sick. Otherwise it ends by itself, like an alert for a
            server that has gone.
        keeps: Minutes for which the alert of a server that has gone may stay.
        also: Series of every server, sick or healthy.
    """

    alert: str
    sick: dict[str, float]
    well: dict[str, float]
    by: tuple[str, ...] = ("model", "instance")
    warm: int = 0
    one_of_ten: bool = True
    delay: int = 30
    lasting: bool = True
    keeps: int = 12
    also: dict[str, float] = field(default_factory=dict)


def series(case: Case, servers: tuple[Server, ...]) -> list[dict[str, str]]:
    """Return promtool's input series of the servers."""
    found = []
    names = {**case.well, **case.sick, **case.also}
    for server in servers:
        for name in names:
            metric, _, labels = name.rstrip("}").partition("{")
            own = f'instance="{server.instance}", job="sharp"'
            if metric != "up":
                own += f', model="{server.model}"'
            if metric == "sharp_model_info":
                own += f', version="{server.version}"'
            text = f"{metric}{{{own}{', ' if labels else ''}{labels}}}"
            found.append({"series": text, "values": " ".join(_values(case, server, name, metric))})
    return found


def _values(case: Case, server: Server, name: str, metric: str) -> list[str]:
    values = []
    total = 0.0
    began = server.begins
    for minute in range(HORIZON + 1):
        if minute in server.down:
            total, began = 0.0, minute + 1
        sick = server.sick and minute >= max(SICK_FROM, began + case.warm)
        value = case.also.get(name, (case.sick if sick else case.well).get(name, 0.0))
        if metric == "up" and minute in server.down:
            value = 0.0
        total += value
        there = server.has(minute) and (metric == "up" or minute not in server.down)
        values.append(f"{total if metric.endswith(COUNTERS) else value:g}" if there else "_")
    return values


def rollout(sick: bool) -> tuple[Server, ...]:
    """Return three servers that are replaced by servers of a new version, five minutes after each other."""
    old = [Server(f"old-{number}", sick, ends=100 + 5 * number) for number in range(3)]
    new = [Server(f"new-{number}", sick, begins=98 + 5 * number, version=NEW) for number in range(3)]
    return (*old, *new)


def several(count: int, sick: bool, **fields: Any) -> tuple[Server, ...]:
    """Return `count` servers that are alike."""
    return tuple(Server(f"s-{number}", sick, **fields) for number in range(count))


LATER = tuple(range(30, HORIZON, 10))
WELL = (
    Scenario("rollout", rollout(False), LATER),
    Scenario(
        "scale-out", (*several(2, False), *(Server(f"n-{number}", False, begins=100) for number in range(3))), LATER
    ),
    Scenario("scale-in", (*several(2, False), *(Server(f"o-{number}", False, ends=100) for number in range(3))), LATER),
    Scenario("restart", several(3, False, down=(100,)), LATER),
    Scenario("scrape gap", several(3, False, gaps=(100, 101, 102)), LATER),
)


def sick_scenarios(case: Case) -> list[tuple[Scenario, dict[int, list[tuple[str, ...]]]]]:
    """Return scenarios with sick servers and, for some minutes, the labels of the alerts that fire then."""
    ready = SICK_FROM + case.delay + case.warm
    if not case.lasting:
        ready = SICK_FROM + case.delay
        both = (Server("a", True), Server("b", False, model="n"))
        return [
            (Scenario("two models", both, ()), {ready: fire(case, both[:1])}),
            (Scenario("one of ten", one_of_ten(), ()), {ready: fire(case, one_of_ten()[:1])}),
        ]
    after = 107 + case.delay + case.warm + 5 + case.keeps
    old, new = rollout(True)[:3], rollout(True)[3:]
    grown = tuple(Server(f"n-{number}", True, begins=100) for number in range(3))
    gone = tuple(Server(f"o-{number}", True, ends=100) for number in range(3))
    two = several(2, True)
    models = (Server("a", True), Server("b", False, model="n"))
    restarts = several(3, True, down=(100,))
    gap = several(3, True, gaps=(100, 101, 102))
    found = [
        (Scenario("rollout", (*old, *new), ()), {95: fire(case, old), after: fire(case, new)}),
        (Scenario("scale-out", (*two, *grown), ()), {95: fire(case, two), after: fire(case, (*two, *grown))}),
        (Scenario("scale-in", (*two, *gone), ()), {95: fire(case, (*two, *gone)), after: fire(case, two)}),
        (Scenario("restart", restarts, ()), {95: fire(case, restarts), after: fire(case, restarts)}),
        (Scenario("scrape gap", gap, ()), {minute: fire(case, gap) for minute in (95, 100, 101, 102, 103, 110, after)}),
        (Scenario("two models", models, ()), {ready: fire(case, models[:1]), after: fire(case, models[:1])}),
        (
            Scenario("one of ten", one_of_ten(), ()),
            {after: fire(case, one_of_ten()[:1]) if case.one_of_ten else []},
        ),
    ]
    # an alert of the whole model fires in every minute of a rollout
    if "instance" not in case.by and "version" not in case.by:
        found[0][1].update({minute: fire(case, old) for minute in range(95, after, 5)})
    return found


def one_of_ten() -> tuple[Server, ...]:
    """Return a sick server beside nine healthy servers."""
    return (Server("bad", True), *(Server(f"good-{number}", False) for number in range(9)))


def fire(case: Case, servers: tuple[Server, ...]) -> list[tuple[str, ...]]:
    """Return the labels of the alerts that the sick servers cause."""
    return sorted({tuple(str(getattr(server, label)) for label in case.by) for server in servers})


def promtool_test(case: Case, rule_files: list[str]) -> dict[str, Any]:
    """Return promtool's test file for one alert in every scenario."""
    tests = []
    labels = ", ".join(case.by)
    expression = f'count by ({labels}) (ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
    quiet: list[tuple[Scenario, dict[int, list[tuple[str, ...]]]]]
    quiet = [(scenario, {minute: [] for minute in scenario.at}) for scenario in WELL]
    for kind, scenarios in (("healthy", quiet), ("sick", sick_scenarios(case))):
        for scenario, minutes in scenarios:
            tests.append(
                {
                    "name": f"{kind}: {scenario.name}",
                    "interval": "1m",
                    "input_series": series(case, scenario.servers),
                    "promql_expr_test": [
                        {
                            "expr": expression,
                            "eval_time": f"{minute}m",
                            "exp_samples": [{"labels": _selector(case, values), "value": 1} for values in firing],
                        }
                        for minute, firing in sorted(minutes.items())
                    ],
                }
            )
    return {"rule_files": rule_files, "evaluation_interval": "1m", "tests": tests}


def _selector(case: Case, values: tuple[str, ...]) -> str:
    return "{" + ", ".join(f'{label}="{value}"' for label, value in zip(case.by, values, strict=True)) + "}"
