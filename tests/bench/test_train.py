"""The training benchmark runs what it says: valid configurations, the same work, failures told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import train
from bench.floors import lost_share
from trainer.config import load


@pytest.mark.parametrize("mix", train.MIXES, ids=lambda mix: mix.name)
def test_each_mix_is_a_valid_configuration_of_constant_work(mix: train.Mix) -> None:
    config = load(mix.config, mix.changes)
    assert config.warmup is None
    assert config.eval.prompts == 0
    assert not config.replay.filter_equal_rewards
    assert not config.checkpoint.final


def test_a_run_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    mix = train.Mix("broken", tmp_path / "no-such-file.yaml")
    with pytest.raises(train.RunFailed, match=r"no-such-file\.yaml"):
        train.run(mix, "sync", 1, tmp_path)


def test_the_ratio_compares_async_with_sync(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(mix: train.Mix, schedule: str, steps: int, folder: Path) -> list[dict[str, float]]:
        step_s = {"sync": 2.0, "async": 1.0}[schedule]
        cpu = {"engine_arithmetic": 0.9, "learner_arithmetic": 0.8, "driver": 0.1}
        cpu |= {"producer": 0.15, "learner": 0.05}
        found = {f"cpu/{name}": value for name, value in cpu.items()}
        rates = dict.fromkeys(("learner_wait_share", "tokens_per_s", "trained_tokens_per_s"), 0.25)
        return [{"step_s": step_s, **found, **rates}] * steps

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train, "lost_share", lambda seconds: 0.05)
    rows = train.compare(train.MIXES[0], steps=4, repeats=2)
    step = {row.subject: row for row in rows if row.work == "train step, balanced"}
    assert step["async"].ratio == 0.5
    assert step["sync"].n == step["async"].n == 8
    overhead = [row.median for row in rows if row.work.startswith("overhead")]
    # Outside the longest chain: 2.0 - (0.9 + 0.8) one after the other, 1.0 - 0.9 side by side; then
    # without what the machine took, which left 0.95 of each core; then the CPU time.
    sync, overlapping = (0.15, 1.0 - 0.85 / 0.95, 0.15), (0.1, 1.0 - 0.9 / 0.95, 0.15)
    assert overhead == pytest.approx([*sync, *overlapping])


def _rows(*halves: tuple[float, float]) -> list[dict[str, float]]:
    return [
        {"step_s": 1.0, "cpu/engine_arithmetic": engine, "cpu/learner_arithmetic": learner}
        for engine, learner in halves
    ]


def test_overhead_of_overlapping_halves_is_that_of_their_sums() -> None:
    """Steps in which the halves take turns at being the longer one do not hide each other."""
    rows = _rows((0.9, 0.5), (0.5, 0.8))
    assert train.overhead_share(rows, "async") == pytest.approx(1.0 - 1.4 / 2.0)
    assert train.overhead_share(rows, "sync") == pytest.approx(1.0 - 2.7 / 2.0)


def test_a_machine_that_slows_one_core_and_then_the_other_is_no_overhead() -> None:
    rows = _rows(*[(0.9, 0.5)] * 10, *[(0.6, 0.9)] * 10)
    assert train.overhead_share(rows, "async") == pytest.approx(0.1)


def test_threads_that_only_compute_lose_some_of_their_time_and_not_all_of_it() -> None:
    assert 0.0 <= lost_share(0.2) < 1.0
