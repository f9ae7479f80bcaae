"""Write the PrometheusRule of the component `monitoring` from the rules in `deploy/prometheus`.

Run `.venv/bin/python deploy/kubernetes/prometheus_rule.py` after a change of the rules. A test compares both.
"""

from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
RULES = [FOLDER.parent / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
WRITTEN = FOLDER / "components" / "monitoring" / "prometheus-rule.yaml"
HEAD = "# Written by deploy/kubernetes/prometheus_rule.py from deploy/prometheus; do not edit.\n"


def prometheus_rule() -> str:
    """Return the PrometheusRule as YAML. A group's name includes its file's, because the files share names."""
    groups = [
        group | {"name": f"{group['name']}-{path.stem}"}
        for path in RULES
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sharp", "labels": {"app.kubernetes.io/name": "sharp"}},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, width=120)


if __name__ == "__main__":
    WRITTEN.write_text(prometheus_rule(), encoding="utf-8")
