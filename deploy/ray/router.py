"""`PrefixRouter`: requests whose prompts begin alike go to the same replica, as long as it keeps up."""

import asyncio
import hashlib
import random
from collections.abc import Mapping
from typing import Any

from ray.exceptions import ActorDiedError, RayActorError
from ray.serve.request_router import MultiplexMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

BOUND = 1.25
SLACK = 4  # requests; a replica with one request more than another is not busy
PING_SECONDS = 1.0


class PrefixRouter(MultiplexMixin, RequestRouter):
    """The router that `bench/notes/routing.md` calls bounded-prefix.

    A key prefers one replica (rendezvous hashing), the same one in every proxy. When replicas come and go, only their
    keys change. The preferred replica takes the request unless it has clearly more to do than the others. Otherwise,
    and for requests without a key, the better of two random replicas takes it. The key is Serve's session id:
    `sharp.ray.proxy` makes it from the prompt, and HTTP clients may send it as the header `x-session-id`.
    """

    def initialize_state(self, **_arguments: Any) -> None:
        """Start with no tasks that watch replicas."""
        self._watching: set[asyncio.Task[None]] = set()  # references, without which tasks may be collected

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in ranks; within a rank, Serve takes the replica with the fewest requests."""
        if pending_request is None:
            return [two_of(candidate_replicas)]
        replicas = candidate_replicas
        if pending_request.metadata.multiplexed_model_id:
            chosen = self.apply_multiplex_routing(pending_request)
            replicas = [replica for replica in candidate_replicas if replica.replica_id in chosen]
        pending_request.routing_context.should_backoff = True  # otherwise a full cluster is asked without a pause
        key = pending_request.metadata.session_id
        if not key or not replicas:
            return [two_of(replicas)]
        running = {
            replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in replicas
        }
        home = home_of(key, {replica_id.unique_id: requests for replica_id, requests in running.items()})
        first = [replica for replica in replicas if replica.replica_id.unique_id == home]
        return [first, two_of(replicas)] if first else [two_of(replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the replicas, and watch those that are gone, because they drain or are lost."""
        left = self.curr_replicas.keys() - {replica.replica_id for replica in replicas}
        gone = [self.curr_replicas[replica] for replica in left]
        super().update_replicas(replicas)
        for replica in gone:
            self._watch(replica)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica whose actor died, and watch it."""
        replica = self.curr_replicas.get(replica_id)
        super().on_replica_actor_died(replica_id)
        if replica is not None:
            self._watch(replica)

    def _watch(self, replica: RunningReplica) -> None:
        """Start a task that waits until the replica dies and then ends its requests."""
        task = asyncio.create_task(end_when_dead(replica))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)


def home_of(key: str, running: Mapping[str, int]) -> str | None:
    """Return the replica that a key prefers; None if that replica is busy.

    `running` has the number of requests of each replica, at least one replica. A replica is busy if it has more than
    1.25 times the mean number of requests plus 4.
    """
    home = max(running, key=lambda replica: hashlib.blake2b(f"{key} {replica}".encode()).digest())
    return None if running[home] > BOUND * sum(running.values()) / len(running) + SLACK else home


def two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Return two random replicas, or all if there are fewer."""
    return random.sample(replicas, min(2, len(replicas)))


async def end_when_dead(replica: RunningReplica) -> None:
    """End the calls to a replica that went, once Ray says that it is dead; until then it may be draining.

    When a machine is lost behind a cut link, nobody tells its clients. The connection stands, and Serve would wait in
    it for as long as Ray's gRPC does, which is seven minutes. Ray itself asks every node all the time whether it is
    there.
    """
    while True:
        try:
            await replica.get_queue_len(deadline_s=PING_SECONDS)
        except ActorDiedError:
            break
        except RayActorError:  # the replica cannot be reached now, which may pass
            pass
        await asyncio.sleep(PING_SECONDS)
    if replica._channel is not None:
        await replica._channel.close()
