"""Rows, timing and output that all benchmarks share.

Owns the vocabulary of a result (`Row`, `Goal`), the way of timing (`lap`, `collect`, `interleave`)
and the three outputs: a table on the terminal, JSON with the machine's facts, a plot.

How it times. A *lap* is a function that does the work once (or a few times) and returns
nanoseconds per unit of work, so that each benchmark decides what is inside the clock. `collect`
repeats a lap; `interleave` runs several laps in turn, one of each per round, and so a disturbance
of the machine hits all subjects alike: compare through `Samples.ratio_to`, which is the median
over rounds of the quotient within a round and survives noise that absolute times do not.

Everything here is standard library plus numpy; rich and matplotlib are imported only when a table
is printed or a plot is drawn, because peers' workers run where neither is installed.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

FORMAT_VERSION = 1
RESULTS = Path(__file__).parent / "results"
VERSIONS_OF = (
    *("numpy", "pyarrow", "pyzmq", "uvloop", "torch", "transformers", "trl", "ray", "lmdb"),
    *("iceoryx2", "xoscar", "torchmonarch"),
)

Lap = Callable[[], float]
Unit = Literal["s", "1/s", "B", "x", "count"]


@dataclass(frozen=True)
class BenchArgs:
    """The command line, parsed."""

    json: Path | None = None
    peers: bool = False
    quick: bool = False
    only: str | None = None
    parts: list[str] = field(default_factory=list)
    """All that were asked about."""

    def wants(self, part: str) -> bool:
        """Whether `--only` lets this part run."""
        self.parts.append(part)
        return self.only is None or self.only in part


@dataclass(frozen=True)
class Goal:
    """A figure to reach: of the row's median, or of its ratio to the reference."""

    value: float
    bound: Literal["at most", "at least"]
    of: Literal["median", "p99", "ratio"] = "median"


def at_most(value: float, of: Literal["median", "p99", "ratio"] = "median") -> Goal:
    """The goal is met by this value or a smaller one (same unit as the row)."""
    return Goal(value, "at most", of)


def at_least(value: float, of: Literal["median", "p99", "ratio"] = "median") -> Goal:
    """The goal is met by this value or a larger one (same unit as the row)."""
    return Goal(value, "at least", of)


@dataclass(frozen=True)
class Row:
    """One measured figure.

    `unit` "s" means seconds, "1/s" a rate, "B" bytes, "x" a plain quotient, "count" a number.
    `ratio` is this row over `reference` (the subject it is compared with, in the same work and
    run); where `unit` is a time, a ratio below 1 is faster than the reference.
    """

    work: str
    subject: str
    median: float
    unit: Unit = "s"
    p99: float | None = None
    n: int = 1
    reference: str | None = None
    ratio: float | None = None
    goals: tuple[Goal, ...] = ()
    note: str = ""

    def verdicts(self) -> list[tuple[Goal, bool | None]]:
        """Each goal with met/missed, or None where the row lacks the figure."""
        found: list[tuple[Goal, bool | None]] = []
        for goal in self.goals:
            figure = {"median": self.median, "p99": self.p99, "ratio": self.ratio}[goal.of]
            if figure is None:
                found.append((goal, None))
            else:
                met = figure <= goal.value if goal.bound == "at most" else figure >= goal.value
                found.append((goal, met))
        return found


@dataclass(frozen=True)
class Samples:
    """Laps of one subject, in nanoseconds per unit of work, in the order taken."""

    laps_ns: tuple[float, ...]

    @property
    def n(self) -> int:
        """How many laps."""
        return len(self.laps_ns)

    @property
    def median_s(self) -> float:
        """Median lap in seconds."""
        return statistics.median(self.laps_ns) * 1e-9

    @property
    def p99_s(self) -> float:
        """99th percentile in seconds; with fewer than 100 laps the largest one."""
        ordered = sorted(self.laps_ns)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e-9

    def ratio_to(self, other: Samples) -> float:
        """Median over rounds of self/other; both must come from the same `interleave`."""
        if self.n != other.n:
            raise ValueError(f"{self.n} laps against {other.n}: not from one interleave")
        return statistics.median(a / b for a, b in zip(self.laps_ns, other.laps_ns, strict=True))

    def row(
        self,
        work: str,
        subject: str,
        *,
        against: tuple[str, Samples] | None = None,
        goals: Sequence[Goal] = (),
        note: str = "",
    ) -> Row:
        """These laps as a time row; `against` is (subject, samples) of the reference."""
        return Row(
            work=work,
            subject=subject,
            median=self.median_s,
            p99=self.p99_s,
            n=self.n,
            reference=against[0] if against else None,
            ratio=self.ratio_to(against[1]) if against else None,
            goals=tuple(goals),
            note=note,
        )


