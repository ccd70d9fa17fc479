"""A fresh interpreter that resumes snapshots: `python -m tests.trainer.lifecycle.resumed`.

Reads the names of folders, one a line, from its standard input; resumes each into an arena of its
own and answers with one line of JSON: each group's uid and, in hex, every byte of its segments.
Shares nothing with the process that wrote the snapshot but the folder. Started by the tests of
snapshots, with `Resumer`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from shmstore.testing import temporary_store
from trainer.replay import ReplayBuffer
from trainer.rollout import Group
from trainer.trace import TraceStore

__all__ = ["Resumer", "payload", "resumed"]

_COLUMNS = ("token_ids", "labels", "logprobs", "model_steps", "routed_experts")
_ROOT = Path(__file__).parents[3]


def payload(traces: TraceStore, group: Group) -> list[bytes]:
    """Every byte of every segment of a group."""
    found = []
    for session_id in group.session_ids:
        for node in range(traces.length(session_id)):
            segment = traces.segment(session_id, node)
            for name in _COLUMNS:
                array = getattr(segment, name)
                found.append(b"" if array is None else array.tobytes())
            found.append(segment.text.encode())
    return found


async def resumed(folder: Path, **options: Any) -> list[tuple[Group, list[bytes]]]:
    """Groups and payloads of a snapshot, read into a new arena."""
    with temporary_store("16MiB") as other:
        buffer = await ReplayBuffer.resume(folder, other, **options)
        traces = TraceStore(other)
        found = [(entry.group, payload(traces, entry.group)) for entry in buffer._index]
        buffer.check_books()
        buffer.close()
    return found


class Resumer:
    """The interpreter, from the outside; ends with the block."""

    def __enter__(self) -> Resumer:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.lifecycle.resumed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        return self

    def __call__(self, folder: Path) -> list[tuple[str, list[str]]]:
        """(uid, payload in hex) of each group in the snapshot."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the interpreter ended at {folder}; its error is above"
        return [(uid, told) for uid, told in json.loads(answer)]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()
        assert self._process.returncode == 0 or error is not None


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        groups = asyncio.run(resumed(Path(line.rstrip("\n"))))
        told = [[group.uid, [one.hex() for one in found]] for group, found in groups]
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
