"""An actor that dies in every way there is, for the tests of what follows."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import actors

# A death must reach a waiting caller within this: docs/actors.md says a second.
NOTICE_S = 1.0


class Victim:
    def __init__(self, fail_file: str | None = None) -> None:
        if fail_file is not None and Path(fail_file).exists():
            raise RuntimeError("the file says no")
        self.helper: subprocess.Popen[bytes] | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def forever(self) -> None:
        await asyncio.Event().wait()

    def busy(self, seconds: float) -> None:
        time.sleep(seconds)

    async def incarnation(self) -> int:
        return actors.current().incarnation

    async def segfault(self) -> None:
        ctypes.string_at(0)

    async def os_exit(self, code: int) -> None:
        os._exit(code)

    async def sys_exit(self, code: int) -> None:
        sys.exit(code)

    def sys_exit_in_thread(self, code: int) -> None:
        sys.exit(code)

    async def complain(self, text: str) -> None:
        print(text, file=sys.stderr)

    async def start_helper(self) -> int:
        self.helper = subprocess.Popen(["sleep", "600"])
        return self.helper.pid

    def eat(self, n_bytes: int) -> int:
        return len(bytearray(n_bytes))
