"""`shmrl store ...` and `python -m shmstore`: output, JSON and exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmstore import Store, cli, doctor
from shmstore.testing import Puppet, temporary_store, unique_name


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    """(exit status, the JSON document on stdout)."""
    status = cli.main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_ls_stat_top_and_check_of_a_living_arena(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.sessions.open("s", owner="learner")
    store.put(bytes(1000), session="s")
    status, arenas = run(capsys, "ls")
    mine = next(arena for arena in arenas if arena["name"] == store.name)
    assert (status, mine["condition"], mine["live_clients"]) == (0, "live", 1)
    status, stats = run(capsys, "stat", store.name)
    assert status == 0
    assert stats["by_owner"]["learner"]["sessions"] == 1
    assert stats["capacity"] == 64 << 20
    status, top = run(capsys, "top", store.name)
    assert status == 0
    assert "rates_per_s" in top
    assert run(capsys, "check", store.name) == (
        0,
        {"name": store.name, "sound": True, "problems": []},
    )


def test_plain_output_names_what_people_look_for(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.sessions.open("s", owner="learner")
    for argv, words in (
        (["ls"], [store.name, "live", "64.0 MiB"]),
        (["stat", store.name], ["learner: 1 sessions", "capacity", "puts"]),
        (["top", store.name, "--count", "2", "--interval", "0.1"], ["puts 0/s"]),
        (["check", store.name], ["sound"]),
    ):
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), out


def test_a_command_that_is_interrupted_does_not_say_that_it_was_done(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "unlink", interrupted)
    assert cli.main(["rm", store.name, "--force"]) == 130
    monkeypatch.setattr(cli, "_pause", interrupted)
    assert cli.main(["top", store.name]) == 0


def test_rm_refuses_a_living_arena_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    with temporary_store("4MiB") as store:
        status, document = run(capsys, "rm", store.name)
        assert (status, document["error"]) == (1, "in use")
        assert store.name in Store.list()
        assert run(capsys, "rm", store.name, "--force") == (0, {"removed": store.name})
        assert store.name not in Store.list()


def test_unknown_names_are_status_2_with_the_error_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("stat", "check", "rm"):
        status, document = run(capsys, command, "no-such-arena-anywhere")
        assert (status, document["error"]) == (2, "StoreNotFound")


def test_doctor_finds_and_removes_what_a_killed_run_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """L28, in a folder of its own: other people's debris is not this test's to remove."""
    folder, name = str(tmp_path), unique_name()
    with Puppet() as puppet:
        puppet.call(
            lambda state, n, d: state.update(s=Store.create(n, "4MiB", directory=d)), name, folder
        )
        assert [arena.condition for arena in doctor.survey(directory=folder)] == ["live"]
        assert doctor.clean(directory=folder) == []
        puppet.kill()
    assert [arena.condition for arena in doctor.survey(directory=folder)] == ["debris"]
    assert [arena.name for arena in doctor.clean(directory=folder)] == [name]
    assert os.listdir(folder) == []


def test_doctor_removes_what_a_killed_create_left_without_a_name(tmp_path: Path) -> None:
    leftover = tmp_path / f"shmrl-{os.getuid()}-half~lock"
    leftover.write_bytes(b"")
    assert Store.list(directory=str(tmp_path)) == []
    assert [arena.condition for arena in doctor.survey(directory=str(tmp_path))] == ["unreadable"]
    assert [arena.path for arena in doctor.clean(directory=str(tmp_path))] == [str(leftover)]
    assert list(tmp_path.iterdir()) == []


def test_doctors_command_reports_debris_by_its_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = unique_name()
    with Puppet() as puppet:
        puppet.call(lambda state, n: state.update(s=Store.create(n, "4MiB")), name)
    status, document = run(capsys, "doctor")
    assert status == 1
    found = next(arena for arena in document["arenas"] if arena["name"] == name)
    assert found["condition"] == "debris"
    assert run(capsys, "rm", name)[0] == 0


def test_the_module_runs_as_a_program() -> None:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "shmstore", "ls", "--json"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    json.loads(result.stdout)


def test_importing_the_store_imports_neither_torch_nor_pyarrow() -> None:
    script = (
        "import sys, shmstore, shmstore.cli; s = shmstore.Store.create(sys.argv[1], '1MiB')\n"
        "r = s.put({'a': 1}); s.get(r); shmstore.Store.unlink(sys.argv[1])\n"
        "print(sorted({'torch', 'pyarrow', 'zmq', 'pandas'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script, unique_name()],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m shmstore ls --json | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
