"""Rules, dashboards and documents name only metrics and labels that exist, and the rules pass promtool's tests."""

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.prometheus import program
from tests.serving.observability.metric_families import FAMILIES

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
TEXTS = [
    *(ROOT / "README.md", ROOT / "ARCHITECTURE.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if "node_modules" not in path.parts),
]
MANIFESTS = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".pyc"]

SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
    "summary": ["_sum", "_count"],
}
# Prometheus adds these labels to every series of a server.
TARGET_LABELS = {"job", "instance"}
# With a PodMonitor, the Prometheus operator adds these labels, too.
POD_LABELS = {"namespace", "pod", "container", "endpoint"}
SERIES = {
    name + suffix: {*labels, *TARGET_LABELS, *(["le"] if suffix == "_bucket" else [])}
    for name, (kind, _, labels) in FAMILIES.items()
    for suffix in SUFFIXES[kind]
}
NAME = re.compile(r"(?<![\w:/.-])sharp_(?!attention-)[a-z0-9_]+(?![\w(]*[/.(])")


def rules():
    for path in (PROMETHEUS / "recording.yml", PROMETHEUS / "alerts.yml"):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


RECORDED = {rule["record"] for rule in rules() if "record" in rule}
EXPRESSIONS = {rule.get("record") or rule["alert"]: rule["expr"] for rule in rules()}


def dashboard_expressions():
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield pytest.param(target["expr"], id=f"{path.stem}: {panel['title']}")


def autoscaler_queries():
    """Yield the autoscalers' queries from the unrendered manifests, because components change no query."""
    for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document.get("kind") == "ScaledObject":
                for trigger in document["spec"]["triggers"]:
                    yield trigger["metadata"]["query"]


def problems(expression, added=frozenset()):
    """Return names and labels of a PromQL expression that no metric has; series also have the labels `added`."""
    found = []
    known = set()
    for name, selector in re.findall(r"\b(sharp[a-z0-9_:]+)(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', expression)):
        if ":" in name:
            found += [] if name in RECORDED else [name]
            known |= {"model", "version", "layer", "head", "context"} | TARGET_LABELS
        elif name in SERIES:
            used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
            found += [f"{name} has no label {label}" for label in used if label not in SERIES[name] | added]
            known |= SERIES[name] | added
        else:
            found.append(name)
    grouped = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression)
    labels = {label.strip() for group in grouped for label in group.split(",")}
    return found + [f"nothing here has a label {label}" for label in sorted(labels - known)]


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_rules_name_what_exists(expression):
    assert problems(expression) == [] or expression == 'up{job="sharp"} == 0'


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_dashboards_name_what_exists(expression):
    assert problems(expression) == []
    assert expression.count("sharp") > 0


def test_autoscalers_name_what_exists():
    queries = list(autoscaler_queries())
    assert [problems(query, POD_LABELS) for query in queries] == [[], []]
    assert "sharp_requests_waiting" in queries[0]
    assert "sharp_requests_running" in queries[1]
    # The first query uses a label that a PodMonitor does not add. The second needs one that only a PodMonitor adds.
    assert problems('sum(sharp_requests_waiting{deployment="sharp"})', POD_LABELS)
    assert problems('sum(sharp_requests_waiting{namespace="sharp"})')


def test_the_check_finds_what_does_not_exist():
    assert problems("rate(sharp_generated_total[5m])") == ["sharp_generated_total"]
    assert problems('sharp_requests_running{layer="1"}') == ["sharp_requests_running has no label layer"]
    assert problems("sum by (model, head) (sharp_attention_dispersed_heads)") == ["nothing here has a label head"]
    assert problems("sharp:unheard_of:rate5m") == ["sharp:unheard_of:rate5m"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(path):
    board = json.loads(path.read_text())
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "model", "instance"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for variable in board["templating"]["list"][1:]:
        (name,) = re.findall(r"label_values\((\w+)", variable["definition"])
        assert name in SERIES
    taken = set()
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("path", [*TEXTS, *MANIFESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_metrics_that_exist(path):
    names = set(NAME.findall(path.read_text()))
    assert names - set(SERIES) - set(FAMILIES) == set()


def test_every_metric_is_documented_as_it_is():
    rows = re.findall(
        r"^\| `(sharp_\w+)` \| (\w+) \| (\w*) ?\| ([\w, ]+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M
    )
    documented = {
        name.removesuffix("_total"): (kind, unit, tuple(labels.split(", "))) for name, kind, unit, labels in rows
    }
    assert documented == FAMILIES
    assert all(name.endswith("_total") == (kind == "counter") for name, kind, *_ in rows)


def promtool(*arguments):
    command = [program("promtool"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_promtool_accepts_rules_and_configuration():
    assert promtool("check", "config", PROMETHEUS / "prometheus.yml").count("SUCCESS") == 4


@pytest.mark.parametrize("path", sorted((PROMETHEUS / "tests").glob("*.yml")), ids=lambda path: path.stem)
def test_rules_do_what_their_tests_say(path):
    promtool("test", "rules", path)


def test_alerts_say_what_they_are():
    """Every alert has a severity, a summary and a description.

    `test_alerts.py` tests the behaviour of each alert.
    """
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_promtool_accepts_the_metrics(start_server, counting):
    command = [program("promtool"), "check", "metrics"]
    started = start_server(counting)
    with urllib.request.urlopen(f"http://{started.http_address}/metrics", timeout=10) as response:
        text = response.read()
    result = subprocess.run(command, input=text, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
