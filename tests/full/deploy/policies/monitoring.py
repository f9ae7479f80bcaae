"""The policy for Prometheus."""

from tests.full.deploy.policies.documents import HTTP_ROUTES, of_kind, pods, settings
from tests.full.deploy.rendering import Document

JOB = "sharp"  # as in up{job="sharp"} of the alerts


def prometheus_can_read(documents: list[Document]) -> list[str]:
    """Find PodMonitors that are not let in, or whose scheme or job differs from the server's and the alerts'."""
    found = []
    for monitor in of_kind(documents, "PodMonitor"):
        for pod in (candidate for candidate in pods(documents) if not candidate.is_picker):
            named = pod.labels.get(monitor["spec"].get("jobLabel", "")) == JOB
            if not named and not pod.of_ray:
                found.append(f'the job would not be "{JOB}", and the alert SharpDown would never fire')
            if named and pod.of_ray:
                found.append(f'the job would be "{JOB}", and SharpDown would fire when Ray takes a replica away')
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                expected = "http" if settings(documents, pod).tls_cert is None else "https"
                if endpoint.get("scheme", "http") != expected:
                    found.append(f"Prometheus asks over {endpoint.get('scheme', 'http')}; the server serves {expected}")
                if endpoint.get("path", "/metrics") not in HTTP_ROUTES:
                    found.append(f"Prometheus asks for {endpoint['path']}")
        for policy in of_kind(documents, "NetworkPolicy"):
            spaces = [
                source for rule in policy["spec"]["ingress"] for source in rule["from"] if "namespaceSelector" in source
            ]
            if not spaces:
                found.append("the network policy keeps Prometheus out")
    for scaler in of_kind(documents, "ScaledObject"):
        if not of_kind(documents, "PodMonitor"):
            found.append(f"{scaler['metadata']['name']} asks Prometheus, which does not read these servers")
    return found
