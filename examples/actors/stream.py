"""A stream: an async generator in one process, `async for` in another, with backpressure.

python examples/actors/stream.py
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import actors


class Engine:
    def __init__(self) -> None:
        self.given = 0

    async def generate(self, prompt: str) -> AsyncIterator[str]:
        """One token at a time; at most `actors.calls.STREAM_WINDOW` ahead of the reader."""
        for letter in prompt * 1000:
            self.given += 1
            yield letter.upper()

    def count(self, n: int) -> Iterator[int]:
        """A plain generator works too, in a thread."""
        yield from range(n)

    async def how_many(self) -> int:
        return self.given


async def main() -> None:
    async with actors.Runtime() as rt:
        engine = await rt.spawn(Engine, name="engine")
        text = ""
        async for token in engine.generate.stream("hello "):
            text += token
            if len(text) == 12:
                break  # the generator over there is cancelled
        print("read:", text)
        print("made no more than the window:", await engine.how_many() <= 256 + 12)
        print("counted:", sum([i async for i in engine.count.stream(10_000)]))


if __name__ == "__main__":
    actors.run(main())
