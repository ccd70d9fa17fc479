"""`shmrl top NAME`: a live run, seen from another terminal.

Owns the table. Reads the run's status socket; changes nothing in the run. `--json` prints one
snapshot and ends; so does a table where stdout is no terminal. What a narrow terminal has no room
for is left out from the right, and the name of an actor is the last to go.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import ActorError, RuntimeClosed
from .rundir import live_runs
from .status import read_status

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["main"]

_INTERVAL_S = 1.0
_GAP = 2
"""Columns of the terminal between two columns of the table."""
_LEFT = ("actor", "state", "busiest", "busiest, p50 / p99")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 when there is no such run."""
    parser = argparse.ArgumentParser(
        prog="shmrl top",
        description="Show a live run: its actors with their memory, calls and busiest method, and "
        "its arena by owner. A narrow terminal shows fewer columns; --json has everything.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="name of the run; without it the one that is alive, or the names of several",
    )
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON and end")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument(
        "--interval", type=float, default=_INTERVAL_S, metavar="S", help="between two tables"
    )
    args = parser.parse_args(argv)
    try:
        if args.json:
            print(json.dumps(read_status(args.name) if args.name else live_runs()))
            return 0
        names = [args.name] if args.name else live_runs()
        if len(names) == 1:
            _show(names[0], max(args.interval, 0.1), once=args.once)
        else:
            print("\n".join(names) or "no run is alive")
        return 0
    except ActorError as error:
        print(f"shmrl top: {error}", file=sys.stderr)
        return 1


def _show(name: str, interval_s: float, *, once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    picture = make_picture(read_status(name), console.width)
    if once or not sys.stdout.isatty():  # a file wants one picture, not a film
        console.print(picture)
        return
    pause = threading.Event()  # never set: Ctrl-C ends the wait
    try:
        with Live(picture, console=console) as live:
            while not pause.wait(interval_s):
                live.update(make_picture(read_status(name), console.width))
    except KeyboardInterrupt:
        pass
    except RuntimeClosed as error:  # nothing wrong: it was looked at until its end
        console.print(str(error), markup=False)


def make_picture(snapshot: dict[str, Any], width: int) -> Group:
    """The run, one row an actor, the arena with a line an owner; at most `width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = _columns([row for row in snapshot["actors"] if row["state"] != "dead"], width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for title, _ in columns:
        table.add_column(title, justify="left" if title in _LEFT else "right", no_wrap=True)
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in _arena_lines(snapshot)]
    return Group(Text(_title(snapshot), no_wrap=True, overflow="ellipsis"), table, *lines)


def _columns(rows: list[dict[str, Any]], width: int) -> list[tuple[str, list[str]]]:
    """Title and cells of each column that fits: the busiest method loses its p99 before it goes."""
    columns = [
        ("actor", [row["name"] for row in rows]),
        ("state", ["unresponsive" if "unresponsive" in row else row["state"] for row in rows]),
        ("pid", [str(row["pid"]) for row in rows]),
        ("PSS", [_mib((row.get("memory") or {}).get("pss_bytes")) for row in rows]),
        ("calls", [str(sum(m["count"] for m in _methods(row))) for row in rows]),
        ("wait", [str(row.get("waiting", "")) for row in rows]),
        ("run", [str(row.get("running", "")) for row in rows]),
        ("restarts", [str(row["restarts"]) for row in rows]),
    ]
    for title, *percentiles in (("busiest, p50 / p99", "p50_us", "p99_us"), ("busiest", "p50_us")):
        busiest = (title, [_busiest(row.get("methods", {}), percentiles) for row in rows])
        if _total_width([*columns, busiest]) <= width:
            return [*columns, busiest]
    while len(columns) > 1 and _total_width(columns) > width:
        columns.pop()
    return columns


def _total_width(columns: list[tuple[str, list[str]]]) -> int:
    return sum(max(map(len, [title, *cells])) + _GAP for title, cells in columns) - _GAP


def _methods(row: dict[str, Any]) -> list[dict[str, Any]]:
    return list(row.get("methods", {}).values())


def _title(snapshot: dict[str, Any]) -> str:
    return f"{snapshot['run']}  up {snapshot['uptime_s']:.0f} s  driver {snapshot['pid']}"


def _arena_lines(snapshot: dict[str, Any]) -> list[str]:
    store = snapshot.get("store")
    if not store:
        return ["no arena"]
    owners = store["by_owner"].items()
    longest = max((len(owner) for owner, _ in owners), default=0)
    return [
        f"arena {_mib(store['used'])} of {_mib(store['capacity'])}, objects {store['objects']}, "
        f"sessions {store['sessions']}",
        *(
            f"  {owner:<{longest}}  {_mib(usage[2])}, objects {usage[1]}, sessions {usage[0]}"
            for owner, usage in owners
        ),
    ]


def _busiest(methods: dict[str, Any], percentiles: Sequence[str]) -> str:
    """The method that took most time, and how long a call of it takes."""
    if not methods:
        return ""
    name, stats = max(methods.items(), key=lambda item: item[1]["count"] * item[1]["mean_us"])
    return f"{name} {' / '.join(_duration(stats[key]) for key in percentiles)}"


def _duration(us: float) -> str:
    for unit, size_us in (("s", 1e6), ("ms", 1e3)):
        if us >= size_us:
            return f"{us / size_us:.3g} {unit}"
    return f"{us:.0f} µs"


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / (1 << 20):.0f} MiB"
