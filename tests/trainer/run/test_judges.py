"""Judges: right verdicts, and foreign code that hangs, raises, dies or talks nonsense."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import own_children
from trainer.config import JudgeConfig, SourceConfig, TaskConfig
from trainer.errors import JudgeError
from trainer.judge import build_judge, score_numeric
from trainer.rollout import Prompt
from trainer.user_code.pool import CallFailed, CallPool, CallTimedOut

BAD_JUDGES = """
import os, sys, time
import numpy as np
def hang(prompt, text):
    time.sleep(3600)
def busy(prompt, text):
    while True: pass
def raises(prompt, text):
    raise KeyError("no such thing")
def nonsense(prompt, text):
    return "very good"
def nan(prompt, text):
    return float("nan")
def dies(prompt, text):
    os._exit(7)
def unsendable(prompt, text):
    return object()
def forks(prompt, text):
    os.fork()
    time.sleep(3600)
def comes_back_twice(prompt, text):
    os.fork()
    return float(text)
def exits(prompt, text):
    sys.exit(3)
def reads(prompt, text):
    return len(input())
def computes(prompt, text):
    return np.float32(0.5) if text else np.bool_(True)
def prints(prompt, text):
    print("noise on stdout " * 100)
    return 0.25
async def later(prompt, text):
    return float(len(text) == prompt["answer"])

def half_a_letter(prompt, text): return "\\ud800"
def says_half_a_letter(prompt, text): raise ValueError("\\ud800")
"""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "judges.py"
    file.write_text(BAD_JUDGES)
    return file


def task(judge: JudgeConfig, **source: Any) -> TaskConfig:
    return TaskConfig(name="t", judge=judge, source=SourceConfig(**source))


def prompt(answer: object) -> Prompt:
    return Prompt(uid="p", task="t", text="?", answer=answer)


async def verdict(judge: JudgeConfig, answer: object, text: str) -> float:
    made = build_judge(task(judge))
    try:
        given = made.score(prompt(answer), text, None)
        return await given if isinstance(given, Coroutine) else given
    finally:
        await made.aclose()


@pytest.mark.parametrize(
    ("kind", "answer", "text", "reward"),
    [
        ("exact", "0247", " 0247\n", 1.0),
        ("exact", "0247", "0427", 0.0),
        ("numeric", "3.0", "it is 3", 1.0),
        ("numeric", 1234, "so: 1,234", 1.0),
        ("numeric", "0.5", "1/2", 0.0),
        ("numeric", "5", "no idea", 0.0),
    ],
)
async def test_inline_judges(kind: Any, answer: object, text: str, reward: float) -> None:
    assert await verdict(JudgeConfig(kind=kind), answer, text) == reward


def test_an_answer_without_a_number_is_the_data_sets_fault_and_said() -> None:
    with pytest.raises(JudgeError, match="holds no number"):
        score_numeric(prompt("none"), "3", 1e-6)


async def test_math_verify_finds_equal_forms() -> None:
    judge = JudgeConfig(kind="math_verify", timeout_s=60)
    assert await verdict(judge, "1/2", "the answer is $0.5$") == 1.0
    assert await verdict(judge, "1/2", "the answer is $0.6$") == 0.0


async def test_format_reward_pays_the_right_digits_in_a_wrong_order() -> None:
    made = build_judge(
        TaskConfig(
            name="t",
            judge=JudgeConfig(kind="exact"),
            format_reward=0.1,
            source=SourceConfig(dataset="number_sorting", render="compact_sorting"),
        )
    )
    scores = [made.score(prompt("0247"), text, None) for text in ("0247", "7240", "024")]
    assert scores == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hang", "no answer within 0.5 s"),
        ("busy", "no answer within 0.5 s"),
        ("raises", "no such thing"),
        ("nonsense", "a finite number is needed"),
        ("nan", "a finite number is needed"),
        ("dies", "exit status 7"),
        ("forks", "no answer within 0.5 s"),
        ("exits", "SystemExit: 3"),
        ("reads", "EOFError"),
        ("unsendable", "cannot be sent: object is no plain data"),
        ("half_a_letter", "cannot be sent"),
        ("says_half_a_letter", r"ValueError: .ud800"),
        ("absent", "has no `absent`"),
    ],
)
async def test_L13_a_bad_judge_fails_one_verdict_and_leaves_no_process(
    bad: Path, name: str, words: str
) -> None:
    judge = JudgeConfig(kind="callable", target=f"{bad}:{name}", timeout_s=0.5)
    with pytest.raises(JudgeError, match=words):
        await verdict(judge, 1, "x")
    assert own_children() == []


async def test_prints_coroutines_and_numbers_of_numpy_of_a_judge_do_no_harm(bad: Path) -> None:
    for name, text, reward in (
        ("prints", "x", 0.25),
        ("later", "abc", 1.0),
        ("computes", "x", 0.5),
        ("computes", "", 1.0),
    ):
        judge = JudgeConfig(kind="callable", target=f"{bad}:{name}", timeout_s=20)
        assert await verdict(judge, 3, text) == reward


async def test_a_pool_recovers_after_a_hang_and_serves_others_meanwhile(bad: Path) -> None:
    async with CallPool(2, timeout_s=1.0) as pool:
        hung = asyncio.create_task(pool.call(f"{bad}:hang", {}, ""))
        values = [await pool.call(f"{bad}:prints", {}, "") for _ in range(5)]
        assert values == [0.25] * 5
        with pytest.raises(CallTimedOut):
            await hung
        assert await pool.call(f"{bad}:prints", {}, "") == 0.25


async def test_a_judge_that_forks_answers_once(bad: Path) -> None:
    async with CallPool(1, timeout_s=30) as pool:
        for text in ("1", "2", "3"):
            assert await pool.call(f"{bad}:comes_back_twice", {}, text) == float(text)


async def test_a_cancelled_call_never_leaves_its_answer_to_the_next_one(bad: Path) -> None:
    async with CallPool(1, timeout_s=30) as pool:
        assert await pool.call("operator:add", 1, 1) == 2
        first = asyncio.create_task(pool.call(f"{bad}:hang", {}, ""))
        await asyncio.sleep(0)  # let it take the worker
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await pool.call("operator:add", 20, 22) == 42


async def test_a_closed_pool_says_so_and_arguments_must_be_plain() -> None:
    pool = CallPool(1, timeout_s=5)
    with pytest.raises(CallFailed, match="cannot be sent"):
        await pool.call("operator:add", object(), 1)
    await pool.aclose()
    with pytest.raises(CallFailed, match="closed"):
        await pool.call("operator:add", 1, 1)


def test_a_worker_dies_with_its_parent(bad: Path) -> None:
    import subprocess

    code = f"""
import asyncio, os
from trainer.user_code.pool import CallPool
async def main():
    pool = CallPool(1, 60)
    await pool.call("operator:add", 1, 1)
    hung = asyncio.create_task(pool.call({str(bad)!r} + ":busy", {{}}, ""))
    await asyncio.sleep(0.2)
    print(pool._busy.copy().pop()._process.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(out.stdout)
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
