"""Which replica gets a request: the one that has read the conversation, unless it is too busy."""

from __future__ import annotations

import random

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

# a session of this form names the replica itself
EXACT = "replica:"
# how much busier than the average the replica of a conversation may be before others help
BOUND = 1.25


class Affinity(ConsistentHashRouter):
    """Consistent hashing with bounded loads; requests of no session to the idler of two.

    Without the bound everything that begins alike would be read by one replica while the others
    are idle.
    """

    def initialize_state(self, **kwargs: int) -> None:
        self._slack = kwargs.pop("slack", 8)
        super().initialize_state(**kwargs)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups, the first one that has room for it gets it."""
        session = pending_request.metadata.session_id if pending_request is not None else ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if session.startswith(EXACT):
            name = session[len(EXACT) :]
            if exact := [r for r in candidate_replicas if r.replica_id.unique_id == name]:
                return [exact]
        if not session or session.startswith(EXACT):
            two = min(2, len(candidate_replicas))
            return [random.sample(candidate_replicas, two), candidate_replicas]
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        loads = {r.replica_id: self._load(r) for r in candidate_replicas}
        most = BOUND * sum(loads.values()) / max(1, len(loads)) + self._slack
        free = [rank for rank in ranks if loads.get(rank[0].replica_id, 0) <= most]
        busy = [rank for rank in ranks if rank not in free]
        return [*free, *busy, candidate_replicas]

    def _load(self, replica: RunningReplica) -> int:
        """Its requests under way, as far as this router knows without asking."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
