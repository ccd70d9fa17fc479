"""A snapshot after `kill -9` at every step of writing it: the old one or the new one, whole (L24).

Written in one process and killed there; resumed in a fresh interpreter, which has only the folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from shmstore import Store, StoreNotFound
from shmstore.testing import Puppet, temporary_store
from tests.trainer.lifecycle.kit import filled_buffer
from tests.trainer.lifecycle.resumed import Resumer
from trainer import snapshot
from trainer.trace import TraceStore

#: As `die_at`: live to the end.
NEVER = -1


def _write(folder: Path, n_groups: int, die_at: int) -> list[str]:
    """Fill a buffer and write it, but die at step `die_at` of that; -> the names of the steps."""
    steps: list[str] = []

    def hook(step: str) -> None:
        if len(steps) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(step)

    async def main() -> None:
        with temporary_store("16MiB") as store:
            buffer = await filled_buffer(store, TraceStore(store), n_groups)
            await snapshot.write(buffer.freeze(), folder, hook)
            buffer.close()

    asyncio.run(main())
    return steps


def _fork_and_write(state: dict[str, Any], folder: str, n_groups: int, die_at: int) -> int:
    """In a child of the puppet, which has opened no arena itself; -> how the child ended."""
    from tests.trainer.lifecycle import test_snapshot_kills as here

    child = here.os.fork()
    if child == 0:
        code = 1
        try:
            here._write(here.Path(folder), n_groups, die_at)
            code = 0
        finally:
            here.os._exit(code)
    return here.os.waitstatus_to_exitcode(here.os.waitpid(child, 0)[1])


def test_L24_after_a_kill_at_any_step_the_old_snapshot_is_whole_or_the_new_one_is(
    tmp_path: Path,
) -> None:
    for n_groups in (1, 2):
        _write(tmp_path / f"whole-{n_groups}", n_groups, NEVER)
    _copy(tmp_path / "whole-1", tmp_path / "probe")
    steps = _write(tmp_path / "probe", 2, NEVER)
    assert len(steps) > 20
    assert (steps[0], steps[-1]) == ("make folder", "remove older")
    with Puppet() as puppet, Resumer() as resumer:
        old, new = (resumer(tmp_path / f"whole-{n_groups}") for n_groups in (1, 2))
        assert [[uid for uid, _ in found] for found in (old, new)] == [["g0"], ["g0", "g1"]]
        for die_at, step in enumerate(steps):
            folder = tmp_path / f"copy-{die_at}"
            _copy(tmp_path / "whole-1", folder)
            assert puppet.call(_fork_and_write, str(folder), 2, die_at) == -signal.SIGKILL
            is_new = die_at > steps.index("replace marker")
            assert resumer(folder) == (new if is_new else old), step
            _write(folder, 2, NEVER)  # the next writer clears away what is left
            assert len(list(folder.iterdir())) == 2
    _sweep_arenas()


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def _sweep_arenas() -> None:
    """Arenas of killed puppets are debris; remove exactly those."""
    for name in Store.list():
        if name.startswith("test-"):
            pid = int(name.split("-")[1])
            if not Path(f"/proc/{pid}").exists():
                with suppress(StoreNotFound):  # another run of these tests was faster
                    Store.unlink(name)
