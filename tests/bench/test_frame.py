"""The benchmarks' frame: verdicts, ratios, outputs, workers. No speed is judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import peers
from bench.__main__ import main
from bench.report import (
    BenchArgs,
    Report,
    Row,
    Samples,
    at_least,
    at_most,
    collect,
    human,
    interleave,
    size_name,
)


def test_a_goal_is_met_on_the_right_side_of_its_bound() -> None:
    row = Row("w", "s", 2.0, p99=5.0, ratio=0.9, goals=(at_most(2.0), at_least(2.1)))
    assert [met for _, met in row.verdicts()] == [True, False]
    row = Row("w", "s", 2.0, p99=5.0, goals=(at_most(4.0, "p99"), at_most(1.0, "ratio")))
    assert [met for _, met in row.verdicts()] == [False, None]


def test_the_ratio_is_taken_within_each_round() -> None:
    ours = Samples((10.0, 100.0, 30.0))
    floor = Samples((10.0, 50.0, 10.0))
    assert ours.ratio_to(floor) == 2.0
    with pytest.raises(ValueError, match="not from one interleave"):
        ours.ratio_to(Samples((1.0,)))


def test_interleaved_laps_alternate_and_leave_the_warm_up_out() -> None:
    order: list[str] = []

    def recorder(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = interleave({"a": lambda: recorder("a"), "b": lambda: recorder("b")}, n=2, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert taken["a"].n == taken["b"].n == 2
    assert taken["a"].laps_ns == (4.0, 5.0)


def test_samples_know_their_median_and_p99() -> None:
    samples = collect(iter(range(1, 204)).__next__, n=200, warm_up=3)
    assert samples.median_s == pytest.approx(103.5e-9)
    assert samples.p99_s == pytest.approx(202e-9)


def test_figures_are_written_for_people() -> None:
    assert human(1.1e-6, "s") == "1.1 µs"
    assert human(42e-9, "s") == "42 ns"
    assert human(600_000, "1/s") == "600,000/s"
    assert human(128, "B") == "128 B"
    assert size_name(384 << 10) == "384 KiB"


def test_a_report_writes_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("store", BenchArgs(json=tmp_path / "r.json"))
    report.add(
        Row("put 1 KiB", "shmrl", 1e-6, goals=(at_most(2e-6),)),
        Row("puts", "shmrl", 5e5, unit="1/s", goals=(at_least(6e5),)),
    )
    report.remark("something was missing")
    assert report.finish() == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert [row["met"] for row in document["rows"]] == [True, False]
    assert document["remarks"] == ["something was missing"]
    assert document["machine"]["cores"] >= 1
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "put 1 KiB" in capsys.readouterr().out


def test_quick_and_partial_runs_leave_the_results_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    for args in (BenchArgs(quick=True), BenchArgs(only="sessions")):
        report = Report("store", args)
        report.add(Row("w", "s", 1.0))
        report.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_none_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["store", "--quick", "--only", "relase"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "no part's name contains 'relase': core, objects" in told.err


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["nothing"])
    assert refused.value.code == 2
    assert "nothing" in capsys.readouterr().err


def test_a_worker_that_fails_becomes_a_remark() -> None:
    rows, remarks = peers.run_worker("store_of_nobody", python=sys.executable)
    assert rows == []
    assert "store_of_nobody: exit 1" in remarks[0]


def test_a_worker_brings_its_rows_back() -> None:
    rows, remarks = peers.run_worker("store_raw_file", python=sys.executable, quick=True)
    assert remarks == []
    assert {row.work for row in rows} >= {"put 1 KiB", "get + touch 1 KiB", "free 1 KiB"}
    assert all(row.median > 0 for row in rows)
