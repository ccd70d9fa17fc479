"""What must hold in a simulated run, whatever happens; what does not is a `Violation` that names
its seed.

Looks at batches as a learner gets them, at every trace in them, and at arena, index and books
together.
"""

from __future__ import annotations

from shmstore import Store
from tests.simulation.plan import Plan
from trainer.dispatch import Dispatcher
from trainer.engine.scripted import routing_of
from trainer.rollout import Batch, Status
from trainer.segment import IGNORE_LABEL, Trace
from trainer.staleness import mask_stale_labels, token_staleness
from trainer.trace import TraceStore

__all__ = ["Checker", "Violation"]


class Violation(AssertionError):
    """Something that must always hold did not."""


class Checker:
    """What holds whatever happens."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: Train step -> uids of the groups trained by it, in this history.
        self.history: dict[int, list[str]] = {}
        #: Sessions for which the engine was asked although their rollout had ended.
        self.late: list[str] = []

    def demand(self, condition: bool, what: str) -> None:
        if not condition:
            raise Violation(f"seed {self.plan.seed}: {what}")

    def batch(self, batch: Batch, step: int, traces: TraceStore, dispatcher: Dispatcher) -> None:
        """A batch that the learner is about to train."""
        plan = self.plan
        total = len(batch.groups)
        self.demand(total == plan.batch_groups, f"step {step} got {total} groups")
        # A task that ran short of prompts when the batch was split may have them again by now.
        endless = all(size is None for size in plan.sizes.values())
        if endless and dispatcher.ended_tasks() == {}:
            split = dispatcher.mix.split(step, plan.batch_groups)
            found = {task: sum(g.task == task for g in batch.groups) for task in split}
            self.demand(found == split, f"step {step} is split {found}, not {split}")
        for group in batch.groups:
            self.demand(len(group.rollouts) == plan.group_size, f"{group.uid} is not whole")
            self.demand(group.status is Status.COMPLETED, f"{group.uid} is {group.status}")
        for rollout in batch.rollouts:
            paths = [traces.export(rollout.session_id, node=leaf) for leaf in rollout.leaves]
            trainable = [self.trace(path, step) for path in paths]
            self.demand(any(trainable), f"no token of {rollout.uid} can be trained")

    def trace(self, trace: Trace, step: int) -> bool:
        """Tokens, routing and staleness of one path; -> whether any of it can still be trained."""
        plan = self.plan
        assert trace.routed_experts is not None
        wanted = routing_of(plan.script, trace.token_ids)
        self.demand(
            bool((trace.routed_experts[:-1] == wanted[:-1]).all()), "routing of another token"
        )
        sampled = trace.model_steps >= 0
        self.demand(bool(sampled.any()), "a trace without a sampled token")
        self.demand(
            bool((sampled == (trace.labels != IGNORE_LABEL)).all()), "labels and samples disagree"
        )
        oldest = int(trace.model_steps[sampled].min())
        age = token_staleness(step, oldest)
        limit = (plan.max_staleness + 1) * plan.sync_interval
        self.demand(0 <= age < limit, f"step {step} trains a token of step {oldest}, limit {limit}")
        labels = mask_stale_labels(trace.labels, trace.model_steps, step, plan.max_token_staleness)
        return bool((labels != IGNORE_LABEL).any())

    def trained(self, batch: Batch, step: int) -> None:
        """The learner has released a batch."""
        before = {uid for uids in self.history.values() for uid in uids}
        twice = before & {group.uid for group in batch.groups}
        self.demand(not twice, f"step {step} trains {sorted(twice)} again")
        self.history.setdefault(step, []).extend(group.uid for group in batch.groups)

    def arena(self, store: Store, dispatcher: Dispatcher) -> None:
        """Sessions, owners and books agree."""
        dispatcher.check_books()
        self.demand(self.late == [], f"the engine was asked for ended rollouts: {self.late}")
        problems = store.check()
        self.demand(problems == [], f"the arena is unsound: {problems}")
        owned = set(store.sessions.list("replay"))
        filed = {sid for entry in dispatcher.buffer._index for sid in entry.group.session_ids}
        self.demand(owned == filed, f"replay owns {owned ^ filed} more or less than it has filed")
