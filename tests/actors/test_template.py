"""The template process: what it has imported, and under pressure: refused forks, a full socket, a
death at a bad moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import actors
from actors.spawn import Spawner

from .conftest import wait_until_gone

LIMIT_S = 60.0

# What the template imports in these tests, to find another `os.fork`.
REFUSING = """
import errno, os
_fork, _calls = os.fork, []
def fork():
    _calls.append(1)
    if len(_calls) in (2, 4):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()
os.fork = fork
"""
DYING = """
import os, signal
_fork = os.fork
def fork():
    pid = _fork()
    if pid and not os.path.exists({marker!r}):
        with open({marker!r}, "w") as file:
            file.write(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return pid
os.fork = fork
"""


# A module that is slow to import, and says in which process it was.
SLOW = """
import os
with open({file!r}, "a") as file:
    print(os.getpid(), os.environ["GREETING"], file=file)
"""


class Victim:
    async def pid(self) -> int:
        return os.getpid()


class Warmed(actors.Runtime):
    """Its template has imported one module more."""

    def _make_spawner(self, loop: asyncio.AbstractEventLoop) -> Spawner:
        return Spawner(loop, self._on_exit, ["other_fork"], {})


@pytest.fixture
def other_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module for the template goes."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "other_fork.py"


async def test_what_is_preloaded_is_imported_once_for_all_actors_also_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "imported"
    (tmp_path / "slow_to_import.py").write_text(SLOW.format(file=str(file)))
    async with actors.Runtime(preload=["slow_to_import"], env={"GREETING": "hello"}) as rt:
        assert rt._spawner is not None
        victim = await rt.spawn(Importer, restart=actors.Restart(max=3, within=60))
        first = await victim.where()
        os.kill(first, signal.SIGKILL)
        with contextlib.suppress(actors.ActorDied):
            await victim.where()
        assert await victim.where.using(when_down="wait")() != first
        assert file.read_text() == f"{rt._spawner.pid} hello\n"


class Importer:
    async def where(self) -> int:
        importlib.import_module("slow_to_import")
        return os.getpid()


def test_a_template_that_is_still_importing_dies_with_its_driver(tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    code = (
        f"import asyncio, sys; sys.path.append({str(tmp_path)!r})\n"
        "from actors.spawn import Spawner\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    Spawner(loop, lambda *_: None, ['never_imported'], {}).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        template = int(driver.stdout.readline())
        driver.kill()
    assert wait_until_gone([template], LIMIT_S) == []


async def test_what_cannot_be_preloaded_is_the_error_of_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("raise ValueError('not today')")
    async with actors.Runtime(preload=["slow_to_import"]) as rt:
        assert await (await rt.spawn(Victim)).pid() != os.getpid()
        importer = await rt.spawn(Importer)
        with pytest.raises(ValueError, match="not today"):
            await importer.where()
    assert (
        "could not be preloaded: slow_to_import: ValueError('not today')" in capfd.readouterr().err
    )


async def test_a_module_that_exits_when_it_is_preloaded_is_named_and_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("import sys\nsys.exit('no')")
    async with actors.Runtime(preload=["slow_to_import", "json"]) as rt:
        assert await (await rt.spawn(Victim)).pid() != os.getpid()
    assert "could not be preloaded: slow_to_import: SystemExit('no')" in capfd.readouterr().err


@pytest.mark.parametrize("wait", [False, True])
async def test_a_module_that_kills_the_template_is_named_to_whoever_spawns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """Whether the template had been asked for a fork by then or not."""
    monkeypatch.syspath_prepend(tmp_path)
    waiting = (
        f"import pathlib\nwhile not pathlib.Path({str(tmp_path / 'asked')!r}).exists(): pass\n"
    )
    text = "import os\nos._exit(3)"
    (tmp_path / "slow_to_import.py").write_text((waiting if wait else "") + text)
    async with actors.Runtime(preload=["json", "slow_to_import"]) as rt:
        spawning = asyncio.create_task(rt.spawn(Victim))
        await asyncio.sleep(0)
        (tmp_path / "asked").touch()
        said = "ended with status 3 while it imported 'slow_to_import', which preload names"
        with pytest.raises(actors.TemplateDied, match=said):
            await asyncio.wait_for(spawning, LIMIT_S)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (
            "os.kill(os.getpid(), 9)",
            r"killed by signal 9 \(SIGKILL\) while it .* look for who sent",
        ),
        ("os.kill(os.getpid(), 35)", "killed by signal 35 while it imported .* look for who sent"),
        ("os.kill(os.getpid(), 11)", r"signal 11 \(SIGSEGV\) while .*, which preload names; leave"),
        ("os.closerange(3, 99); signal.pause()", "hung up while .*, which preload"),
    ],
)
async def test_a_template_killed_from_outside_while_it_imports_is_not_blamed_on_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(f"import os, signal\n{ending}")
    if "pause" in ending:
        monkeypatch.setattr("actors.spawn._HANGUP_WAIT_S", 0.05)
    async with actors.Runtime(preload=["slow_to_import"]) as rt:
        with pytest.raises(actors.TemplateDied, match=said):
            await asyncio.wait_for(rt.spawn(Victim), LIMIT_S)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preload": "json"}, r"a list of names of modules, got 'json'; did you mean \['json'\]\?"),
        ({"preload": [json]}, "a list of names of modules, got"),
        ({"preload": [""]}, "a list of names of modules, got"),
        ({"preload": None}, "a list of names of modules, got None"),
        ({"env": {"A": 1}}, "env maps text to text, got 'A': 1"),
        ({"env": ["A"]}, "env maps text to text, got"),
        ({"env": {"A=B": "1"}}, "no process can have: 'A=B': '1'"),
        ({"env": {"": "1"}}, "no process can have: '': '1'"),
        ({"env": {"A": "1\0"}}, "no process can have: 'A'"),
        ({"env": {"A": "\ud800"}}, "no process can have: 'A'"),
    ],
)
def test_what_no_template_could_start_with_is_refused_by_the_runtime(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(actors.UsageError, match=said):
        actors.Runtime(**given)


async def test_a_template_in_the_middle_of_a_long_import_is_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("import threading\nthreading.Event().wait()")
    async with actors.Runtime(preload=["slow_to_import"]) as rt:
        assert rt._spawner is not None
        assert rt._spawner._process is not None
        template = rt._spawner._process
    assert template.returncode == -signal.SIGKILL


async def test_a_fork_that_the_system_refuses_costs_that_actor_and_no_other(
    other_fork: Path,
) -> None:
    other_fork.write_text(REFUSING)
    async with Warmed() as rt:
        other = await rt.spawn(Victim)
        pid = await other.pid()
        with pytest.raises(actors.SpawnFailed, match="refused another process: Resource"):
            await rt.spawn(Victim)
        victim = await rt.spawn(Victim, restart=actors.Restart(max=3, within=60))
        os.kill(await victim.pid(), signal.SIGKILL)
        with pytest.raises(actors.ActorDied, match="could not be started again"):
            await asyncio.wait_for(_until_it_stays_dead(victim), LIMIT_S)
        assert await other.pid() == pid


async def _until_it_stays_dead(actor: actors.Handle) -> None:
    while True:
        try:
            await actor.pid.using(when_down="wait")()
        except actors.ActorDied as death:
            if "could not be started again" in str(death):
                raise
            await asyncio.sleep(0)  # the call that was under way at its death


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_spawns_that_wait_for_room_in_the_socket_all_go_on(end: signal.Signals) -> None:
    """Also when the template dies meanwhile: another one forks them."""
    async with actors.Runtime() as rt:
        spawner, supervisor = rt._spawner, rt._supervisor
        assert spawner is not None
        assert supervisor is not None
        await rt.spawn(Victim)
        os.kill(spawner.pid, signal.SIGSTOP)
        padding = {"PADDING": "x" * 90_000}  # two requests or so fill the socket
        spawns = [asyncio.create_task(rt.spawn(Victim, env=padding)) for _ in range(6)]
        while len(supervisor.records) < 7 or not spawner._sending.locked():
            await asyncio.sleep(0.01)
        os.kill(spawner.pid, end)
        victims = await asyncio.wait_for(asyncio.gather(*spawns), LIMIT_S)
        assert len({await victim.pid() for victim in victims}) == 6


async def test_nothing_lives_of_a_detached_actor_whose_template_died_before_it_said_so(
    other_fork: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "forked"
    other_fork.write_text(DYING.format(marker=str(marker)))
    async with Warmed() as rt:
        victim = await rt.spawn(Victim, detached=True)
        orphan = int(marker.read_text())
        assert await victim.pid() != orphan
        assert wait_until_gone([orphan], LIMIT_S) == []
        await victim.kill()
