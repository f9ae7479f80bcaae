"""Policies for the pods of Ray, which run `ray start`."""

from tests.full.deploy.policies.documents import HEAD, of_kind, pods
from tests.full.deploy.rendering import Document


def rays_pods_have_probes(documents: list[Document]) -> list[str]:
    """Find containers without probes of their own.

    KubeRay adds missing probes, and those run wget, which the image lacks.
    """
    return [
        f"{pod.name} has no {kind} of its own that needs no program"
        for pod in pods(documents)
        if pod.of_ray
        for container in pod.containers
        for kind in ("readinessProbe", "livenessProbe")
        if not {"httpGet", "grpc"} & container.get(kind, {}).keys()
    ]


def workers_of_ray_are_kept(documents: list[Document]) -> list[str]:
    """Find Ray clusters all of whose workers may go when nodes are drained.

    A RayCluster does not say how many pods it should have, so only a budget with minAvailable lets any pod go. The head
    is a single pod, which no budget could let go.
    """
    found = []
    for pod in (candidate for candidate in pods(documents) if candidate.of_ray):
        budgets = [
            budget["spec"]
            for budget in of_kind(documents, "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        ]
        if pod.name == HEAD and budgets:
            found.append("the budget includes the head, whose node could not be drained")
        if pod.name != HEAD and not budgets:
            found.append(f"all {pod.name} may be taken away together")
        if any(not isinstance(budget.get("minAvailable"), int) for budget in budgets):
            found.append(f"the budget of {pod.name} lets no node be drained: it needs a number in minAvailable")
    return found
