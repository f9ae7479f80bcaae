"""The values of the Helm chart: which value chooses which components, and what in the manifests a value replaces.

`helm_chart.py` writes the chart with these tables. A place in the manifests is a tuple: kind/name of the document
without the release's prefix, then keys, and the name of an item for an item of a list.
"""

from typing import Any

# Stand for the name and the namespace of the release while kustomize renders.
RELEASE, NAMESPACE = "RELEASE", "RELEASE-NAMESPACE"
# The value of the chart for each choice, and the components of each option.
CHOICES: dict[str, dict[Any, list[str]]] = {
    "hardware": {"cpu": ["cpu"], "nvidia-gpu": ["nvidia-gpu"], "nvidia-mig": ["nvidia-gpu", "nvidia-mig"]},
    "model.from": {name: [f"model-from-{name}"] for name in ("pvc", "image", "image-volume", "url", "hub")},
    "monitoring.enabled": {False: [], True: ["monitoring"]},
    "autoscaling.by": {"none": [], "hpa": ["autoscale-hpa"], "keda": ["autoscale-keda"]},
    "tls.enabled": {False: [], True: ["tls"]},
    "inferencePool.enabled": {False: [], True: ["inference-pool"]},
}
Variant = dict[str, Any]
# Scalars of the manifests that are values of the chart: by their key, and by their text.
BY_KEY = {
    "MODEL_URL": "model.url",
    "MODEL_SHA256": "model.sha256",
    "MODEL_ID": "model.id",
    "MODEL_OPTIONS": "model.options",
    "minReplicas": "autoscaling.min",
    "minReplicaCount": "autoscaling.min",
    "maxReplicas": "autoscaling.max",
    "maxReplicaCount": "autoscaling.max",
    "serverAddress": "autoscaling.prometheus",
}
BY_TEXT = {
    "sharp-tokens": "auth.existingSecret",
    "sharp-tls": "tls.existingSecret",
    "sharp-model": "model.existingClaim",
    "sharp-cache": "model.existingCacheClaim",
    "sharp-hub": "model.existingHubSecret",
    "inference-gateway": "inferencePool.gateway.name",
}
IMAGES = {
    "sharp": "image",
    "sharp-model": "model.image",
    "sharp-export": "model.exportImage",
    "ghcr.io/llm-d/llm-d-router-endpoint-picker": "inferencePool.endpointPicker.image",
}
TEMPLATE = ("Deployment/sharp", "spec", "template")
POD = (*TEMPLATE, "spec")
SERVER = (*POD, "containers", "server")
PICKER = ("Deployment/sharp-epp", "spec", "template")
# Parts that a value of the chart replaces as a whole.
REPLACED = {
    (*SERVER, "resources"): "resources",
    (*POD, "nodeSelector"): "nodeSelector",
    (*POD, "tolerations"): "tolerations",
    (*PICKER, "spec", "containers", "epp", "resources"): "inferencePool.endpointPicker.resources",
}
# Lines at the end of a part of a document.
PULL_SECRETS = ["{{- with .Values.imagePullSecrets }}", "imagePullSecrets: {{ toJson . }}", "{{- end }}"]
ADDED = {
    ("ServiceAccount/sharp",): PULL_SECRETS,
    ("ServiceAccount/sharp-epp",): PULL_SECRETS,
    (*TEMPLATE, "metadata"): [
        "annotations:",
        '  checksum/settings: {{ list .Chart.Version (omit .Values "replicas" "autoscaling") | toJson | sha256sum }}',
    ],
    (*PICKER, "metadata"): ["annotations:", "  checksum/settings: {{ .Chart.Version | sha256sum }}"],
    ("HTTPRoute/sharp", "spec", "parentRefs", "inference-gateway"): [
        "{{- with .Values.inferencePool.gateway.namespace }}",
        "namespace: {{ . }}",
        "{{- end }}",
    ],
    (*TEMPLATE, "metadata", "labels"): [
        "{{- with .Values.model.version }}",
        "sharp-model-version: {{ . | quote }}",
        "{{- end }}",
    ],
    (*SERVER, "env"): [
        "{{- range $name, $value := .Values.settings }}",
        "- name: {{ $name }}",
        "  value: {{ $value | quote }}",
        "{{- end }}",
    ],
}
