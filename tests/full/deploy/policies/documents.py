"""Read pods as they will run, and the settings of their servers, from documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sharp.serving.server.settings_sources import PREFIX, ServeSettings
from tests.full.deploy.rendering import Document

HEAD = "head"  # the name for the head of a Ray cluster, the only group of pods without a name
PICKER = "sharp-epp"  # the label app.kubernetes.io/name of the Gateway API's endpoint picker
HTTP_ROUTES = {"/health", "/health/live", "/health/ready", "/metrics"}
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")


@dataclass(frozen=True)
class Pod:
    """Pods as they will run: of a Deployment, of an InferenceService with its runtime, or of a RayService."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    of_ray: bool = False

    @property
    def is_picker(self) -> bool:
        """Whether the pod is the Gateway API's endpoint picker, which is not our program."""
        return self.labels.get("app.kubernetes.io/name") == PICKER

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def server(self) -> dict[str, Any]:
        return self.spec["containers"][0]


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def pods(documents: list[Document]) -> Iterator[Pod]:
    for deployment in of_kind(documents, "Deployment"):
        template = deployment["spec"]["template"]
        yield Pod(deployment["metadata"]["name"], template["metadata"]["labels"], template["spec"])
    for service in of_kind(documents, "InferenceService"):
        predictor = service["spec"]["predictor"]
        runtime = next(
            document
            for document in of_kind(documents, "ServingRuntime")
            if document["metadata"]["name"] == predictor["model"]["runtime"]
        )
        yield Pod(service["metadata"]["name"], {}, runtime["spec"] | predictor)
    for service in of_kind(documents, "RayService"):
        cluster = service["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            name, template = group.get("groupName", HEAD), group["template"]
            yield Pod(name, template["metadata"]["labels"], template["spec"], of_ray=True)


def servers(documents: list[Document]) -> Iterator[Pod]:
    """Yield pods that run sharp-serve. Ray's pods and the endpoint picker have policies of their own."""
    return (pod for pod in pods(documents) if not pod.of_ray and not pod.is_picker)


def server_deployments(documents: list[Document]) -> list[Document]:
    """Return the Deployments whose pods run sharp-serve."""
    names = {pod.name for pod in servers(documents)}
    return [document for document in of_kind(documents, "Deployment") if document["metadata"]["name"] in names]


def environment(documents: list[Document], container: dict[str, Any]) -> dict[str, str | None]:
    """Return the variables of a container. None stands for a value that is known only in the cluster."""
    maps = {document["metadata"]["name"]: document.get("data", {}) for document in of_kind(documents, "ConfigMap")}
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        found |= maps.get(source["configMapRef"]["name"], {})
    return found | {variable["name"]: variable.get("value") for variable in container.get("env", [])}


def settings(documents: list[Document], pod: Pod) -> ServeSettings:
    known = environment(documents, pod.server).items()
    given = {name: value for name, value in known if value is not None and name.startswith(PREFIX)}
    return ServeSettings(**{name.removeprefix(PREFIX).lower(): value for name, value in given.items()})
