"""The command `shmrl`: parses arguments, calls one layer, turns errors into exit statuses.

Owns nothing but that; the only file that may read environment variables. Heavy imports happen
inside the command that needs them, so that `shmrl store ls` answers at once.

Exit statuses: 0 done; 1 the run or command failed, or what looks for faults (`doctor`, `store
check`) has found one, as `diff` and `grep` say it; 2 usage or configuration; 3 something of the run
was left in the arena (its owners are printed); 130 interrupted (Ctrl-C, SIGTERM, a terminal that
was closed).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.run.signals import (
    handlers_put_back,
    ignored_from_now_on,
    interrupted_by_signals,
)
from trainer.run.summary import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LEFTOVERS, EXIT_OK, EXIT_USAGE

__all__ = ["main"]

_PASSED_ON = ("store", "top", "bench")
"""Commands whose arguments belong to another layer's own parser."""
_EVAL_PROMPTS_MAX = 1 << 20
"""They are drawn before the evaluation begins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    _fill_standard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    whole_process = arguments is None
    around = contextlib.nullcontext() if whole_process else handlers_put_back()
    with around, interrupted_by_signals() as came:
        return _guarded(lambda: _run(given), came)


def _run(given: Sequence[str]) -> int:
    if given and given[0] in _PASSED_ON:
        return _PASS[given[0]](given[1:])
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    options, unknown = parser.parse_known_args(given)
    if unknown:
        field = any("=" in each and not each.startswith("-") for each in unknown)
        hint = "; a field of the configuration is changed by --set section.field=value"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint if field else ''}")
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _fill_standard_streams() -> None:
    """A stream that was closed before we began (`<&-`) leads to nowhere: otherwise the next file
    or socket that is opened takes its number, and is written to or guarded as if it were that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: that one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))