def lap(work: Callable[[], object], inner: int = 1) -> Lap:
    """A lap that calls `work` `inner` times inside one clock reading."""

    def run() -> float:
        begin = time.perf_counter_ns()
        for _ in range(inner):
            work()
        return (time.perf_counter_ns() - begin) / inner

    return run


def collect(once: Lap, n: int, warm_up: int = 3) -> Samples:
    """`n` laps after `warm_up` unrecorded ones, with Python's cyclic collector off."""
    with collector_off():
        for _ in range(warm_up):
            once()
        return Samples(tuple(once() for _ in range(n)))


def interleave(laps: Mapping[str, Lap], n: int, warm_up: int = 3) -> dict[str, Samples]:
    """`n` rounds, each one lap of every subject, the order turning by one from round to round."""
    names = list(laps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    with collector_off():
        for turn in range(warm_up + n):
            for offset in range(len(names)):
                name = names[(turn + offset) % len(names)]
                elapsed_ns = laps[name]()
                if turn >= warm_up:
                    taken[name].append(elapsed_ns)
    return {name: Samples(tuple(values)) for name, values in taken.items()}


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Python's cyclic collector off, and on again if it was on."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def pin(core: int) -> bool:
    """Pins this process to one of the cores it may use; False where there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        return False
    os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    return True


def size_name(size_bytes: int) -> str:
    """1024 -> "1 KiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def human(value: float | None, unit: Unit) -> str:
    """A figure for people: 1.1e-6 "s" -> "1.10 µs"."""
    if value is None:
        return ""
    if unit == "s":
        for name, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if value >= factor:
                return f"{value / factor:.3g} {name}"
        return f"{value * 1e9:.3g} ns"
    if unit == "B":
        for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.4g} B"
    if unit == "1/s":
        return f"{value:,.0f}/s"
    if unit == "x":
        return f"{value:.2f}×" if abs(value) >= 0.1 else f"{value:.3f}×"  # shares are small
    return f"{value:,.6g}"


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures: processor, kernel, versions, load."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    versions: dict[str, str] = {}
    for name in VERSIONS_OF:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "versions": versions,
        "load_average": list(os.getloadavg()),
        "commit": _commit(),
    }


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


