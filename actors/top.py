"""`shmrl top NAME`: a live run, seen from another terminal.

Owns the table. Reads the run's status socket; changes nothing in the run. `--json` prints one
snapshot and ends; so does a table where stdout is no terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

from .errors import ActorError
from .rundir import live_runs
from .status import read_status

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

_INTERVAL_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 when there is no such run."""
    parser = argparse.ArgumentParser(prog="shmrl top", description="Show a live run.")
    parser.add_argument("name", nargs="?", help="name of the run; without it the live ones")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON and end")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--interval", type=float, default=_INTERVAL_S, metavar="S")
    args = parser.parse_args(argv)
    try:
        if args.name is None:
            return _list_runs(as_json=args.json)
        if args.json:
            print(json.dumps(read_status(args.name)))
            return 0
        return _show(args.name, max(args.interval, 0.1), once=args.once)
    except ActorError as error:
        print(f"shmrl top: {error}", file=sys.stderr)
        return 1


def _list_runs(*, as_json: bool) -> int:
    names = live_runs()
    print(json.dumps(names) if as_json else "\n".join(names) or "no run is alive")
    return 0


def _show(name: str, interval_s: float, *, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    table = make_table(read_status(name))
    if once or not sys.stdout.isatty():  # a file wants one picture, not a film
        Console().print(table)
        return 0
    pause = threading.Event()  # never set: Ctrl-C ends the wait
    with Live(table, screen=False) as live:
        try:
            while not pause.wait(interval_s):
                live.update(make_table(read_status(name)))
        except KeyboardInterrupt:
            return 0
    return 0


def make_table(snapshot: dict[str, Any]) -> Table:
    """One row an actor, one line for the arena."""
    from rich.table import Table

    table = Table(title=_title(snapshot), caption=_arena_line(snapshot), title_justify="left")
    for column in ("actor", "state", "pid", "restarts", "waiting", "running", "PSS", "calls"):
        table.add_column(column, justify="left" if column in ("actor", "state") else "right")
    table.add_column("busiest method (p50 / p99)")
    for row in snapshot["actors"]:
        if row["state"] == "dead":
            continue
        methods = row.get("methods", {})
        table.add_row(
            row["name"],
            "unresponsive" if "unresponsive" in row else row["state"],
            str(row["pid"]),
            str(row["restarts"]),
            str(row.get("waiting", "")),
            str(row.get("running", "")),
            _mib((row.get("memory") or {}).get("pss_bytes")),
            str(sum(m["count"] for m in methods.values())),
            _busiest(methods),
        )
    return table


def _title(snapshot: dict[str, Any]) -> str:
    return f"{snapshot['run']}  driver {snapshot['pid']}  up {snapshot['uptime_s']:.0f} s"


def _arena_line(snapshot: dict[str, Any]) -> str:
    store = snapshot.get("store")
    if not store:
        return "no arena"
    owners = ", ".join(
        f"{owner}: {usage[0]} sessions {_mib(usage[2])}"
        for owner, usage in store["by_owner"].items()
    )
    return (
        f"arena {_mib(store['used'])} of {_mib(store['capacity'])}, {store['objects']} objects,"
        f" {store['sessions']} sessions" + (f"; {owners}" if owners else "")
    )


def _busiest(methods: dict[str, Any]) -> str:
    if not methods:
        return ""
    name, stats = max(methods.items(), key=lambda item: item[1]["count"] * item[1]["mean_us"])
    return f"{name} ({_duration(stats['p50_us'])} / {_duration(stats['p99_us'])})"


def _duration(us: float) -> str:
    for unit, size_us in (("s", 1e6), ("ms", 1e3)):
        if us >= size_us:
            return f"{us / size_us:.3g} {unit}"
    return f"{us:.0f} µs"


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / (1 << 20):.0f} MiB"
