"""Small schemas of the custom resources in our manifests: required fields, types, and no unknown field names.

`kubernetes-validate` has Kubernetes' own kinds only. These schemas hold the fields that we use, as the projects'
definitions of August 2026 have them (prometheus-operator v1, KEDA v1alpha1, KServe v1alpha1 and v1beta1, Gateway API
v1, its Inference Extension v1, KubeRay v1). They find a misspelt or misplaced field, but no value that only the
resource's controller can judge.
"""

from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
FLAG: Schema = {"type": "boolean"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}
# Kubernetes' own schemas check this as a part of a pod.
POD_PART: Schema = {}


def record(required: str, /, **fields: Schema) -> Schema:
    """Return the schema of an object without other fields; `required` names required fields, separated by spaces."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def several(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


SELECTOR = record("matchLabels", matchLabels=LABELS | {"minProperties": 1})
KEY = record("name key", name=STRING, key=STRING)
SCALING = record(
    "",
    stabilizationWindowSeconds=INTEGER,
    policies=several(
        record("type value periodSeconds", type=one_of("Pods", "Percent"), value=INTEGER, periodSeconds=INTEGER)
    ),
)
RULE = record("expr", record=STRING, alert=STRING, expr=STRING, labels=LABELS, annotations=LABELS) | {
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}]
}
RULE["properties"]["for"] = RULE["properties"]["keep_firing_for"] = DURATION

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): record(
        "selector podMetricsEndpoints",
        jobLabel=STRING,
        selector=SELECTOR,
        podMetricsEndpoints=several(
            record(
                "",
                port=STRING,
                path=STRING,
                params={"type": "object", "additionalProperties": several(STRING)},
                scheme=one_of("http", "https"),
                interval=DURATION,
                tlsConfig=record("", serverName=STRING, ca=record("", secret=KEY)),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        "groups", groups=several(record("name rules", name=STRING, rules=several(RULE)))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        "scaleTargetRef triggers",
        scaleTargetRef=record("name", apiVersion=STRING, kind=STRING, name=STRING),
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        fallback=record(
            "failureThreshold replicas",
            failureThreshold=INTEGER,
            replicas=INTEGER,
            behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
        ),
        advanced=record(
            "", horizontalPodAutoscalerConfig=record("", behavior=record("", scaleDown=SCALING, scaleUp=SCALING))
        ),
        triggers=several(
            record(
                "type metadata",
                type=one_of("prometheus"),
                metricType=one_of("AverageValue", "Value", "Utilization"),
                # KEDA takes only strings.
                metadata=record(
                    "serverAddress query threshold",
                    serverAddress=STRING,
                    query=STRING,
                    threshold=STRING,
                    activationThreshold=STRING,
                    ignoreNullValues=one_of("true", "false"),
                ),
            )
        ),
    ),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): record(
        "containers supportedModelFormats",
        supportedModelFormats=several(record("name", name=STRING, version=STRING, autoSelect=FLAG)),
        protocolVersions=several(one_of("v1", "v2", "grpc-v1", "grpc-v2")),
        multiModel=FLAG,
        annotations=LABELS,
        containers=POD_PART,
        volumes=POD_PART,
        nodeSelector=POD_PART,
        tolerations=POD_PART,
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): record(
        "predictor",
        predictor=record(
            "model",
            minReplicas=INTEGER,
            maxReplicas=INTEGER,
            automountServiceAccountToken=POD_PART,
            enableServiceLinks=POD_PART,
            terminationGracePeriodSeconds=POD_PART,
            securityContext=POD_PART,
            model=record(
                "modelFormat",
                modelFormat=record("name", name=STRING, version=STRING),
                runtime=STRING,
                protocolVersion=one_of("v1", "v2", "grpc-v1", "grpc-v2"),
                storageUri={"type": "string", "pattern": r"^(pvc|s3|gs|oci(\+native|\+modelcar)?|https?)://"},
            ),
        ),
    ),
    # The schema has no serveService, because KubeRay removes every port but the one named serve from it.
    ("ray.io/v1", "RayService"): record(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=STRING,
        rayClusterConfig=record(
            "headGroupSpec",
            rayVersion=STRING,
            authOptions=record("mode", mode=one_of("disabled", "token")),
            headGroupSpec=record("template", rayStartParams=LABELS, template=POD_PART),
            workerGroupSpecs=several(
                record(
                    "groupName template",
                    groupName=STRING,
                    replicas=INTEGER,
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    rayStartParams=LABELS,
                    template=POD_PART,
                )
            ),
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): record(
        "selector targetPorts endpointPickerRef",
        selector=SELECTOR,
        targetPorts=several(record("number", number=PORT)),
        endpointPickerRef=record(
            "name port",
            name=STRING,
            port=record("number", number=PORT),
            failureMode=one_of("FailOpen", "FailClose"),
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): record(
        "parentRefs rules",
        parentRefs=several(record("name", group=STRING, kind=STRING, name=STRING)),
        rules=several(
            record(
                "backendRefs",
                matches=several(
                    record("", path=record("type value", type=one_of("PathPrefix", "Exact"), value=STRING))
                ),
                backendRefs=several(record("name", group=STRING, kind=STRING, name=STRING)),
                timeouts=record("", request=DURATION),
            )
        ),
    ),
}


def schema(api_version: str, kind: str) -> Schema:
    """Return the schema of a kind.

    Raises:
        KeyError: There is no schema of the kind.
    """
    metadata = record("name", name=STRING, namespace=STRING, labels=LABELS, annotations=LABELS)
    return record(
        "apiVersion kind metadata spec",
        apiVersion=STRING,
        kind=STRING,
        metadata=metadata,
        spec=SPECS[api_version, kind],
    )
