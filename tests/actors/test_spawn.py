"""Starting actors: where classes may live, what a process gets, names, teams, placement."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import actors
from actors import placement


class Bare:
    pass


class Probe:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    async def given(self) -> Any:
        return self.args, self.kwargs

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def cwd(self) -> str:
        return os.getcwd()

    async def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    async def place(self) -> tuple[str, int, int]:
        me = actors.current()
        return me.name, me.rank, me.size

    async def modules(self) -> list[str]:
        return sorted(sys.modules)

    async def numpy_state(self) -> int:
        import numpy as np

        return int(np.random.randint(1 << 30))

    async def pid(self) -> int:
        return os.getpid()

    @actors.method(idempotent=True)
    async def die_first(self, marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            os._exit(1)
        return "second time"

    async def die_always(self, marker: str) -> None:
        with open(marker, "a") as out:
            out.write("x")
        os._exit(1)

    async def stop(self) -> str:
        return "the actor's own stop"


async def test_a_class_may_be_local_or_hold_a_lambda() -> None:
    class Local:
        scale = staticmethod(lambda x: x * 3)

        async def times(self, x: int) -> int:
            return int(self.scale(x))

    async with actors.Runtime() as rt:
        assert await (await rt.spawn(Local)).times(2) == 6


def test_a_class_of_main_and_its_exceptions_travel_by_value(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import actors\n"
        "class Oops(Exception): pass\n"
        "FACTOR = 3\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "class W:\n"
        "    async def times(self, p): return Point(p.x * FACTOR)\n"
        "    async def fail(self): raise Oops('bad')\n"
        "async def main():\n"
        "    async with actors.Runtime() as rt:\n"
        "        w = await rt.spawn(W)\n"
        "        p = await w.times(Point(2))\n"
        "        assert isinstance(p, Point) and p.x == 6\n"
        "        try: await w.fail()\n"
        "        except Oops as e: print('caught', e, isinstance(e, actors.RemoteError))\n"
        "actors.run(main())\n"
    )
    root = str(Path(actors.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout == "caught bad True\n", done.stderr


async def test_env_cwd_and_arguments_arrive(tmp_path: Path) -> None:
    async with actors.Runtime() as rt:
        probe = await rt.spawn(Probe, 1, x=2, env={"PROBE": "yes"}, cwd=tmp_path)
        assert await probe.given() == ((1,), {"x": 2})
        assert await probe.environment("PROBE") == "yes"
        assert await probe.cwd() == str(tmp_path)
        other = await rt.spawn(Probe)
        assert await other.environment("PROBE") is None


async def test_words_of_ray_are_told_what_they_are_here() -> None:
    async with actors.Runtime(gpus=0) as rt:
        probe = await rt.spawn(Probe)
        with pytest.raises(actors.NoSuchMethod, match="call it directly"):
            probe.pid.remote()
        with pytest.raises(actors.NoSuchMethod, match=r"there is: pid, .*die_always"):
            _ = probe.pidd
        with pytest.raises(actors.UsageError, match="here it is `gpus=`"):
            await rt.spawn(Bare, num_gpus=1)
        with pytest.raises(actors.UsageError, match="here it is `gpus=`"):
            await rt.spawn_many(Bare, 2, num_gpus=1)
        with pytest.raises(actors.UsageError, match="env maps text to text, got 5"):
            await rt.spawn(Bare, env=5)  # type: ignore[arg-type]
        with pytest.raises(actors.PlacementError, match="asks for 1 GPU; there is none that"):
            await rt.spawn(Probe, gpus=1)


async def test_gpus_are_disjoint_and_come_back_when_an_actor_ends() -> None:
    async with actors.Runtime(gpus=[4, 5, 7]) as rt:
        one = await rt.spawn(Probe, gpus=2)
        two = await rt.spawn(Probe, gpus=1)
        none = await rt.spawn(Probe)
        seen = [await p.environment("CUDA_VISIBLE_DEVICES") for p in (one, two, none)]
        assert seen == ["4,5", "7", ""]
        with pytest.raises(actors.PlacementError, match="of 3 GPUs 0 are free"):
            await rt.spawn(Probe, gpus=1)
        await one.stop()
        again = await rt.spawn(Probe, gpus=2)
        assert await again.environment("CUDA_VISIBLE_DEVICES") == "4,5"


async def test_cores_are_disjoint_and_pinned() -> None:
    async with actors.Runtime() as rt:
        n = len(os.sched_getaffinity(0))
        pinned = [await rt.spawn(Probe, cpus=1) for _ in range(n)]
        cores = [await p.cores() for p in pinned]
        assert sorted(c for s in cores for c in s) == sorted(os.sched_getaffinity(0))
        with pytest.raises(actors.PlacementError, match="cores"):
            await rt.spawn(Probe, cpus=1)


async def test_a_reservation_sets_devices_aside_for_a_group() -> None:
    async with actors.Runtime(gpus=4) as rt:
        await rt.reserve("engines", gpus=3)
        with pytest.raises(actors.PlacementError):
            await rt.spawn(Probe, gpus=2)
        engine = await rt.spawn(Probe, gpus=2, within="engines")
        assert await engine.environment("CUDA_VISIBLE_DEVICES") == "0,1"
        with pytest.raises(actors.UsageError, match="alive"):
            await rt.unreserve("engines")
        await engine.stop()
        await rt.unreserve("engines")
        assert await (await rt.spawn(Probe, gpus=4)).pid()


async def test_a_team_knows_ranks_asks_each_and_any_and_starts_whole_or_not() -> None:
    async with actors.Runtime(gpus=2) as rt:
        team = await rt.spawn_many(Probe, 3, "shared", name="team")
        assert await team.each.place() == [(f"team-{i}", i, 3) for i in range(3)]
        assert await team.any.given() == (("shared",), {})
        assert [m.name for m in team] == ["team-0", "team-1", "team-2"]
        with pytest.raises(actors.PlacementError):
            await rt.spawn_many(Probe, 3, gpus=1)
        assert len([r for r in (await rt.snapshot())["actors"] if r["state"] == "up"]) == 3


async def test_names_are_unique_looked_up_and_awaited() -> None:
    async with actors.Runtime() as rt:
        with pytest.raises(actors.NoSuchActor, match="there are: none"):
            await rt.lookup("later")
        waiting = asyncio.ensure_future(rt.lookup("later", timeout=10))
        await asyncio.sleep(0)
        probe = await rt.spawn(Probe, name="later")
        assert await waiting == probe
        with pytest.raises(actors.NameTaken):
            await rt.spawn(Probe, name="later")
        await probe.stop()
        assert await (await rt.spawn(Probe, name="later")).pid()


async def test_only_idempotent_methods_are_retried(tmp_path: Path) -> None:
    async with actors.Runtime() as rt:
        probe = await rt.spawn(Probe, restart=actors.Restart(max=5, within=60))
        marker = str(tmp_path / "first")
        again = probe.die_first.using(retries=2)
        assert await again(marker) == "second time"
        log = tmp_path / "log"
        with pytest.raises(actors.ActorDied) as caught:
            await probe.die_always.using(retries=2)(str(log))
        assert log.read_text() == "x"
        assert "idempotent" in caught.value.__notes__[0]


async def test_a_method_with_a_name_of_the_handle_is_reached_by_method() -> None:
    async with actors.Runtime() as rt:
        probe = await rt.spawn(Probe)
        assert await probe.method("stop")() == "the actor's own stop"


async def test_an_actor_has_neither_torch_nor_zmq_and_its_own_random_state() -> None:
    async with actors.Runtime() as rt:
        a, b = await rt.spawn(Probe), await rt.spawn(Probe)
        loaded = set(await a.modules())
        assert not loaded & {"torch", "zmq", "numpy", "shmstore", "cloudpickle"}
        assert await a.numpy_state() != await b.numpy_state()


async def test_the_template_is_single_threaded() -> None:
    async with actors.Runtime() as rt:
        await rt.spawn(Probe)
        assert psutil.Process(rt._spawner.pid).num_threads() == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rt: rt.spawn(Probe()), "made of a class"),
        (lambda rt: rt.spawn(Probe, name="a/b"), "letters, digits"),
        (lambda rt: rt.spawn(Probe, cwd="/nowhere/at/all"), "directory"),
        (lambda rt: rt.spawn(Probe, env={"A": 1}), "text to text"),
        (lambda rt: rt.spawn(Probe, memory="much"), "512MiB"),
        (lambda rt: rt.spawn(Probe, gpus=-1), "whole number"),
        (lambda rt: rt.spawn(Probe, restart=3), "Restart"),
        (lambda rt: rt.spawn(Probe, within="nothing"), "no reservation"),
        (lambda rt: rt.spawn_many(Probe, 0), "1 to"),
        (lambda rt: rt.host(object(), name="x"), "no public methods"),
    ],
)
async def test_a_mistake_is_an_error_of_ours_that_says_what_is_allowed(
    make: Any, text: str
) -> None:
    async with actors.Runtime() as rt:
        with pytest.raises(actors.ActorError, match=text):
            await make(rt)


def test_settings_that_cannot_be_are_refused_when_they_are_given() -> None:
    with pytest.raises(actors.UsageError):
        actors.Restart(max=-1)
    with pytest.raises(actors.UsageError):
        actors.Runtime(in_flight_max=0)
    for port in (-1, 65536, "9100"):
        with pytest.raises(actors.UsageError, match="a port of 0 to 65535"):
            actors.Runtime(metrics_port=port)  # type: ignore[arg-type]
    with pytest.raises(actors.NotInActor):
        actors.current()


@pytest.mark.parametrize(
    "use",
    [
        lambda rt: rt.spawn(Probe),
        lambda rt: rt.lookup("x"),
        lambda rt: rt.reserve("x", cpus=1),
        lambda rt: rt.snapshot(),
        lambda rt: rt.host(Probe(), name="x"),
    ],
)
async def test_using_a_runtime_outside_its_block_is_refused(use: Any) -> None:
    rt = actors.Runtime()
    with pytest.raises(actors.RuntimeClosed, match="not entered"):
        await use(rt)
    async with rt:
        pass
    with pytest.raises(actors.RuntimeClosed, match="has ended"):
        await use(rt)


def test_a_runtime_outside_its_block_has_no_store_yet_and_never_what_no_runtime_has() -> None:
    rt = actors.Runtime()
    for use in (lambda: rt.store, rt.watch):
        with pytest.raises(actors.RuntimeClosed):
            use()
    assert not hasattr(rt, "nothing")


def test_devices_are_found_by_their_files_where_the_driver_lists_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "Path", lambda name: tmp_path / name.lstrip("/"))
    (tmp_path / "dev").mkdir()
    assert placement.detect_gpus() == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert placement.detect_gpus() == ("0", "1")
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert placement.detect_gpus() == ("0",)