def _guarded(command: Callable[[], int], came: Sequence[str]) -> int:
    """Errors of ours become one message and a status; anything else is a bug and keeps its
    trace, unless it is what a signal that `came` has made of an import.
    """
    from trainer.errors import ConfigError, TrainerError

    status = EXIT_OK
    try:
        try:
            status = command()
        except Exception as error:
            if came:
                raise KeyboardInterrupt from error
            raise
        sys.stdout.flush()
        return status
    except ConfigError as error:
        _complain(f"shmrl: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        _complain(f"shmrl: interrupted{''.join(f' by {name}' for name in came[:1])}")
        return EXIT_INTERRUPTED
    except BrokenPipeError as error:
        if _reader_has_gone():
            _drop_output()
            return status
        _complain(f"shmrl: {type(error).__name__}: {error}")
        return EXIT_FAILED
    except TrainerError as error:
        _complain(f"shmrl: {type(error).__name__}: {error}")
        return EXIT_FAILED
    except Exception as error:
        if not _is_ours(error):
            raise
        _complain(f"shmrl: {type(error).__name__}: {error}")
        return EXIT_FAILED


def _tell(text: str) -> None:
    """The result, on stdout. A reader that has gone does not change how the command ends."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        from trainer.errors import TrainerError

        _drop_output()
        raise TrainerError(
            f"stdout cannot be written ({error}); this was to go there: {text}"
        ) from error


def _complain(text: str) -> None:
    """A line on stderr, if there is one; the exit status says the same."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more (`| head`)."""
    probe = select.poll()
    probe.register(sys.stdout.fileno(), 0)  # only what is reported unasked: error, hang-up
    return bool(probe.poll(0))


def _drop_output() -> None:
    """Nobody reads stdout: what is still written to it, at exit at the latest, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_ours(error: Exception) -> bool:
    """Errors of the two layers below, without importing a layer that the command did not use."""
    bases = (("shmstore.errors", "StoreError"), ("actors.errors", "ActorError"))
    modules = [(sys.modules.get(module), name) for module, name in bases]
    return any(m is not None and isinstance(error, vars(m)[name]) for m, name in modules)


_RUN_HELP = "run folder, or its name below runs/"
_JSON_HELP = "end with one line of JSON on stdout"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmrl",
        description="Asynchronous reinforcement learning of mixture-of-experts language models.",
        epilog="Exit status: 0 done; 1 failed, or doctor found something; 2 usage or configuration;"
        " 3 something was left in the arena; 130 interrupted. Begin with: shmrl train CONFIG.",
    )
    parser.add_argument("--version", action="version", version=f"shmrl {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train from a configuration file")
    train.add_argument("config", type=Path, metavar="CONFIG", help="YAML file (docs/config.md)")
    train.set_defaults(command=_train)

    resume = commands.add_parser("resume", help="go on with a run from its latest checkpoint")
    resume.add_argument("run", metavar="RUN", help=_RUN_HELP)
    resume.set_defaults(command=_resume)

    for sub in (train, resume):
        sub.add_argument(
            "--set",
            action="extend",
            nargs="+",
            default=[],
            metavar="a.b=c",
            dest="overrides",
            help="change fields of the configuration (docs/config.md); may be repeated",
        )
        sub.add_argument("--json", action="store_true", help=_JSON_HELP)
        sub.add_argument("--quiet", action="store_true", help="no table, no progress")

    evaluate = commands.add_parser(
        "eval", help="evaluate a run's latest checkpoint on held-out prompts"
    )
    evaluate.add_argument("run", metavar="RUN", help=_RUN_HELP)
    evaluate.add_argument("--step", type=int, help="the checkpoint of this train step")
    evaluate.add_argument(
        "--prompts",
        type=_prompts,
        metavar="N",
        help=f"held-out prompts, 1 to {_EVAL_PROMPTS_MAX} (default: eval.prompts)",
    )
    evaluate.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="0 or more; 0 is greedy (default: eval.temperature)",
    )
    evaluate.add_argument("--json", action="store_true", help=_JSON_HELP)
    evaluate.set_defaults(command=_eval)

    doctor = commands.add_parser(
        "doctor",
        help="find what dead runs left behind; check this machine",
        epilog="Exit status: 0 nothing is left behind and every arena is sound; 1 something was "
        "found, and is still there (debris without --clean, an arena that is unsound).",
    )
    doctor.add_argument("--clean", action="store_true", help="remove arenas without a live process")
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    doctor.set_defaults(command=_doctor)

    node = commands.add_parser("node", help="join a run as another host (not available yet)")
    node.add_argument("--join", metavar="tcp://HEAD:PORT", help="where the run's head listens")
    node.set_defaults(command=_node)

    for name, text in (
        ("store", "look into arenas: ls, stat, top, check, rm, doctor"),
        ("top", "the processes of a run, live"),
        ("bench", "measure: store, actors, replay, train"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _prompts(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= _EVAL_PROMPTS_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from 1 to {_EVAL_PROMPTS_MAX}"
        )
    return int(text)


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shmrl")
    except PackageNotFoundError:
        return "(not installed: run from a source tree)"


def _train(options: argparse.Namespace) -> int:
    from trainer.config import load
    from trainer.run.folder import RunFolder, default_run_name
    from trainer.run.wiring import check_devices

    config = load(options.config, options.overrides)
    check_devices(config, _gpus())
    folder = RunFolder.create(config, config.run.name or default_run_name(options.config))
    return _fit(folder, options, resume=False)


def _resume(options: argparse.Namespace) -> int:
    from trainer.run.folder import BadRunFolder, RunFolder
    from trainer.run.wiring import check_devices

    folder = RunFolder.open(options.run)
    config = folder.config(tuple(options.overrides))
    check_devices(config, _gpus())
    with folder.claimed():
        try:
            folder.write_config(config)
        except OSError as error:
            raise BadRunFolder(
                f"{folder.path} cannot be written: {error}; a run goes on in its own folder: make "
                "room there, or copy the folder"
            ) from error
        return _fit(folder, options, resume=True)


def _fit(folder: object, options: argparse.Namespace, *, resume: bool) -> int:
    from trainer.fit import run_blocking
    from trainer.run.folder import RunFolder

    assert isinstance(folder, RunFolder)
    summary = run_blocking(folder, resume=resume, quiet=options.quiet, gpus=_gpus())
    ignored_from_now_on()
    if options.json:
        _tell(json.dumps(summary.to_json()))
    if summary.error:
        _complain(f"shmrl: {summary.error}")
    return summary.exit


def _eval(options: argparse.Namespace) -> int:
    from trainer.run.eval_run import evaluate_run
    from trainer.run.folder import RunFolder

    folder = RunFolder.open(options.run)
    result = evaluate_run(
        folder,
        step=options.step,
        prompts=options.prompts,
        temperature=options.temperature,
        gpus=_gpus(),
        say=_complain,
    )
    left = result.get("left_by_owner")
    _tell(json.dumps(result) if options.json else _lines(result))
    if left:
        _complain(f"shmrl: something was left in the arena, by owner: {left}")
        return EXIT_LEFTOVERS
    if result["reward"] is None:
        _complain(
            f"shmrl: {result['failed']} of {result['rollouts']} rollouts failed; why is in "
            f"{folder.logs / 'eval'}"
        )
        return EXIT_FAILED
    return EXIT_OK


def _gpus() -> list[str] | None:
    """What CUDA calls the devices that its variable leaves this command; None: it says nothing.

    As CUDA reads it: the list ends at the first entry that is no device.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = (entry.strip() for entry in text.split(","))
    return list(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, entries))


def _lines(result: dict[str, object]) -> str:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in result.items()}
    return "\n".join(f"{name:<24} {value}" for name, value in shown.items())


def _doctor(options: argparse.Namespace) -> int:
    from trainer.doctor import run_doctor

    return run_doctor(clean=options.clean, as_json=options.json)


def _node(options: argparse.Namespace) -> int:
    _complain(
        "shmrl: runs over several hosts are not available yet; one host can use all its devices "
        "(engine.replicas, learner.device). Nothing was joined.",
    )
    return EXIT_USAGE


def _store(arguments: Sequence[str]) -> int:
    from shmstore.cli import main as store_main

    return store_main(list(arguments))


def _top(arguments: Sequence[str]) -> int:
    from actors.top import main as top_main

    # A run's folder names it as well, as with the other commands.
    return top_main(
        [
            os.path.basename(os.path.abspath(a)) if Path(a, "config.yaml").is_file() else a
            for a in arguments
        ]
    )


def _bench(arguments: Sequence[str]) -> int:
    try:
        from bench.__main__ import main as bench_main
    except ModuleNotFoundError as error:
        if error.name not in ("bench", "bench.__main__"):
            raise
        _complain(
            "shmrl: the benchmarks are part of the source tree, not of the installed package: run "
            "`shmrl bench` or `python -m bench` in a checkout"
        )
        return EXIT_USAGE
    return bench_main(list(arguments))


_PASS: dict[str, Callable[[Sequence[str]], int]] = {"store": _store, "top": _top, "bench": _bench}


if __name__ == "__main__":
    sys.exit(main())
