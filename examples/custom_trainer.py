"""A trainer of one's own on the lifecycle; no torch, no actors. The task is to answer with a 7."""

import asyncio

import numpy as np

from shmstore import Store
from trainer.replay import IGNORE_LABEL, Group, ReplayBuffer, Rollout, Segment, Status, TraceStore

STEPS, BATCH, K, PROMPT = 60, 4, 8, np.array([1, 2, 3], np.int32)


def policy(logits):  # a table of ten logits; what follows is not a toy
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


async def produce(traces, buffer, state):
    rng, nothing = np.random.default_rng(0), np.zeros(3, np.int32)
    prompt = Segment(PROMPT, nothing + IGNORE_LABEL, np.zeros(3, np.float32), nothing - 1)
    for number in range(STEPS * BATCH):
        ids, rollouts = [f"g{number}-{k}" for k in range(K)], []
        for session_id in ids:
            traces.open(session_id, owner="producer-0")
        traces.insert_shared(ids, prompt)  # stored once for all K
        for session_id in ids:
            probabilities, step = policy(state["logits"]), np.array([state["step"]], np.int32)
            token = rng.choice(10, size=1, p=probabilities).astype(np.int32)
            logprob = np.log(probabilities[token]).astype(np.float32)
            traces.insert(session_id, Segment(token, token, logprob, step), parent=0)
            reward = float(token[0] == 7)
            rollouts.append(Rollout(session_id, status=Status.COMPLETED, reward=reward))
        await buffer.put(Group(rollouts=tuple(rollouts)), task="seven", owner="producer-0")
        await asyncio.sleep(0)  # the learner's turn


async def train(store):
    traces, buffer = TraceStore(store), ReplayBuffer(store, max_bytes=1 << 20)
    state = {"logits": np.zeros(10), "step": 0}
    async with asyncio.TaskGroup() as tasks:  # an error of either side ends both
        tasks.create_task(produce(traces, buffer, state))
        for step in range(1, STEPS + 1):
            batch = await buffer.take({"seven": BATCH}, train_step=step, owner="learner")
            for group in batch.groups:
                baseline = np.mean([rollout.reward for rollout in group.rollouts])
                for rollout in group.rollouts:
                    trace = traces.export(rollout.session_id)  # one copy, out of the arena
                    gradient = np.eye(10)[trace.token_ids[-1]] - policy(state["logits"])
                    state["logits"] += 0.1 * (rollout.reward - baseline) * gradient
            traces.release(batch.session_ids, owner="learner")  # exactly what was taken
            state["step"] = step
            buffer.check_books()
    print("reward", batch.report.total.raw_reward_mean, buffer.accounts.ledger.total)


if __name__ == "__main__":
    with Store.create("custom-trainer", capacity="64MiB") as arena:
        Store.unlink("custom-trainer")  # nobody else attaches: it ends with us, however we end
        asyncio.run(train(arena))
        assert arena.stats().sessions == arena.stats().objects == 0
