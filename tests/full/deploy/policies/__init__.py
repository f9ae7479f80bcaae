"""Policies for every rendered manifest. Each policy returns sentences that say what is wrong with the documents."""

from tests.full.deploy.policies.monitoring import prometheus_can_read
from tests.full.deploy.policies.picker import pickers_only_read, pools_have_a_picker
from tests.full.deploy.policies.pods import (
    copies_fit_the_disk,
    images_are_pinned,
    no_cluster_access,
    resources_are_set,
    restricted_pods,
    volumes_are_there,
)
from tests.full.deploy.policies.ray import rays_pods_have_probes, workers_of_ray_are_kept
from tests.full.deploy.policies.references import references_exist, selectors_find_the_pods
from tests.full.deploy.policies.scaling import (
    busy_servers_are_kept,
    interruptions_are_limited,
    one_owner_of_replicas,
    queries_name_the_namespace,
)
from tests.full.deploy.policies.servers import (
    END_SECONDS,
    gpus_are_used,
    only_named_clients_are_admitted,
    probes_ask_the_server,
    settings_exist,
    the_end_has_time,
    the_start_has_time,
    tokens_are_required,
)

__all__ = ["END_SECONDS", "POLICIES"]

POLICIES = {
    policy.__name__: policy
    for policy in (
        restricted_pods,
        no_cluster_access,
        resources_are_set,
        copies_fit_the_disk,
        probes_ask_the_server,
        rays_pods_have_probes,
        the_start_has_time,
        the_end_has_time,
        settings_exist,
        volumes_are_there,
        selectors_find_the_pods,
        references_exist,
        one_owner_of_replicas,
        busy_servers_are_kept,
        prometheus_can_read,
        queries_name_the_namespace,
        images_are_pinned,
        gpus_are_used,
        workers_of_ray_are_kept,
        interruptions_are_limited,
        tokens_are_required,
        only_named_clients_are_admitted,
        pickers_only_read,
        pools_have_a_picker,
    )
}
