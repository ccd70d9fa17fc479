"""What a run says of itself: snapshots, `shmrl top`, Prometheus text, logs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import actors
from actors import top
from actors.rundir import live_runs, runs_root, status_socket, sweep
from actors.status import read_status
from shmstore.testing import unique_name


class Noisy:
    async def work(self) -> int:
        return 1

    async def fail(self) -> None:
        raise ValueError("no")

    async def say(self, text: str) -> None:
        print(text)
        print(text.upper(), file=sys.stderr)

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_a_snapshot_counts_calls_and_shows_state_memory_and_arena() -> None:
    async with actors.Runtime(store="64MiB", name=unique_name("obs")) as rt:
        noisy = await rt.spawn(Noisy, name="noisy")
        for _ in range(10):
            await noisy.work()
        with pytest.raises(ValueError, match="no"):
            await noisy.fail()
        waiting = noisy.wait()
        rt.store.sessions.open("s-1", owner="tester")
        rt.store.put(np.ones(100), session="s-1")
        snapshot = await rt.snapshot()
        row = snapshot["actors"][0]
        assert (row["name"], row["state"], row["restarts"]) == ("noisy", "up", 0)
        assert row["pid"] == noisy.pid
        assert row["methods"]["work"]["count"] == 10
        assert 0 < row["methods"]["work"]["p50_us"] <= row["methods"]["work"]["p99_us"]
        assert row["methods"]["fail"]["errors"] == 1
        assert row["running"] == 1
        assert row["memory"]["pss_bytes"] > 1 << 20
        assert snapshot["store"]["by_owner"]["tester"][0] == 1
        waiting.cancel()
        rt.store.sessions.release(["s-1"], owner="tester")


async def test_top_shows_a_live_run_from_another_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with actors.Runtime() as rt:
        await rt.spawn(Noisy, name="noisy")
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", f"from actors.top import main; main(['{rt.name}', '--json'])"],
            capture_output=True, text=True, check=True, cwd=Path(actors.__file__).parents[1],
        )  # fmt: skip
        assert json.loads(done.stdout)["actors"][0]["name"] == "noisy"
        assert await asyncio.to_thread(top.main, [rt.name, "--once"]) == 0
        assert "noisy" in capsys.readouterr().out
        assert await asyncio.to_thread(top.main, []) == 0
        assert rt.name in capsys.readouterr().out
        # no terminal: one table, and it ends
        assert await asyncio.to_thread(top.main, [rt.name]) == 0
    assert top.main([rt.name]) == 1
    assert "no run named" in capsys.readouterr().err


async def test_an_actor_that_does_not_answer_is_shown_as_unresponsive() -> None:
    async with actors.Runtime(stop_timeout=0.1) as rt:
        noisy = await rt.spawn(Noisy, name="noisy")
        os.kill(noisy.pid, signal.SIGSTOP)
        row = (await asyncio.to_thread(read_status, rt.name))["actors"][0]
        assert "did not answer" in row["unresponsive"]
        assert row["memory"]["rss_bytes"] > 0


async def test_prometheus_text_is_served_on_the_loopback_when_a_port_is_given() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with actors.Runtime(metrics_port=port) as rt:
        noisy = await rt.spawn(Noisy, name="noisy")
        await noisy.work()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 200")
        labels = f'run="{rt.name}",actor="noisy"'
        assert f"shmrl_actor_up{{{labels}}} 1" in answer
        assert f'shmrl_actor_method_calls_total{{{labels},method="work"}} 1' in answer


async def test_output_is_forwarded_with_the_actors_name_and_kept_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with actors.Runtime(log_dir=tmp_path) as rt:
        noisy = await rt.spawn(Noisy, name="noisy")
        await noisy.say("hello there")
        own = await rt.spawn(Noisy, name="own", log=tmp_path / "elsewhere.txt")
        await own.say("other file")
    out, err = capsys.readouterr()
    assert "[noisy] hello there" in out
    assert "[noisy] HELLO THERE" in err
    kept = (tmp_path / "noisy.log").read_text().splitlines()
    assert sorted(kept) == ["HELLO THERE", "hello there"]
    assert "other file" in (tmp_path / "elsewhere.txt").read_text()


async def test_a_run_whose_driver_was_killed_is_not_listed_and_the_next_run_sweeps_it() -> None:
    name = unique_name("dead")
    driver = """
import asyncio, os, signal, sys, actors
async def main():
    async with actors.Runtime(name=sys.argv[1]):
        print("up", flush=True)
        await asyncio.Event().wait()
actors.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", driver, name], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert name in live_runs()
        process.kill()
    assert name not in live_runs()
    with pytest.raises(actors.RuntimeClosed, match=r"no run named .* is alive"):
        status_socket(name)
    async with actors.Runtime():
        assert not (runs_root() / name).exists()


async def test_the_folder_of_a_live_run_is_not_swept_and_is_made_again_if_removed() -> None:
    async with actors.Runtime() as rt:
        folder = runs_root() / rt.name
        async with actors.Runtime():
            assert rt.name not in sweep()
        assert (folder / "status.sock").exists()
        shutil.rmtree(folder)  # by somebody who cleans /tmp
        victim = await rt.spawn(Chatty)
        assert await victim.pid() > 0
    assert not folder.exists()


class Chatty:
    async def pid(self) -> int:
        return os.getpid()


def _row(name: str) -> dict[str, object]:
    methods = {"train": {"count": 61, "mean_us": 2e5, "p50_us": 234_900.0, "p99_us": 349_800.0}}
    row = {"name": name, "state": "up", "pid": 4_194_303, "restarts": 0, "waiting": 0, "running": 1}
    return row | {"memory": {"pss_bytes": 373 << 20}, "methods": methods}


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (120, ["restarts", "train 235 ms / 350 ms"], []),
        (80, ["restarts", "train 235 ms"], ["350 ms"]),
        (60, ["calls", "wait", "run"], ["235 ms"]),
        (30, ["state", "pid"], ["calls"]),
    ],
)
def test_a_narrow_terminal_leaves_columns_out_and_wraps_or_cuts_none(
    width: int, shown: list[str], left_out: list[str]
) -> None:
    rows = [_row("producer"), _row("engine-0")]
    store = {"used": 16 << 20, "capacity": 1 << 30, "objects": 526, "sessions": 466}
    owners = {"producer-0": (256, 448, 1 << 20), "replay": (208, 416, 1 << 20)}
    snapshot = {"run": "sort-digits", "pid": 4_194_303, "uptime_s": 44.2, "actors": rows}
    console = Console(width=width, file=io.StringIO())
    console.print(top.make_picture(snapshot | {"store": store | {"by_owner": owners}}, width))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 7  # title, header, a line an actor, the arena and a line an owner
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines[1:4])
    assert lines[0].startswith("sort-digits")
    assert lines[3].split()[:2] == ["engine-0", "up"]
    assert all(text in "\n".join(lines) for text in shown)
    assert not any(text in "\n".join(lines) for text in left_out)


def test_durations_in_the_table_have_a_fitting_unit() -> None:
    shown = [top._duration(us) for us in (12.3, 4_560.0, 22_805_679.0)]
    assert shown == ["12 µs", "4.56 ms", "22.8 s"]
