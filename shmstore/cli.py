"""`shmrl store ...`: look at arenas, check them, remove them.

Owns the command line of the store, also reachable as `python -m shmstore`. Every command has
`--json`: one JSON document on stdout and nothing else. Exit statuses: 0 all is well, 1 something is
wrong with what was looked at (unsound, debris left), 2 the command could not be done (no such
arena, usage), 130 interrupted.

    ls                 arenas of this user          check NAME         full audit; 1 when unsound
    stat NAME          what it holds, by owner      rm NAME [--force]  unlink; force: a live one too
    top NAME           the same, live               doctor [--clean]   debris; --clean removes it
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from . import doctor
from .errors import StoreError, StoreNotFound
from .store import Store
from .usage import Stats, format_size

OK, WRONG, FAILED, INTERRUPTED = 0, 1, 2, 130
TOP_INTERVAL_S_MIN = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except StoreError as error:
        if arguments.json:
            _print_json({"error": type(error).__name__, "message": str(error)})
        print(f"shmrl store: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:  # how one leaves `top`
        return OK if arguments.run is _top else INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return OK
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmrl store", description="Arenas of this user.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
        sub.set_defaults(run=run)
        return sub

    command("ls", _ls, "list arenas")
    command("stat", _stat, "what an arena holds").add_argument("name")
    top = command("top", _top, "what an arena holds, refreshed until Ctrl-C")
    top.add_argument("name")
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two tables"
    )
    top.add_argument(
        "--count", type=int, metavar="N", help="stop after N (default: never; with --json: 1)"
    )
    command("check", _check, "audit an arena").add_argument("name")
    remove = command("rm", _rm, "unlink an arena")
    remove.add_argument("name")
    remove.add_argument("--force", action="store_true", help="also one that a live process uses")
    found = command("doctor", _doctor, "find what dead runs left")
    found.add_argument("--clean", action="store_true", help="remove it")
    found.epilog = "Exit status 1: something was found, and is still there."
    return parser


def _ls(arguments: Any) -> int:
    arenas = doctor.survey()
    if arguments.json:
        _print_json([asdict(arena) for arena in arenas])
        return OK
    _print_arenas(arenas)
    return OK


def _stat(arguments: Any) -> int:
    with Store.attach(arguments.name) as store:
        stats = store.stats()
    if arguments.json:
        _print_json(stats.as_dict())
    else:
        print("\n".join(_stat_lines(stats)))
    return OK


def _top(arguments: Any) -> int:
    interval_s = max(TOP_INTERVAL_S_MIN, arguments.interval)
    count = arguments.count or (1 if arguments.json else None)
    shown = 0
    with Store.attach(arguments.name) as store:
        before, before_s = store.stats(), time.monotonic()
        while True:
            if shown:
                _pause(interval_s)
            stats, now_s = store.stats(), time.monotonic()
            rates = _rates(before, stats, max(now_s - before_s, 1e-9))
            if arguments.json:
                _print_json({**stats.as_dict(), "rates_per_s": rates})
            else:
                clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
                rate_text = "  ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items())
                print(
                    clear + "\n".join([*_stat_lines(stats), f"rates     {rate_text}"]), flush=True
                )
            before, before_s, shown = stats, now_s, shown + 1
            if count is not None and shown >= count:
                return OK


def _check(arguments: Any) -> int:
    problems = doctor.audit(arguments.name)
    if arguments.json:
        _print_json({"name": arguments.name, "sound": not problems, "problems": problems})
    else:
        print("\n".join(problems) if problems else f"{arguments.name}: sound")
    return WRONG if problems else OK


def _rm(arguments: Any) -> int:
    found = [arena for arena in doctor.survey() if arena.name == arguments.name]
    if not found:
        raise StoreNotFound(f"no arena called {arguments.name!r}")
    if found[0].condition is doctor.Condition.LIVE and not arguments.force:
        message = (
            f"{found[0].live_clients} processes use {arguments.name}; --force unlinks it anyway"
        )
        if arguments.json:
            _print_json({"error": "in use", "message": message})
        print(f"shmrl store: {message}", file=sys.stderr)
        return WRONG
    Store.unlink(arguments.name)
    if arguments.json:
        _print_json({"removed": arguments.name})
    else:
        print(f"removed {arguments.name}")
    return OK


def _doctor(arguments: Any) -> int:
    removed = doctor.clean() if arguments.clean else []
    arenas = doctor.survey()
    left = [arena for arena in arenas if arena.condition is not doctor.Condition.LIVE]
    unsound = {
        arena.name: problems
        for arena in arenas
        if arena.condition is doctor.Condition.LIVE and (problems := _problems(arena.name))
    }
    if arguments.json:
        _print_json(
            {
                "removed": [asdict(arena) for arena in removed],
                "arenas": [asdict(arena) for arena in arenas],
                "unsound": unsound,
            }
        )
    else:
        for arena in removed:
            print(f"removed {arena.path} ({format_size(arena.file_bytes)})")
        _print_arenas(arenas)
        for name, problems in unsound.items():
            print(f"{name} is unsound:", *problems, sep="\n  ")
        if left and not arguments.clean:
            print("run with --clean to remove what no process uses")
    return WRONG if left or unsound else OK


def _problems(name: str) -> list[str]:
    """What the audit says; nothing of an arena that was removed since it was listed."""
    try:
        return doctor.audit(name)
    except StoreNotFound:
        return []
    except StoreError as error:
        return [f"cannot be audited: {error}"]


def _print_arenas(arenas: list[doctor.Arena]) -> None:
    if not arenas:
        print("no arenas")
        return
    print(f"{'NAME':24} {'STATE':10} {'CAPACITY':>10} {'IN MEMORY':>10} {'CLIENTS':>7}  DETAIL")
    for arena in arenas:
        print(
            f"{arena.name:24} {arena.condition.value:10} {format_size(arena.capacity):>10} "
            f"{format_size(arena.file_bytes):>10} {arena.live_clients:>7}  {arena.detail}"
        )


def _stat_lines(stats: Stats) -> list[str]:
    counters = stats.counters
    lines = [
        f"arena     {stats.name}",
        f"capacity  {format_size(stats.capacity)}, used {format_size(stats.used)}, "
        f"free {format_size(stats.free)} (largest piece {format_size(stats.largest_free)})",
        f"objects   {stats.objects} of {stats.objects_max} ({stats.building} under construction), "
        f"pinned {stats.pinned}, ended under views {format_size(stats.deferred_bytes)}",
        f"sessions  {stats.sessions} of {stats.sessions_max}",
        f"clients   {stats.clients}: pids {', '.join(str(c.pid) for c in stats.by_client)}",
        f"events    {counters.puts} puts, {counters.gets} gets, {counters.frees} frees, "
        f"{counters.reclaimed} reclaimed, {counters.recoveries} recoveries",
    ]
    for owner, usage in sorted(stats.by_owner.items()):
        lines.append(
            f"owner     {owner}: {usage.sessions} sessions, {usage.objects} objects, "
            f"{format_size(usage.bytes)}"
        )
    return lines


def _rates(before: Stats, after: Stats, elapsed_s: float) -> dict[str, float]:
    names = ("puts", "gets", "frees", "sessions_opened", "sessions_released")
    return {
        name: round((after.counters[name] - before.counters[name]) / elapsed_s, 1) for name in names
    }


def _pause(seconds: float) -> None:
    """Wait for the next refresh, or end it early when standard input closes or gets a line."""
    ready, _, _ = select.select([sys.stdin] if sys.stdin.isatty() else [], [], [], seconds)
    if ready and sys.stdin.readline().strip().lower() in ("q", "quit"):
        raise KeyboardInterrupt


def _print_json(document: object) -> None:
    print(json.dumps(document), flush=True)


__all__ = ["main"]
