"""What happens to sequences that run: aborts, new weights and faults fail no other of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.trainer.model.engines import LONG, Brake, endless, running, same_generation
from tests.trainer.model.families import family, generate, request
from trainer.engine.protocol import Answers, Generation, Submits, WeightsVersion
from trainer.engine.torch_engine import EngineClosed, TorchEngine
from trainer.errors import EngineError
from trainer.model.config import EngineConfig
from trainer.rollout import FinishReason


def test_the_time_that_the_worker_is_busy_is_known_while_it_still_is() -> None:
    async def run() -> None:
        async with running() as engine:
            brake = Brake(engine, at=6)
            task = asyncio.create_task(engine.generate(endless("r")))
            await brake.reached()
            first = engine.counters.busy_s
            assert first > 0
            brake.let_go()
            await task
            assert engine.counters.busy_s > first

    asyncio.run(run())


def test_what_ends_while_the_engine_computes_is_handed_over_every_few_passes() -> None:
    """Twelve requests end in twelve passes while a long one goes on."""

    async def run() -> None:
        async with running(max_batch=16) as engine:
            handed_over: list[int] = []
            deliver = engine._deliver

            def counted(outcomes: list[Any]) -> None:
                handed_over.append(len(outcomes))
                deliver(outcomes)

            engine._deliver = counted  # type: ignore[method-assign]
            long = asyncio.create_task(engine.generate(endless("long")))
            short = [endless(f"r{n}", n) for n in range(1, 13)]
            await asyncio.gather(*(engine.generate(one) for one in short))
            assert not long.done()
            await long
            assert sum(handed_over) == 13
            assert len(handed_over) <= 5

    asyncio.run(run())


@pytest.mark.parametrize(("n_short", "passes_max"), [(1, 16), (4, 4)])
def test_few_that_end_are_handed_over_later_than_many_and_long_before_the_rest(
    n_short: int, passes_max: int
) -> None:
    """Of 24: one is less than an eighth and waits for the limit, four are enough."""

    async def run() -> None:
        async with running(max_batch=24) as engine:
            others = [endless(f"long{n}") for n in range(24 - n_short)]
            longs = [asyncio.ensure_future(engine.generate(one)) for one in others]
            shorts = [
                asyncio.ensure_future(engine.generate(endless(f"s{n}", 1))) for n in range(n_short)
            ]
            passes: list[int] = []
            tell = engine._tell

            def counted(callback: Any, *args: Any) -> None:
                passes.append(engine._steps)
                tell(callback, *args)

            engine._tell = counted  # type: ignore[method-assign]
            await asyncio.gather(*shorts)
            assert not any(long.done() for long in longs)
            assert passes[0] == passes_max
            await asyncio.gather(*longs)

    asyncio.run(run())


def test_abort_keeps_what_there_is_and_leaves_the_others_alone() -> None:
    async def run() -> None:
        async with running(max_batch=2) as engine:
            brake = Brake(engine, at=6)
            asked = [endless(f"r{i}") for i in range(3)]
            tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
            await brake.reached()
            assert await engine.abort(["r0", "r2", "unknown"]) == 2
            brake.let_go()
            first, other, waiting = await asyncio.gather(*tasks)
        assert first.finish_reason is FinishReason.ABORT
        assert len(first.token_ids) == 6
        assert first.routed_experts is not None
        assert len(first.routed_experts) == 3 + len(first.token_ids) - 1
        assert other.finish_reason is not FinishReason.ABORT
        assert len(other.token_ids) == LONG
        assert first.token_ids.tolist() == other.token_ids.tolist()[:6]
        # It never started: nothing sampled, and only then may routing be missing.
        assert waiting.finish_reason is FinishReason.ABORT
        assert len(waiting.token_ids) == 0
        assert waiting.routed_experts is None

    asyncio.run(run())


def test_weights_swap_between_two_decode_steps_and_each_token_says_which_step_made_it() -> None:
    def negate(model: Any, weights: WeightsVersion) -> None:
        model.lm_head.weight.data.neg_()

    async def run() -> Generation:
        async with running("llama", load_weights=negate) as engine:
            brake = Brake(engine, at=6)
            task = asyncio.create_task(engine.generate(endless("r")))
            await brake.reached()
            swap = asyncio.create_task(engine.load_weights(WeightsVersion(b"", 7), "in_flight"))
            await asyncio.sleep(0)  # the swap's first step: into the worker's inbox
            brake.let_go()
            await swap
            assert engine.model_step == 7
            made = await task
            after = await engine.generate(request("after", [3, 4], max_new_tokens=3))
        assert set(after.model_steps.tolist()) == {7}
        return made

    made = asyncio.run(run())
    assert made.model_steps.tolist() == [0] * 6 + [7] * (LONG - 6)
    old = generate(*family("llama"), [endless("r")])[0].token_ids.tolist()
    assert made.token_ids.tolist()[:6] == old[:6]
    assert made.token_ids.tolist()[6:] != old[6:]


def test_pause_lets_running_sequences_end_under_the_old_weights() -> None:
    async def run() -> None:
        async with running(load_weights=lambda model, weights: None) as engine:
            brake = Brake(engine, at=4)
            task = asyncio.create_task(engine.generate(endless("r")))
            await brake.reached()
            swap = asyncio.create_task(engine.load_weights(WeightsVersion(b"", 4), "pause"))
            later = asyncio.create_task(engine.generate(request("later", [3, 4])))
            await asyncio.sleep(0)  # both are in the worker's inbox
            brake.let_go()
            await swap
            assert set((await task).model_steps.tolist()) == {0}
            assert set((await later).model_steps.tolist()) == {4}

    asyncio.run(run())


def test_prefixes_of_the_old_weights_are_not_used_under_the_new() -> None:
    def negate(model: Any, weights: WeightsVersion) -> None:
        for value in model.parameters():
            value.data.neg_()

    async def run() -> tuple[Generation, int]:
        async with running("llama", load_weights=negate) as engine:
            await engine.generate(request("a", [3, 4, 5], group="g"))
            await engine.load_weights(WeightsVersion(b"", 1), "in_flight")
            made = await engine.generate(request("b", [3, 4, 5], group="g"))
            return made, engine.counters.contexts_reused

    made, reused = asyncio.run(run())
    model, tokenizer = family("llama")
    negate(model, WeightsVersion(b"", 1))
    assert reused == 0
    assert made.token_ids.tolist() == (
        generate(model, tokenizer, [request("b", [3, 4, 5])])[0].token_ids.tolist()
    )


def test_weights_that_cannot_be_loaded_fail_the_load_and_not_the_rollouts() -> None:
    def load(model: Any, weights: WeightsVersion) -> None:
        raise ValueError("no such object")

    async def run() -> None:
        async with running(load_weights=load) as engine:
            task = asyncio.create_task(engine.generate(endless("r")))
            with pytest.raises(EngineError, match="no such object"):
                await engine.load_weights(WeightsVersion(b"", 3), "in_flight")
            assert engine.model_step == 0
            assert len((await task).token_ids) == LONG

    asyncio.run(run())


@pytest.mark.parametrize("submitted", [False, True])
def test_a_cancelled_request_leaves_the_batch(submitted: bool) -> None:
    async def run() -> None:
        async with running(max_batch=1) as engine:
            brake = Brake(engine, at=4)
            asked = endless("r")
            heard: list[Answers] = []
            if submitted:
                engine.submit([asked], heard.append)
                await brake.reached()
                engine.drop([asked])
            else:
                task = asyncio.ensure_future(engine.generate(asked))
                await brake.reached()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            brake.let_go()
            await engine.generate(request("next", [3, 4], max_new_tokens=2))
            assert engine.counters.running == 0
            assert engine.counters.decode_steps < LONG
            assert not heard, "nobody waited for it"
            assert not engine._asked, "and it is not counted among those that somebody waits for"

    asyncio.run(run())


def test_requests_given_together_are_answered_each_once_also_those_that_are_refused() -> None:
    async def run() -> None:
        async with running() as engine:
            assert isinstance(engine, Submits)
            heard: list[tuple[str, type]] = []
            all_heard = asyncio.Event()

            def answered(answers: Answers) -> None:
                heard.extend((asked.request_id, type(answer)) for asked, answer in answers)
                if len(heard) == 4:
                    all_heard.set()

            asked = [
                request("a", [3, 4], max_new_tokens=2),
                request("empty", []),
                request("b", [3, 4], max_new_tokens=5),
                request("c", [3, 4]).evolve(token_ids=[1 << 40]),
            ]
            engine.submit(asked, answered)
            assert not heard, "not before submit has returned"
            await all_heard.wait()
            assert sorted(heard, key=lambda one: one[0]) == [
                ("a", Generation),
                ("b", Generation),
                ("c", OverflowError),
                ("empty", EngineError),
            ]

    asyncio.run(run())


def test_a_listener_that_raises_is_reported_and_keeps_nothing_from_the_others() -> None:
    async def run() -> None:
        reported: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: reported.append(about["exception"]))

        def raises(_: Answers) -> None:
            raise ValueError("a listener")

        async with running() as engine:
            for limit in (2, 50):  # one ends by itself, one when the engine is closed
                engine.submit([request(f"r{limit}", [3, 4], max_new_tokens=limit)], raises)
                other = request(f"s{limit}", [3, 4], max_new_tokens=2)
                assert (await engine.generate(other)).token_ids.size
        assert list(map(type, reported)) == [ValueError] * 2

    asyncio.run(run())


def test_a_closed_engine_answers_what_was_submitted() -> None:
    async def run() -> None:
        heard: list[Answers] = []
        async with running() as engine:
            brake = Brake(engine, at=2)
            engine.submit([endless("r"), endless("s")], heard.append)
            await brake.reached()
            brake.let_go()
        ended = [answer for answers in heard for _, answer in answers]
        assert len(ended) == 2
        assert all(
            isinstance(one, EngineClosed) or one.finish_reason is FinishReason.ABORT
            for one in ended
        )
        with pytest.raises(EngineClosed):
            engine.submit([endless("t")], heard.append)

    asyncio.run(run())


def test_logits_that_are_not_finite_fail_one_rollout_and_poison_nobody() -> None:
    long, short = [3, 4, 5, 6, 7, 8, 9, 10], [3, 4]

    async def run() -> None:
        async with running("llama", prefix_bytes=0) as engine:
            embedding = engine._runner.model.model.embed_tokens
            poisoned = embedding.weight.detach().clone()  # untied: the head must stay finite
            poisoned[50] = float("nan")
            embedding.weight = torch.nn.Parameter(poisoned)
            bad = [request(f"bad{i}", [50] * 20) for i in range(2)]
            good = asyncio.create_task(engine.generate(request("good", short, temperature=0.0)))
            for failure in await asyncio.gather(
                *[engine.generate(one) for one in bad], return_exceptions=True
            ):
                assert isinstance(failure, EngineError)
                assert "not finite" in str(failure)
            made = await good
            # In the slots of the failed, one long and one short: what lies behind the short one's
            # end is masked, and must be finite all the same.
            _, again = await asyncio.gather(
                engine.generate(request("long", long, temperature=0.0)),
                engine.generate(request("again", short, temperature=0.0)),
            )
            assert made.token_ids.tolist() == again.token_ids.tolist()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_sequences_that_run_go_on_when_the_cache_grows_under_them(name: str) -> None:
    first, later = request("first", [3, 4, 5], max_new_tokens=20), request("later", [6] * 70)

    async def run() -> list[Generation]:
        async with running(name) as engine:
            brake = Brake(engine, at=5)
            task = asyncio.create_task(engine.generate(first))
            await brake.reached()
            more = asyncio.create_task(engine.generate(later))
            await asyncio.sleep(0)  # it is in the worker's inbox
            brake.let_go()
            return [await task, await more]

    made = asyncio.run(run())
    assert len(made[0].token_ids) > 5
    model, tokenizer = family(name)
    for asked, result in zip((first, later), made, strict=True):
        same_generation(result, generate(model, tokenizer, [asked])[0])


async def begin_to_close(
    engine: TorchEngine,
) -> tuple[Brake, asyncio.Task[Generation], asyncio.Task[None]]:
    """An engine at a brake in the middle of a request, that has been asked to end."""
    brake = Brake(engine, at=4)
    task = asyncio.create_task(engine.generate(endless("r")))
    await brake.reached()
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)  # it has asked the worker to end
    return brake, task, closing


def test_closing_ends_everybody_with_what_they_have() -> None:
    async def run() -> None:
        async with running() as engine:
            brake, task, closing = await begin_to_close(engine)
            brake.let_go()
            await closing
            assert (await task).finish_reason is FinishReason.ABORT
            with pytest.raises(EngineClosed):
                await engine.generate(request("late", [3]))

    asyncio.run(run())


def test_a_broken_worker_is_an_error_for_all_and_a_hang_for_none() -> None:
    async def run() -> None:
        async with running() as engine:

            def broken(*_: Any) -> None:
                raise RuntimeError("our own mistake")

            engine._batcher.admit = broken  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="our own mistake"):
                await engine.generate(request("r", [3]))
            with pytest.raises(EngineError, match="our own mistake"):
                await engine.generate(request("s", [3]))

    asyncio.run(run())


@pytest.mark.parametrize("culprit", ["loader", "batcher"])
def test_weights_on_the_way_when_the_worker_breaks_are_an_error_and_no_hang(culprit: str) -> None:
    def broken(*_: Any) -> None:
        raise SystemExit("our own mistake")

    async def run() -> None:
        loader = broken if culprit == "loader" else lambda *_: None
        async with running(load_weights=loader) as engine:
            engine._batcher.weights_changed = broken  # type: ignore[method-assign]
            loads = (engine.load_weights(WeightsVersion(b"", step, 0)) for step in (1, 2))
            async with asyncio.timeout(30):
                found = await asyncio.gather(*loads, return_exceptions=True)
            for error in found:
                assert isinstance(error, EngineError)
                assert "our own mistake" in str(error)

    asyncio.run(run())


def test_a_close_that_was_cancelled_is_done_by_the_next() -> None:
    async def run() -> None:
        async with running() as engine:
            brake, task, closing = await begin_to_close(engine)
            closing.cancel()
            await asyncio.wait([closing])
            brake.let_go()
            await engine.aclose()
            assert task.done()
            assert engine._worker is not None
            assert not engine._worker.is_alive()

    asyncio.run(run())


def test_an_engine_whose_loop_was_closed_under_it_can_be_closed_on_another() -> None:
    model, tokenizer = family("qwen3_moe")
    engine = TorchEngine(model, tokenizer, EngineConfig())
    brake = Brake(engine, at=4)

    async def begin() -> None:
        engine.submit([endless("r")], lambda answers: None)
        await brake.reached()

    async def end() -> None:
        async with asyncio.timeout(30):
            await engine.aclose()

    asyncio.run(begin())
    brake.let_go()
    asyncio.run(end())
    assert engine._worker is not None
    assert not engine._worker.is_alive()
