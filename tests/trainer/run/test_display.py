"""What a person sees of a run: lines, the live table, the plot."""

from __future__ import annotations

import errno
import io

import pytest

from trainer.metrics import MetricsWriter
from trainer.run.display import LiveDisplay, PlainDisplay, make_display
from trainer.run.folder import RunFolder
from trainer.run.plot import plot_rewards, smoothed


def test_a_display_that_nobody_can_see_any_more_is_silent() -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    display = make_display(table_rows=3, stream=Broken())
    display.note("hello")
    display.step({"train_step": 1.0})
    display.close()


def test_the_plot_is_a_picture(folder: RunFolder) -> None:
    writer = MetricsWriter(folder.metrics_file, None)
    for step in range(1, 30):
        writer.write(
            step, {"reward": step / 30, **({"eval/reward": 0.5} if step % 10 == 0 else {})}
        )
    writer.close()
    plot_rewards(folder.metrics_file, folder.plot_file, "r")
    assert folder.plot_file.read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_running_mean_over_a_twentieth() -> None:
    assert smoothed([float(i) for i in range(40)])[-1] == 38.5
    assert smoothed([1.0, 3.0]) == [1.0, 3.0]


def test_plain_lines_say_step_and_reward() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step({"train_step": 7, "reward": 0.25, "arena_bytes": 3 << 20})
    display.step({"train_step": 8, "reward": 0.5})  # within the same second: left out
    display.note("engine restarted")
    assert stream.getvalue() == "step 7  reward 0.250  arena 3.0 MiB\nengine restarted\n"


def test_plain_lines_say_who_owns_what_and_leave_out_no_last_step() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step({"train_step": 7, "owner/replay": 32.0, "owner/learner": 16.0})
    display.step({"train_step": 8, "owner/weights": 1.0})
    display.close()
    display.close()
    assert stream.getvalue().splitlines() == [
        "step 7  sessions: learner 16, replay 32",
        "step 8  sessions: weights 1",
    ]


def test_a_note_is_shown_as_it_is_whatever_it_says() -> None:
    stream = io.StringIO()
    display = LiveDisplay(3, stream, 80)
    for text in ("what [bold]the judge[/] said: [/tmp/x] :x:", "[red]", "`shmrl resume x`" * 9):
        display.note(text)
        assert f"{text}\n" in stream.getvalue()
    display.close()


LATEST = {
    "train_step": 1200.0,
    "reward": 0.907,
    "eval/reward": 0.918,
    "staleness_mean": 0.62,
    "kl_engine": 0.00191,
    "tokens_per_s": 16_029.0,
    "learner_wait_share": 0.51,
    "step_s": 0.82,
    "window/failed_samples": 8.0,
    "window/filtered_samples": 1576.0,
    "buffer_groups": 18.0,
    "arena_bytes": 16.0 * (1 << 20),
    "owner/producer-0": 232.0,
    "owner/replay": 144.0,
}


@pytest.mark.parametrize(
    ("width", "last"), [(120, "18"), (80, "1,576"), (60, "0.82"), (40, "0.00191")]
)
def test_a_narrow_live_table_leaves_columns_out_and_wraps_or_cuts_none(
    width: int, last: str
) -> None:
    stream = io.StringIO()
    display = LiveDisplay(3, stream, width)
    display.step(LATEST)
    display.close()
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:3] == ["step", "reward", "held-out"]
    assert lines[1].split()[:3] == ["1200", "0.907", "0.918"]
    assert lines[1].split()[-1] == last
    assert "…" not in stream.getvalue()
    assert "arena 16.0 MiB; sessions: producer-0" in stream.getvalue()
