"""The driver's side of the learner: calls that survive its death.

Owns the learner's handle, which version of the weights is out, and the answer to a death in the
middle of anything (lifecycle L07). A death in a step: the supervisor starts the process again, it
takes the newest whole state from the arena, and then either the step is found done (its batch is
released here, its metrics are the recorded ones) or the same batch is moved back to the learner and
trained. So nothing is lost and nothing is trained twice.

One event loop, the driver's. Raises what `actors` raises once the supervisor has given up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from actors import ActorDied
from trainer.engine.protocol import WeightsVersion
from trainer.errors import NotStarted, PartFailed
from trainer.replay import REPLAY_OWNER
from trainer.rollout import Group
from trainer.run.learner_actor import (
    LEARNER_OWNER,
    WEIGHTS_OWNER,
    BatchRows,
    LearnerReady,
    StepDone,
    done_of,
    step_of_weights,
    to_bytes,
)
from trainer.run.learner_state import LearnerStates

if TYPE_CHECKING:
    from actors import Handle
    from shmstore import Store

__all__ = ["LearnerLink", "StateLost"]


class StateLost(PartFailed):
    """The learner died and its state is in no arena (checkpoint.recovery: checkpoint): the run can
    only go back to its last checkpoint, which `trainer.fit` does.
    """


class LearnerLink:
    """See the module. `note` is told what a death comes to."""

    def __init__(self, handle: Handle, store: Store, note: Callable[[str], None]) -> None:
        self._handle = handle
        self._store = store
        self._states = LearnerStates(store)
        self._note = note
        self._checkpoint: str | None = None
        self._board: Handle | None = None
        self._train_step = self._began_at = 0
        self.weights: WeightsVersion | None = None

    async def start(self, checkpoint: str | None, board: Handle | None = None) -> LearnerReady:
        """The learner builds its model; a death while it does is tried again."""
        self._checkpoint, self._board = checkpoint, board
        ready = await self._begin()
        self._train_step = self._began_at = ready.train_step
        return ready

    async def _begin(self) -> LearnerReady:
        start = self._handle.start.using(when_down="wait")
        ready: LearnerReady = await self._insist(
            lambda: start(self._checkpoint, self._board), revive=False
        )
        return ready

    async def train(
        self, groups: Sequence[Group], train_step: int, *, publish: bool = False
    ) -> StepDone:
        """One step, exactly once; with `publish` its weights are in the arena afterwards."""
        batch = BatchRows.of(groups)
        rows = to_bytes(batch)
        while True:
            try:
                done = done_of(await self._handle.train(rows, train_step, publish))
            except (ActorDied, NotStarted) as death:
                found = await self._after_death_in_step(batch.sessions, train_step, death)
                if found is None:
                    continue
                done = found
            self._train_step = train_step
            if done.weights is not None:
                self.weights = done.weights
            elif publish:
                await self.publish(train_step)
            return done

    async def _after_death_in_step(
        self, ids: Sequence[str], train_step: int, death: Exception
    ) -> StepDone | None:
        """The step's result when it was done before the death; None when it has to be done
        again.
        """
        await self._revive(death)
        sessions = self._store.sessions
        kept = self._states.find()
        if kept is not None and kept.train_step == train_step:
            released = sessions.release(ids, owner=REPLAY_OWNER)
            released += sessions.release(ids, owner=LEARNER_OWNER)
            return StepDone(train_step, dict(kept.record["metrics"]), len(released))
        if None in sessions.owners(ids):  # released: trained, and then it died
            raise StateLost("learner", f"it died when step {train_step} was done: {death}")
        # They fell to the heir when the process died, or are the learner's still when it died
        # before they were taken; either way the same batch is trained again.
        sessions.transfer(ids, src=REPLAY_OWNER, dst=LEARNER_OWNER, strict=False)
        return None

    async def _revive(self, death: Exception) -> None:
        """A new learner with the state of the last finished step. Raises StateLost without one."""
        found = self._states.find()
        if found is None and self._train_step > self._began_at:
            raise StateLost("learner", f"it died after step {self._train_step}: {death}")
        self._note(f"the learner goes on from its state after step {self._train_step}")
        await self._begin()

    async def kill(self) -> None:
        """Ends the process now."""
        await self._handle.kill()

    async def publish(self, model_step: int) -> WeightsVersion:
        """New weights in the arena; `retire` ends the older ones once every engine has these."""
        version: WeightsVersion = await self._insist(lambda: self._handle.publish(model_step))
        self.weights = version
        return version

    def retire(self, before: int) -> None:
        """Ends the versions of the weights that are older than model step `before`."""
        held = self._store.sessions.list(owner=WEIGHTS_OWNER)
        old = [session for session in held if step_of_weights(session) < before]
        self._store.sessions.release(old, owner=WEIGHTS_OWNER)

    async def rest(self) -> None:
        """Give memory of the device back to others (colocated schedule)."""
        await self._insist(lambda: self._handle.rest())

    async def save(self, folder: str, train_step: int) -> None:
        """Model and optimizer as files."""
        await self._insist(lambda: self._handle.save(folder, train_step))

    async def export(self, folder: str) -> None:
        """A folder for from_pretrained."""
        await self._insist(lambda: self._handle.export(folder))

    async def _insist(self, call: Callable[[], Awaitable[Any]], *, revive: bool = True) -> Any:
        """Repeats a call that changes nothing when done twice, until the supervisor gives up."""
        while True:
            try:
                return await call()
            except (ActorDied, NotStarted) as death:
                if revive:
                    await self._revive(death)
                elif self._handle.state == "dead":
                    raise
