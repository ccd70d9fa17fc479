"""Which process sees which device, and what is refused before any of them starts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.run.runs import ROOT, TINY
from trainer.cli import main
from trainer.config import Config, ConfigMistakes, load
from trainer.errors import ConfigError
from trainer.placement import (
    cuda_number,
    keep_for_good,
    own_device,
    plan_devices,
    replica_devices,
)
from trainer.run.wiring import _Plan, check_devices


def _config(*overrides: str) -> Config:
    return load(TINY, overrides)


def _visible(config: Config, gpus: list[str]) -> dict[str, str]:
    plan = _Plan(config, gpus)
    return {
        name: plan.environment(name)["CUDA_VISIBLE_DEVICES"]
        for name in ("learner", *plan.engines, "producer")
    }


SHARED = ("learner.memory_fraction=0.6", "engine.memory_fraction=0.3")
TOO_MUCH = ("learner.memory_fraction=0.7", "engine.memory_fraction=0.4")
TWO_ENGINES = ("engine.inline=false", "engine.replicas=2")


@pytest.mark.parametrize(
    ("overrides", "visible"),
    [
        ((), {"learner": "", "producer": ""}),
        (
            ("learner.device=cuda:0", "engine.device=cuda:1"),
            {"learner": "GPU-a", "producer": "7"},
        ),
        (
            ("learner.device=cuda:1", "engine.device=cuda:1", *SHARED),
            {"learner": "7", "producer": "7"},
        ),
        (
            ("learner.device=cpu", "engine.device=cuda", "engine.inline=false"),
            {"learner": "", "engine-0": "GPU-a", "producer": ""},
        ),
        (
            ("learner.device=cuda:0", "engine.device=cuda:1", *TWO_ENGINES),
            {"learner": "GPU-a", "engine-0": "7", "engine-1": "3", "producer": ""},
        ),
    ],
)
def test_each_process_sees_the_device_that_the_configuration_names_and_no_other(
    overrides: tuple[str, ...], visible: dict[str, str]
) -> None:
    """A learner and an engine may share one: the placement of actors, which hands devices out
    whole, would refuse the second."""
    assert _visible(_config(*overrides), ["GPU-a", "7", "3"]) == visible


def test_a_process_calls_its_device_the_first_because_it_sees_no_other() -> None:
    assert [own_device(name) for name in ("cpu", "cuda", "cuda:3")] == ["cpu", "cuda:0", "cuda:0"]
    assert replica_devices("cpu", 2) == ["cpu", "cpu"]
    assert replica_devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert [cuda_number(name) for name in ("cpu", "cuda", "cuda:12")] == [None, 0, 12]
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:x", "mps", ""):
        with pytest.raises(ConfigError, match="give cpu, cuda or cuda:N"):
            cuda_number(name)


def test_all_devices_that_are_missing_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_devices([("learner", "cuda:1"), ("engine-0", "cpu"), ("engine-1", "cuda:4")], ["0"])
    text = str(caught.value)
    assert "learner needs cuda:1; engine-1 needs cuda:4; this run may use cpu, cuda:0" in text
    assert "engine-0" not in text
    with pytest.raises(ConfigError, match="engine-1 needs cuda:2"):
        check_devices(_config("engine.device=cuda:1", *TWO_ENGINES), ["0", "1"])


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (("learner.device=cuda:x",), "learner.device", "give cpu, cuda or cuda:N"),
        (("engine.device=tpu",), "engine.device", "give cpu, cuda or cuda:N"),
        (("engine.memory_fraction=0.5",), "engine.memory_fraction", "the device is cpu"),
        (
            ("learner.device=cuda", "engine.device=cuda:0"),
            "learner.memory_fraction",
            "share cuda:0: give both",
        ),
        (
            ("learner.device=cuda:1", "engine.device=cuda:0", *TWO_ENGINES, *TOO_MUCH),
            "learner.memory_fraction",
            "together at most 1",
        ),
    ],
)
def test_devices_that_no_machine_could_serve_are_mistakes_of_the_configuration(
    overrides: tuple[str, ...], path: str, words: str
) -> None:
    with pytest.raises(ConfigMistakes) as caught:
        _config(*overrides)
    assert words in {m.path: m.message for m in caught.value.mistakes}[path]


def test_taking_turns_needs_no_split_of_the_memory() -> None:
    _config("learner.device=cuda:0", "engine.device=cuda:0", "schedule.name=colocated")


def test_what_must_repeat_exactly_gets_the_workspace_without_which_torch_refuses() -> None:
    config = _config("learner.device=cuda:0", "engine.device=cuda:1", "learner.deterministic=true")
    assert _Plan(config, ["0", "1"]).environment("learner")["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    free = replace(config, learner=replace(config.learner, deterministic=False))
    assert "CUBLAS_WORKSPACE_CONFIG" not in _Plan(free, ["0", "1"]).environment("learner")


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("", "may use cpu."),
        ("-1,0", "may use cpu."),
        ("NoDevFiles", "may use cpu."),
        ("3", "may use cpu, cuda:0."),
        ("GPU-12ab, MIG-3,x,4", "may use cpu, cuda:0, cuda:1."),
    ],
)
def test_the_command_counts_the_devices_that_its_environment_leaves_it(
    variable: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(TINY), "--set", "engine.device=cuda:2"]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is left of a run that never began"


def test_the_variable_reaches_the_process_before_cuda_could_read_it(tmp_path: Path) -> None:
    """Through a real actor: its process has the device's name, ours is untouched."""
    script = (
        "import asyncio, actors, sys\n"
        "from tests.contract.cast import Worker\n"
        "async def run():\n"
        "    async with actors.Runtime(name=sys.argv[1]) as rt:\n"
        "        one = await rt.spawn(Worker, env={'CUDA_VISIBLE_DEVICES': 'GPU-a'})\n"
        "        print(await one.visible_devices())\n"
        "actors.run(run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"devices-{os.getpid()}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["GPU-a"], done.stderr


def test_what_is_kept_for_good_is_no_garbage() -> None:
    class Ring:
        own: object

    ring = Ring()
    ring.own, gone = ring, weakref.ref(ring)
    del ring
    threshold = gc.get_threshold()
    try:
        keep_for_good()
        assert gone() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
