"""`make gpu-check` says what it saw: every part runs on the CPU, and nothing that fails is lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_check, gpu_copies, gpu_model
from bench.report import BenchArgs, Report, Row, at_most
from tests.trainer.run.runs import TINY

SIZE = gpu_model.Size(hidden=64, layers=2, sequences=8, new_tokens=6)


def _met(rows: list[Row]) -> set[bool | None]:
    return {met for row in rows for _, met in row.verdicts()}


@pytest.mark.parametrize(
    "rows",
    [
        lambda: gpu_copies.copies("cpu", 1 << 20),
        lambda: gpu_copies.weights("cpu", "cpu", SIZE),
        lambda: gpu_model.equal_logprobs("cpu", SIZE),
        lambda: gpu_model.half_precision_logprobs("cpu", SIZE),
        lambda: gpu_model.speed("cpu", SIZE, half=True),
    ],
    ids=["copies", "weights", "log-probs", "bfloat16", "speed"],
)
def test_each_part_that_a_gpu_would_run_runs_on_the_cpu_and_meets_its_goals(rows: object) -> None:
    assert callable(rows)
    assert _met(list(rows())) == {True}


def test_equal_logprobs_are_missed_when_a_learner_has_other_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = gpu_model.Learner

    def other(model: torch.nn.Module, config: object) -> object:
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return learner(model, config)

    monkeypatch.setattr(gpu_model, "Learner", other)
    assert _met(list(gpu_model.equal_logprobs("cpu", SIZE))) == {False}


def test_a_short_training_run_is_judged_by_its_books_and_its_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "QUICKSTART", TINY)
    monkeypatch.setattr(gpu_check, "STEPS", 2)
    rows = list(gpu_check.train("train", (), learns=False))
    assert _met(rows) == {True}
    with pytest.raises(RuntimeError, match="is unknown"):
        list(gpu_check.train("train", ("learner.nonsense=1",)))


def test_a_memory_split_is_asked_for_and_seen_as_torch_declares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def empty(n_bytes: int, dtype: torch.dtype, device: str) -> None:
        raise torch.cuda.OutOfMemoryError(f"{n_bytes} on {device}")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, device: SimpleNamespace(nbytes=n))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 30)
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: asked.append((fraction, device)),
    )
    assert _met(list(gpu_copies.memory_split("cuda:0"))) == {True}
    assert asked == [(0.25, torch.device("cuda:0"))]


def test_with_gpus_every_kind_of_use_is_a_part_and_names_are_told_apart() -> None:
    without, one, two = ([part.name for part in gpu_check.parts(n)] for n in (0, 1, 2))
    assert len(set(two)) == len(two)
    assert set(without) < set(one) < set(two)
    assert not any("cuda" in name for name in without)
    for name in ("copies, cuda:0", "train on one device, split", "memory split"):
        assert name in one
    assert {"train on two devices", "weights to cuda:1"} <= set(two) - set(one)


CHILD = """
import json, sys, time
name, rows = sys.argv[1], sys.argv[3]
from dataclasses import asdict
from bench.report import Row, at_most
def tell(**more):
    with open(rows, "a") as file:
        file.write(json.dumps(asdict(Row(name, "subject", 1.0, **more))) + "\\n")
tell()
if name == "breaks":
    raise RuntimeError("the device fell off the bus")
if name == "hangs":
    time.sleep(60)
tell(goals=(at_most(2.0),))
"""


def _no_rows() -> Iterator[Row]:
    raise AssertionError("a part runs in its own process only")


def test_a_part_that_breaks_or_hangs_keeps_its_rows_and_loses_nobody_elses() -> None:
    parts = [
        gpu_check.Part("breaks", _no_rows),
        gpu_check.Part("hangs", _no_rows, limit_s=5.0),
        gpu_check.Part("good", _no_rows),
    ]
    report = Report("gpu", BenchArgs(quick=True))
    failed = gpu_check.run_parts(report, parts, [sys.executable, "-c", CHILD])
    assert failed == ["breaks", "hangs"]
    assert [row.work for row in report.rows] == ["breaks", "hangs", "good", "good"]
    assert report.rows[-1].goals == (at_most(2.0),)
    assert "fell off the bus" in report.remarks[0]
    assert "did not end within 5 s" in report.remarks[1]


def test_the_exit_status_is_that_of_the_worst_part(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Row("work", "subject", 1.0, goals=(at_most(2.0),))
    bad = Row("work", "subject", 3.0, goals=(at_most(2.0),))
    for rows, failed, status in (([good], [], 0), ([good, bad], [], 1), ([good], ["part"], 1)):

        def run(
            report: Report,
            *_: object,
            rows: list[Row] = rows,
            failed: list[str] = failed,
        ) -> list[str]:
            report.add(*rows)
            return failed

        monkeypatch.setattr(gpu_check, "run_parts", run)
        assert gpu_check.main([]) == status
