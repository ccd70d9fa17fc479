"""A pipeline whose large values never pass through a socket: only their names do.

python examples/actors/pipeline.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import actors
from shmstore import ObjectRef

Array = np.ndarray[Any, Any]


class Source:
    async def make(self, i: int) -> ObjectRef:
        """Put 8 MiB into the arena and hand out their name."""
        store = actors.current().runtime.store
        ref: ObjectRef = store.put(np.full(1 << 20, float(i)))
        return ref


class Scale:
    async def by(self, factor: float, array: Array) -> ObjectRef:
        """A ref as an argument arrives as its value: a read-only view of the same memory."""
        store = actors.current().runtime.store
        with store.build(array.shape, array.dtype) as draft:
            np.multiply(array, factor, out=draft.array)  # written in place, no copy
        ref: ObjectRef = draft.ref
        return ref


class Sum:
    async def of(self, arrays: list[ObjectRef]) -> float:
        """Nested refs stay refs; resolve them where they are needed."""
        store = actors.current().runtime.store
        return float(sum(store.get(ref).sum() for ref in arrays))


async def main() -> None:
    async with actors.Runtime(store="256MiB") as rt:
        source = await rt.spawn(Source, name="source")
        scale = await rt.spawn(Scale, name="scale")
        total = await rt.spawn(Sum, name="sum")
        scaled = [await scale.by(10.0, await source.make(i)) for i in range(4)]
        print("sum:", await total.of(scaled))
        print("objects alive:", rt.store.stats().objects)
        del scaled  # nobody holds them any more, once the senders have heard that they arrived
        await source.stop()
        await scale.stop()
        print("objects alive:", rt.store.stats().objects)


if __name__ == "__main__":
    actors.run(main())
