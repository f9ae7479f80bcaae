"""promtool runs every alert through rollouts, scaling, restarts, scrape gaps, two models, and one bad server of ten."""

import subprocess

import pytest
import yaml

from tests.full.deploy.alert_scenarios import Case, promtool_test
from tests.full.deploy.rendering import ROOT
from tests.prometheus import program

PROMETHEUS = ROOT / "deploy" / "prometheus"
GROUPS = [
    group
    for name in ("recording.yml", "alerts.yml")
    for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
]
FIRST = "sharp_time_to_first_token_seconds"
BETWEEN = "sharp_inter_token_latency_seconds"
QUEUED = "sharp_request_queue_seconds"
HEADS = {'sharp_attention_heads{layer="0"}': 200, "sharp_model_info": 1}
DISPERSED = 'sharp_attention_dispersed_heads{layer="0"}'
EXPECTED = 'sharp_attention_expected_dispersed_heads{layer="0"}'
OF_MODEL = ("model",)
OF_VERSION = ("model", "version")
KEPT = 36  # keep_firing_for, and the minutes until a series that ends is stale


def refusals(reason, rate):
    return {f'sharp_refusals_total{{protocol="http", status="4xx", reason="{reason}"}}': rate}


def ended(stop, error=0.0):
    return {
        'sharp_requests_total{finish_reason="stop"}': stop,
        'sharp_requests_total{finish_reason="error"}': error,
    }


def latency(name, bounds, below):
    """Return a histogram with 60 observations per minute, all of them below the bounds in `below`."""
    buckets = {f'{name}_bucket{{le="{bound}"}}': 60.0 if bound in below else 0.0 for bound in bounds}
    return {**buckets, f'{name}_bucket{{le="+Inf"}}': 60.0, f"{name}_count": 60.0}


CASES = (
    Case("SharpHeadsDispersed", {DISPERSED: 80}, {DISPERSED: 10}, OF_VERSION, warm=10, also=HEADS, keeps=KEPT),
    Case(
        "SharpHeadsDispersedUnexpectedly",
        {DISPERSED: 45},
        {DISPERSED: 32},
        OF_VERSION,
        warm=10,
        also={**HEADS, EXPECTED: 30},
        keeps=KEPT,
    ),
    Case(
        "SharpAttentionEntropyShifted",
        {'sharp_attention_drift_psi{layer="0", head="1"}': 0.4},
        {'sharp_attention_drift_psi{layer="0", head="1"}': 0.1},
        delay=40,
    ),
    Case(
        "SharpAttentionStatisticsLeftOut",
        {"sharp_attention_left_out_tokens_total": 5},
        {"sharp_attention_left_out_tokens_total": 0},
    ),
    Case(
        "SharpEngineStalled",
        {"sharp_requests_waiting": 2, "sharp_step_duration_seconds_count": 0},
        {"sharp_requests_waiting": 2, "sharp_step_duration_seconds_count": 600},
        also={"sharp_requests_running": 1, "sharp_engine_step_running_seconds": 0.1},
    ),
    Case(
        "SharpTimeToFirstTokenHigh",
        latency(FIRST, ("10.0", "20.0"), ("20.0",)),
        latency(FIRST, ("10.0", "20.0"), ("10.0", "20.0")),
    ),
    Case(
        "SharpInterTokenLatencyHigh",
        latency(BETWEEN, ("0.5", "1.0"), ("1.0",)),
        latency(BETWEEN, ("0.5", "1.0"), ("0.5", "1.0")),
    ),
    Case(
        "SharpQueueLong",
        {**latency(QUEUED, ("30.0", "40.0"), ("40.0",)), "sharp_requests_waiting": 10},
        {**latency(QUEUED, ("30.0", "40.0"), ("30.0", "40.0")), "sharp_requests_waiting": 10},
    ),
    Case("SharpCachePressure", {"sharp_kv_cache_usage_ratio": 0.97}, {"sharp_kv_cache_usage_ratio": 0.9}),
    Case("SharpPreemptions", {"sharp_preemptions_total": 12}, {"sharp_preemptions_total": 3}, keeps=22),
    Case("SharpRequestsFail", ended(50, 10), ended(60, 1)),
    Case("SharpDown", {"up": 0}, {"up": 1}, ("instance",), lasting=False, delay=10),
    Case("SharpDownForLong", {"up": 0}, {"up": 1}, ("instance",), lasting=False, delay=25),
    Case(
        "SharpUnauthenticatedFlood",
        refusals("unauthenticated", 120),
        refusals("unauthenticated", 2),
        OF_MODEL,
    ),
    Case(
        "SharpQueueRefusesMany",
        {**refusals("queue_full", 60), **ended(60)},
        {**refusals("queue_full", 1), **ended(60)},
        OF_MODEL,
    ),
    *(
        Case(
            f"Sharp{what}Budget{speed}Burn",
            latency(name, (bound, "40.0"), ("40.0",)),
            latency(name, (bound, "40.0"), (bound, "40.0")),
            OF_MODEL,
            # One bad server of ten makes a tenth of all requests late, which is less than the 14.4 % of a fast burn.
            one_of_ten=speed == "Slow",
            delay=60,
        )
        for what, name, bound in (("FirstToken", FIRST, "2.5"), ("InterToken", BETWEEN, "0.2"))
        for speed in ("Fast", "Slow")
    ),
)


def rules_of(alert):
    """Return the alert and the recording rules that it reads, because promtool evaluates every rule in every minute."""
    rules = [rule for group in GROUPS for rule in group["rules"]]
    (chosen,) = [rule for rule in rules if rule.get("alert") == alert]
    read = [rule for rule in rules if rule.get("record", "-") in chosen["expr"]]
    return {"groups": [{"name": alert, "rules": [*read, chosen]}]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_in_operation(case, tmp_path):
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules_of(case.alert)))
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(promtool_test(case, ["rules.yml"]), sort_keys=False, width=10**6))
    command = [program("promtool"), "test", "rules", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[:4000]


def test_every_alert_has_its_cases():
    assert {rule["alert"] for group in GROUPS for rule in group["rules"] if "alert" in rule} == {
        case.alert for case in CASES
    }
