"""Write the Helm chart `deploy/helm/sharp` from the kustomize base and its components.

Run `.venv/bin/python -m deploy.kubernetes.helm_chart` after a change of the manifests. The script renders the base with
combinations of components by `kubectl kustomize`, and merges the results: a part that some combinations lack stands in
the chart under an `if` over the values that choose these combinations. A test compares the written chart, and renders
the chart by Helm beside kustomize.
"""

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.kubernetes.helm_values import (
    ADDED,
    BY_KEY,
    BY_TEXT,
    CHOICES,
    IMAGES,
    NAMESPACE,
    RELEASE,
    REPLACED,
    Variant,
)

FOLDER = Path(__file__).resolve().parent
CHART = FOLDER.parent / "helm" / "sharp"
HEAD = "{{- /* Written by deploy/kubernetes/helm_chart.py; do not edit. */ -}}\n"
PLAIN = re.compile(r"(?!(true|false|yes|no|on|off|null|y|n)$)[A-Za-z/][\w./@-]*", re.I)


def variants() -> list[Variant]:
    """Return the variants that are rendered: all of hardware, model and TLS, and all of operation with one model.

    No variant has TLS and a pool, because gateways speak plain HTTP to the pool.
    """
    names = list(CHOICES)
    whole = (dict(zip(names, options, strict=True)) for options in itertools.product(*CHOICES.values()))
    return [
        variant
        for variant in whole
        if not (variant["tls.enabled"] and variant["inferencePool.enabled"])
        if not (
            variant["monitoring.enabled"] or variant["inferencePool.enabled"] or variant["autoscaling.by"] != "none"
        )
        or (variant["model.from"], variant["hardware"]) == ("pvc", "cpu")
    ]


def files() -> dict[str, Path]:
    """Return the files that the chart holds as links, by their names in the chart's folder `files`."""
    parts = FOLDER / "components"
    found = [*(FOLDER.parent / "grafana").glob("*.json"), *parts.glob("model-from-*/*.py")]
    found += [parts / "monitoring" / "prometheus-rule.yaml", parts / "inference-pool" / "endpoint-picker.yaml"]
    return {path.name: path for path in sorted(found)}


