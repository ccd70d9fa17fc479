"""Which versions of the weights are in the arena while engines move from one to the next."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from shmstore import Store
from trainer.run.learner_actor import WEIGHTS_OWNER, weights_session
from trainer.run.learner_link import LearnerLink


def test_L20_versions_older_than_what_the_engines_run_are_freed_and_newer_ones_are_not(
    store: Store,
) -> None:
    for step in (9, 10, 11):
        session = weights_session(step)
        store.sessions.open(session, owner=WEIGHTS_OWNER)
        store.put(np.full(1024, step, np.uint8), session=session)
    link = LearnerLink(cast(Any, None), store, note=print)
    link.retire(before=10)  # the engines have 10; 11 is published and on its way
    left = [weights_session(10), weights_session(11)]
    assert sorted(store.sessions.list(owner=WEIGHTS_OWNER)) == left
    assert store.stats().objects == 2
    store.sessions.release_owned(WEIGHTS_OWNER)