@dataclass
class Report:
    """The rows of one benchmark, and where they go. `finish()` is the last line of each main()."""

    name: str
    args: BenchArgs
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=machine)
    started: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def add(self, *rows: Row) -> None:
        """Keeps rows, and shows on stderr that the benchmark moves."""
        for row in rows:
            self.rows.append(row)
            shown = f"{row.work}: {row.subject} {human(row.median, row.unit)}"
            print(f"  {shown}", file=sys.stderr, flush=True)

    def remark(self, text: str) -> None:
        """Something the reader must know (a part that could not run, and why)."""
        self.remarks.append(text)
        print(f"  note: {text}", file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Prints the table, writes JSON and plot; returns the exit status: 2 for an `--only` that
        left nothing to run.
        """
        only, parts = self.args.only, self.args.parts
        if only is not None and parts and not any(only in part for part in parts):
            there = ", ".join(parts)
            print(f"bench {self.name}: no part's name contains {only!r}: {there}", file=sys.stderr)
            return 2
        print_table(self)
        path = self.args.json
        if path is None and not self.args.quick and self.args.only is None:
            path = RESULTS / f"{self.started[:10]}-{self.name}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
            print(f"wrote {path}")
            draw(self, path.with_suffix(".png"))
        return 0

    def document(self) -> dict[str, Any]:
        """The JSON: format, date, machine, arguments, rows, remarks."""
        return {
            "format": FORMAT_VERSION,
            "bench": self.name,
            "started": self.started,
            "quick": self.args.quick,
            "machine": self.facts,
            "rows": [asdict(row) | {"met": _met(row)} for row in self.rows],
            "remarks": self.remarks,
        }


def _met(row: Row) -> bool | None:
    verdicts = [met for _, met in row.verdicts()]
    if not verdicts or None in verdicts:
        return None
    return all(verdicts)


def _goal_text(row: Row) -> str:
    texts = []
    for goal, met in row.verdicts():
        unit: Unit = "x" if goal.of == "ratio" else row.unit
        sign = "≤" if goal.bound == "at most" else "≥"
        mark = {True: "✓", False: "✗", None: "?"}[met]
        what = "" if goal.of == "median" else f"{goal.of} "
        texts.append(f"{mark} {what}{sign} {human(goal.value, unit)}")
    return ", ".join(texts)


def _cells(row: Row) -> tuple[str, ...]:
    ratio = f"{row.ratio:.2f}× {row.reference}" if row.ratio is not None else ""
    return (
        row.work,
        row.subject,
        human(row.median, row.unit),
        human(row.p99, row.unit),
        f"{row.n}",
        ratio,
        _goal_text(row),
        row.note,
    )


COLUMNS = ("work", "subject", "median", "p99", "n", "ratio", "goal", "note")


def print_table(report: Report) -> None:
    """The rows as a table, same work side by side: rich on a terminal, plain columns elsewhere."""
    order = {work: i for i, work in enumerate(dict.fromkeys(row.work for row in report.rows))}
    rows = sorted(report.rows, key=lambda row: order[row.work])
    title = f"bench {report.name}, {report.started}, {report.facts['cpu']}"
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for column in COLUMNS:
            number = column in ("median", "p99", "n")
            table.add_column(column, justify="right" if number else "left")
        for place, row in enumerate(rows):
            ends = place + 1 == len(rows) or rows[place + 1].work != row.work
            table.add_row(*_cells(row), end_section=ends)
        Console().print(table)
    else:
        lines = [COLUMNS, *(_cells(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        print(title)
        for line in lines:
            print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())
    for remark in report.remarks:
        print(f"note: {remark}")


def draw(report: Report, path: Path) -> None:
    """A line per work, a mark per subject, on logarithmic axes, one chart per unit (PNG)."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as missing:
        print(f"no plot: {missing}; install the `train` extra for matplotlib", file=sys.stderr)
        return
    by_unit = {unit: _works(report.rows, unit) for unit in PLOTTED}
    charts = {unit: works for unit, works in by_unit.items() if works}
    if not charts:
        return
    heights = [len(works) + 1.5 for works in charts.values()]
    figure, axes = plt.subplots(
        len(charts),
        1,
        figsize=(11, 1.2 + 0.24 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    subjects = list(dict.fromkeys(row.subject for row in report.rows))
    for axis, (unit, works) in zip(axes[:, 0], charts.items(), strict=True):
        _draw_chart(axis, unit, works, {name: i for i, name in enumerate(subjects)})
    handles = {h.get_label(): h for axis in axes[:, 0] for h in axis.collections}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"bench {report.name}, {report.started[:10]}, {report.facts['cpu']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path}")


PLOTTED: dict[Unit, str] = {
    "s": "seconds, median (left is better)",
    "1/s": "per second (right is better)",
}
_MARKS = "osDv^<>Ph8X*"


def _works(rows: Sequence[Row], unit: Unit) -> dict[str, list[Row]]:
    """Rows of a unit by their work, in the order of first appearance."""
    works: dict[str, list[Row]] = {}
    for row in rows:
        if row.unit == unit and row.median > 0:
            works.setdefault(row.work, []).append(row)
    return works


def _draw_chart(
    axis: Any, unit: Unit, works: Mapping[str, list[Row]], subjects: Mapping[str, int]
) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab10"]
    by_subject: dict[str, list[tuple[float, int]]] = {}
    goals: list[tuple[float, int]] = []
    for place, rows in enumerate(works.values()):
        for row in rows:
            by_subject.setdefault(row.subject, []).append((row.median, place))
            goals += [(goal.value, place) for goal in row.goals if goal.of == "median"]
    for subject, points in by_subject.items():
        number = subjects[subject]
        values, places = zip(*points, strict=True)
        axis.scatter(
            values,
            places,
            label=subject,
            color=colours(number % 10),
            marker=_MARKS[number % len(_MARKS)],
            s=60 if number == 0 else 28,
            zorder=3 if number == 0 else 2,
        )
    if goals:
        values, places = zip(*goals, strict=True)
        axis.scatter(values, places, label="goal", color="black", marker="|", s=140, zorder=1)
    axis.set_yticks(range(len(works)), list(works), fontsize=8)
    axis.set_ylim(len(works) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.set_xlabel(PLOTTED[unit], fontsize=8)
    axis.grid(alpha=0.3)
