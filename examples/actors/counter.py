"""A counter: an actor is a plain class; a call is awaitable, from anywhere in the run.

python examples/actors/counter.py
"""

from __future__ import annotations

import asyncio

import actors


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    async def add(self, n: int) -> int:
        self.value += n
        return self.value

    def slow_square(self, x: int) -> int:
        """A `def` method runs in a thread: the actor goes on answering meanwhile."""
        return sum(x for _ in range(x))


class Customer:
    """Another actor that was given the counter's handle."""

    def __init__(self, counter: actors.Handle) -> None:
        self.counter = counter

    async def buy(self, n: int) -> int:
        total: int = await self.counter.add(n)
        return total


async def main() -> None:
    async with actors.Runtime() as rt:
        counter = await rt.spawn(Counter, 10, name="counter")
        print("one call:", await counter.add(1))
        answers = await asyncio.gather(*(counter.add(1) for _ in range(1000)))
        print("a thousand at once, in order:", answers[0], "to", answers[-1])

        customers = await rt.spawn_many(Customer, 2, counter, name="customer")
        await customers.each.buy(5)
        print("after two customers:", await (await rt.lookup("counter")).add(0))

        square = counter.slow_square(200_000)
        print("still answering:", await counter.add(0))
        print("and the slow one:", await square)
        try:
            await counter.add("not a number")
        except TypeError as error:  # the class that was raised over there
            print("an error arrives as itself:", error)


if __name__ == "__main__":
    actors.run(main())
