"""Signals before a run has begun and after it has ended, when nothing of its own handles them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shmstore import Store
from tests.trainer.run import runs

pytestmark = pytest.mark.timeout(600)  # against a hang: a loaded machine starts processes slowly

WHEN_IMPORTED = """
import importlib.abc, os, sys
class SendsASignal(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), {number})
            except KeyboardInterrupt:
                {then}
sys.meta_path.insert(0, SendsASignal())
"""


@pytest.mark.parametrize(
    ("command", "number", "module", "then"),
    [
        ("train", signal.SIGTERM, "trainer.config", "raise"),
        ("train", signal.SIGHUP, "trainer.fit", "raise"),
        ("train", signal.SIGINT, "actors", "raise"),
        ("resume", signal.SIGTERM, "trainer.run.folder", "raise"),
        ("eval", signal.SIGTERM, "trainer.run.eval_run", "raise ImportError('half a module')"),
        ("top", signal.SIGTERM, "actors.top", "raise"),
    ],
)
def test_a_signal_while_the_command_still_imports_ends_it_in_order(
    tmp_path: Path, command: str, number: signal.Signals, module: str, then: str
) -> None:
    prelude = WHEN_IMPORTED.format(module=module, number=int(number), then=then)
    if command == "train":
        run = runs.start(tmp_path, prelude=prelude)
    else:
        run = runs.Run([command, str(tmp_path)], tmp_path, prelude=prelude)
    result = run.result()
    said = f"shmrl: interrupted by {number.name}\n"
    assert (result.status, result.summary, result.stderr) == (130, {}, said)
    assert run.name not in Store.list()


LATE = """
import os, trainer.cli
tell = trainer.cli._tell
def tell_late(text):
    for number in (1, 2, 15):
        os.kill(os.getpid(), number)
    tell(text)
trainer.cli._tell = tell_late
"""


def test_signals_after_the_end_of_a_run_change_nothing(tmp_path: Path) -> None:
    quick = ("schedule.steps=1", "eval.prompts=0", "checkpoint.final=false", "metrics.plot=false")
    run = runs.start(tmp_path, *quick, prelude=LATE)
    result = run.result()
    assert (result.status, result.summary["steps"]) == (0, 1), result.stderr
    runs.check_clean(result, run.name)


def test_a_folder_that_was_only_begun_is_not_in_the_way_of_the_next_run(tmp_path: Path) -> None:
    interrupt = "import trainer.run.folder as f\ndef stop(*_): raise KeyboardInterrupt\n"
    run = runs.start(tmp_path, prelude=interrupt + "f.write_atomically = stop\n")
    assert run.result().status == 130
    assert not run.folder.exists()