def render(chosen: list[Variant]) -> list[list[dict[str, Any]]]:
    """Return the documents of each variant. One call of kubectl renders all, each in a namespace of its own."""
    # kustomize loads no files from outside of a folder by absolute paths.
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".helm-") as folder:
        for number, variant in enumerate(chosen):
            components = [part for name, option in variant.items() for part in CHOICES[name][option]]
            content = {
                "namespace": f"variant-{number}",
                "namePrefix": f"{RELEASE}-",
                "labels": [{"pairs": {"app.kubernetes.io/instance": RELEASE}, "includeSelectors": True}],
                "resources": ["../../base"],
                "components": [f"../../components/{name}" for name in components],
            }
            place = Path(folder) / f"variant-{number}"
            place.mkdir()
            (place / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        whole = {"resources": [f"variant-{number}" for number in range(len(chosen))]}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
        command = ["kubectl", "kustomize", folder]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[list[dict[str, Any]]] = [[] for _ in chosen]
    for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        namespace = document["metadata"].pop("namespace")
        found[int(namespace.rpartition("-")[2])].append(general(document, namespace))
    return found


def general(part: Any, namespace: str) -> Any:
    """Return a copy of a document without what only this rendering has.

    Names of generated ConfigMaps have no hash of their content. NAMESPACE stands for the variant's `namespace`.
    """
    if isinstance(part, dict):
        return {key: general(value, namespace) for key, value in part.items()}
    if isinstance(part, list):
        return [general(value, namespace) for value in part]
    if part == namespace:
        return NAMESPACE
    if isinstance(part, str) and (found := re.fullmatch(rf"({RELEASE}-sharp(?:-[a-z]+)*)-[a-z0-9]{{10}}", part)):
        return found[1]
    return part


class Merger:
    """Merges what the variants have at a place of the documents into lines of a template.

    At every place, `nodes` has the value of each variant that has the place, by the variant's number.
    """

    def __init__(self, chosen: list[Variant]) -> None:
        self._variants = chosen
        self._files = {path.read_text(encoding="utf-8"): name for name, path in files().items()}

    def condition(self, part: set[int], whole: set[int]) -> str:
        """Return an expression over the values that, of the variants `whole`, is true for `part` only.

        Raises:
            ValueError: no choice and no pair of choices tells the variants apart.
        """
        tests = [
            (expression, {number for number in whole if self._variants[number][name] in options})
            for name, known in CHOICES.items()
            for count in range(1, len(known))
            for options in itertools.combinations(known, count)
            for expression in [_test(name, list(options))]
        ]
        for expression, chosen in tests:
            if chosen == part:
                return expression
        for (first, one), (second, other) in itertools.combinations(tests, 2):
            if one & other == part:
                return f"and ({first}) ({second})"
        raise ValueError(f"no pair of choices is true for {[self._variants[number] for number in part]} only")

    def entry(self, key: str, nodes: Mapping[int, Any], path: tuple[str, ...]) -> list[str]:
        """Return the YAML lines of `key` with its value, under conditions where variants of the chart differ.

        `nodes` has the value in each variant that has the key, by the variant's number; `path` are the keys down to
        this value.
        """
        values = list(nodes.values())
        if all(isinstance(value, dict) and value for value in values):
            return [f"{key}:", *_indented(self.mapping(nodes, path))]
        if all(isinstance(value, list) and value and isinstance(value[0], dict) for value in values):
            return [f"{key}:", *_indented(self.items(nodes, path))]
        groups: dict[str, set[int]] = {}
        for number, value in nodes.items():
            groups.setdefault(json.dumps(value), set()).add(number)
        lines: list[str] = []
        for place, (text, part) in enumerate(groups.items()):
            if len(groups) > 1:
                word = "if" if place == 0 else "else if"
                last = place == len(groups) - 1
                lines.append("{{- else }}" if last else f"{{{{- {word} {self.condition(part, set(nodes))} }}}}")
            lines.append(f"{key}: {self.scalar(key, json.loads(text), path)}")
        return [*lines, *(["{{- end }}"] if len(groups) > 1 else [])]

    def mapping(self, nodes: Mapping[int, Any], path: tuple[str, ...]) -> list[str]:
        """Return the YAML lines of a mapping, with conditions around keys that only some variants have.

        `nodes` has the mapping in each variant, by the variant's number; `path` are the keys down to the mapping.
        """
        keys = dict.fromkeys(key for value in nodes.values() for key in value)
        keys = dict.fromkeys(["name", *keys]) if "name" in keys else keys  # the first line of an item has no condition
        lines: list[str] = []
        for key in [*keys, *(place[-1] for place in REPLACED if place[:-1] == path and place[-1] not in keys)]:
            part = {number: value[key] for number, value in nodes.items() if key in value}
            inner = self.entry(key, part, (*path, key)) if part else []
            whole = f"if {self.condition(set(part), set(nodes))}" if 0 < len(part) < len(nodes) else ""
            if replaced := REPLACED.get((*path, key)):
                lines += [f"{{{{- if .Values.{replaced} }}}}", f"{key}: {{{{ toJson .Values.{replaced} }}}}"]
                lines += [f"{{{{- {f'else {whole}' if whole else 'else'} }}}}", *inner] if inner else []
                lines.append("{{- end }}")
            else:
                lines += [f"{{{{- {whole} }}}}", *inner, "{{- end }}"] if whole else inner
        return lines + ADDED.get(path, [])

    def items(self, nodes: Mapping[int, Any], path: tuple[str, ...]) -> list[str]:
        """Return the YAML lines of a list of mappings, which variants may have in different forms.

        Items of the same name are one item; others are if they are equal. `nodes` has the list in each variant, by the
        variant's number; `path` are the keys down to the list.
        """
        found: dict[str, dict[int, Any]] = {}
        for number, values in nodes.items():
            for value in values:
                name = value.get("name") or json.dumps(value)
                found.setdefault(name, {})[number] = value
        lines: list[str] = []
        for name, part in found.items():
            first, *rest = self.mapping(part, (*path, name))
            item = [f"- {first}", *_indented(rest)]
            whole = set(part) == set(nodes)
            lines += item if whole else [f"{{{{- if {self.condition(set(part), set(nodes))} }}}}", *item, "{{- end }}"]
        return lines + ADDED.get(path, [])

    def scalar(self, key: str, value: Any, path: tuple[str, ...]) -> str:
        """Return a value as JSON, or the template's expression for the chart's setting or file in its place.

        `path` are the keys down to the value, the last of which is `key`.
        """
        if path == ("Deployment/sharp", "spec", "replicas"):
            return "{{ .Values.replicas }}"
        if key in BY_KEY:
            return f"{{{{ .Values.{BY_KEY[key]} | toJson }}}}"
        if value == NAMESPACE:
            return "{{ .Release.Namespace }}"
        if not isinstance(value, str):
            return json.dumps(value).replace(RELEASE, "{{ .Release.Name }}")
        if value in BY_TEXT:
            return f"{{{{ .Values.{BY_TEXT[value]} }}}}"
        if value in self._files:
            return f'{{{{ .Files.Get "files/{self._files[value]}" | toJson }}}}'
        if key == "image" or path[-2:] == ("image", "reference"):
            name, _, tag = value.partition(":")
            place = f".Values.{IMAGES[name]}"
            version = f'{{{{ with {place}.digest }}}}@{{{{ . }}}}{{{{ else }}}}:{{{{ {place}.tag | default "{tag}" }}}}'
            return f'"{{{{ {place}.repository }}}}{version}{{{{ end }}}}"'
        text = value if PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
        text = text.replace("{{", '{{ "{{" }}').replace(RELEASE, "{{ .Release.Name }}")
        return text.replace('namespace=\\"sharp\\"', 'namespace=\\"{{ .Release.Namespace }}\\"')

    def document(self, nodes: Mapping[int, Any]) -> list[str]:
        """Return the YAML lines of a document; `nodes` has it for each variant that has it, by the variant's number."""
        first = next(iter(nodes.values()))
        kind, name = first["kind"], first["metadata"]["name"].removeprefix(f"{RELEASE}-")
        bodies = dict(nodes)
        spec: list[str] = []
        if kind == "PrometheusRule":
            bodies = {number: {key: body[key] for key in body if key != "spec"} for number, body in nodes.items()}
            spec = ['spec: {{- (.Files.Get "files/prometheus-rule.yaml" | fromYaml).spec | toYaml | nindent 2 }}']
        lines = [*self.mapping(bodies, (f"{kind}/{name}",)), *spec]
        shared = kind == "PrometheusRule" or "dashboard" in name
        if len(nodes) < len(self._variants):
            chosen = self.condition(set(nodes), set(range(len(self._variants))))
            chosen = f"and ({chosen}) .Values.monitoring.rules" if shared else chosen
            lines = [f"{{{{- if {chosen} }}}}", *lines, "{{- end }}"]
        return lines


def _test(name: str, options: list[Any]) -> str:
    """Return the condition, in Helm's template language, that the value `name` is one of `options`.

    `options` are strings, or a single bool: whether the value is set.
    """
    if isinstance(options[0], bool):
        return f".Values.{name}" if options[0] else f"not .Values.{name}"
    if len(options) == 1:
        return f'eq .Values.{name} "{options[0]}"'
    return f"has .Values.{name} (list {' '.join(json.dumps(option) for option in options)})"


def _indented(lines: list[str]) -> Iterator[str]:
    """Yield the lines two columns to the right; lines of control flow stay at the left."""
    return (line if line.startswith("{{- ") else f"  {line}" for line in lines)


def templates() -> dict[str, str]:
    """Return the chart's templates by their file names."""
    chosen = variants()
    nodes: dict[str, dict[int, Any]] = {}
    for number, documents in enumerate(render(chosen)):
        for document in documents:
            name = document["metadata"]["name"].removeprefix(f"{RELEASE}-")
            nodes.setdefault(f"{document['kind'].lower()}-{name}.yaml", {})[number] = document
    merger = Merger(chosen)
    return {name: HEAD + "\n".join(merger.document(found)) + "\n" for name, found in sorted(nodes.items())}


def write() -> None:
    """Write the templates, and the links to the files that they read."""
    for folder in ("templates", "files"):
        (CHART / folder).mkdir(parents=True, exist_ok=True)
        for path in (CHART / folder).iterdir():
            path.unlink()
    for name, text in templates().items():
        (CHART / "templates" / name).write_text(text, encoding="utf-8")
    for name, path in files().items():
        (CHART / "files" / name).symlink_to(Path("../../..") / path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    write()
