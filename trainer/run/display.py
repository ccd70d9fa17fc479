"""What a person sees while a run goes on: a live table with progress bars, or plain lines.

Owns the terminal (standard error; standard output belongs to `--json`). A terminal gets rich's
live table, of which a narrow one shows fewer columns; a pipe or a log file gets one line a step, at
most one a second. Holds no state of the run: it is told, and forgets. Called by the driver only.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Display",
    "LiveDisplay",
    "PlainDisplay",
    "QuietDisplay",
    "WatchedDisplay",
    "make_display",
]

_LINE_EVERY_S = 1.0


class Display(Protocol):
    """What the driver tells."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""
        ...

    def phase(self, name: str, done: float, total: float, detail: str = "") -> None:
        """Progress of a phase: warm-up, training, evaluation."""
        ...

    def step(self, values: Mapping[str, float]) -> None:
        """The metrics of one train step."""
        ...

    def close(self) -> None:
        """No more steps; notes are still told, below. May be called again."""
        ...


def make_display(*, table_rows: int, quiet: bool = False, stream: TextIO | None = None) -> Display:
    """The display that suits the stream (default: standard error)."""
    stream = stream or sys.stderr
    if quiet:
        return QuietDisplay()
    return WatchedDisplay(
        LiveDisplay(table_rows, stream) if stream.isatty() else PlainDisplay(stream)
    )


class WatchedDisplay:
    """Another display, as long as somebody can see it: when its terminal or the reader of its pipe
    has gone, the run goes on without one; files have everything.
    """

    def __init__(self, display: Display) -> None:
        self._display = display

    def note(self, text: str) -> None:
        self._tell(self._display.note, text)

    def phase(self, name: str, done: float, total: float, detail: str = "") -> None:
        self._tell(self._display.phase, name, done, total, detail)

    def step(self, values: Mapping[str, float]) -> None:
        self._tell(self._display.step, values)

    def close(self) -> None:
        self._tell(self._display.close)

    def _tell(self, tell: Callable[..., None], *what: object) -> None:
        try:
            tell(*what)
        except OSError:
            self._display = QuietDisplay()


class QuietDisplay:
    """Says nothing."""

    def note(self, text: str) -> None: ...

    def phase(self, name: str, done: float, total: float, detail: str = "") -> None: ...

    def step(self, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, float] = {}
        self._untold: Mapping[str, float] | None = None

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def phase(self, name: str, done: float, total: float, detail: str = "") -> None:
        if name == "train" or not (self._due(f"phase {name}") or done >= total):
            return  # the lines of the steps tell it better
        print(f"{name}: {done:g}/{total:g} {detail}".rstrip(), file=self._stream, flush=True)

    def step(self, values: Mapping[str, float]) -> None:
        self._untold = values
        if self._due("step"):
            self._tell_untold()

    def _tell_untold(self) -> None:
        """The line of the newest step, if it came too soon after another; the last is always
        told."""
        values, self._untold = self._untold, None
        if values is None:
            return
        parts = [f"step {int(values.get('train_step', 0))}"]
        parts += [
            f"{title} {_cell(values, key, digits)}"
            for key, title, digits in _COLUMNS
            if key in values
        ]
        if arena := _arena_text(values):
            parts.append(arena)
        print("  ".join(parts), file=self._stream, flush=True)

    def close(self) -> None:
        self._tell_untold()
        self._stream.flush()

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, 0.0) < _LINE_EVERY_S:
            return False
        self._last[what] = now
        return True


_COLUMNS = (
    ("reward", "reward", 3),
    ("eval/reward", "held-out", 3),
    ("staleness_mean", "stale", 2),
    ("kl_engine", "KL", 5),
    ("tokens_per_s", "tok/s", 0),
    ("learner_wait_share", "wait", 2),
    ("step_s", "s", 2),
    ("window/failed_samples", "failed", 0),
    ("window/filtered_samples", "filtered", 0),
    ("buffer_groups", "buffer", 0),
)
"""Metric, title, digits; the last ones are the first that a narrow terminal does without."""
_GAP = 2
"""Columns of the terminal between two of the table."""


def _cell(values: Mapping[str, float], key: str, digits: int) -> str:
    if key not in values:
        return "·"
    return f"{values[key]:,.{digits}f}"


def _arena_text(values: Mapping[str, float]) -> str:
    """`arena 15.6 MiB; sessions: replay 144, state 1`; empty where nothing is known."""
    parts = []
    if "arena_bytes" in values:
        parts.append(f"arena {values['arena_bytes'] / (1 << 20):,.1f} MiB")
    owners = sorted(key for key in values if key.startswith("owner/"))
    if owners:
        held = ", ".join(f"{k.removeprefix('owner/')} {values[k]:g}" for k in owners)
        parts.append(f"sessions: {held}")
    return "; ".join(parts)


class LiveDisplay:
    """A table of the last steps, progress bars, and the arena by owner."""

    def __init__(self, table_rows: int, stream: TextIO, width: int | None = None) -> None:
        """`width`: in columns, instead of the terminal's."""
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._rows: deque[Mapping[str, float]] = deque(maxlen=table_rows)
        self._console = Console(file=stream, width=width)
        self._progress = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:g}/{task.total:g} {task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._bars: dict[str, object] = {}
        self._live = Live(
            self._render(),
            console=self._console,
            refresh_per_second=4,
            transient=False,
            redirect_stdout=False,  # it belongs to the result
        )
        self._live.start()

    def note(self, text: str) -> None:
        # The terminal wraps it: a path or command in it can be copied whole.
        self._live.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def phase(self, name: str, done: float, total: float, detail: str = "") -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, detail="")
        self._progress.update(self._bars[name], completed=done, total=total, detail=detail)  # type: ignore[arg-type]
        self._live.update(self._render())

    def step(self, values: Mapping[str, float]) -> None:
        self._rows.append(dict(values))
        self._live.update(self._render())

    def close(self) -> None:
        if self._live.is_started:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group

        parts: list[RenderableType] = [self._progress]
        if self._rows:
            parts = [self._table(), self._arena(), self._progress]
        return Group(*parts)

    def _table(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        columns = [["step", *(f"{int(row.get('train_step', 0))}" for row in self._rows)]]
        columns += [
            [title, *(_cell(row, key, digits) for row in self._rows)]
            for key, title, digits in _COLUMNS
        ]
        while sum(max(map(len, c)) + _GAP for c in columns) - _GAP > self._console.width:
            columns.pop()
        for title, *_ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for cells in zip(*(cells for _, *cells in columns), strict=True):
            table.add_row(*cells)
        return table

    def _arena(self) -> RenderableType:
        from rich.text import Text

        return Text(_arena_text(self._rows[-1]), style="dim")
