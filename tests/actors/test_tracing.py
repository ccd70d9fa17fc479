"""OpenTelemetry: one trace from the caller through two actors, when the package is there."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import actors

KEPT: list[Any] = []


def start_exporter() -> None:
    """Keep the spans of this process in a list."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if KEPT:
        return
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    KEPT.append(exporter)


def spans() -> list[tuple[str, int, int, int]]:
    """(name, trace id, span id, parent's span id or 0) of the spans that have ended here."""
    return [
        (s.name, s.context.trace_id, s.context.span_id, s.parent.span_id if s.parent else 0)
        for s in KEPT[0].get_finished_spans()
    ]


class Worker:
    def __init__(self, other: actors.Handle | None = None) -> None:
        start_exporter()
        self.other = other

    async def relay(self, x: int) -> int:
        assert self.other is not None
        answer: int = await self.other.work(x)
        return answer

    def work(self, x: int) -> int:
        return x + 1

    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    async def fail(self) -> None:
        raise ValueError("no")

    async def spans(self) -> list[tuple[str, int, int, int]]:
        return spans()


async def test_a_call_is_one_trace_through_all_processes_that_it_passes() -> None:
    pytest.importorskip("opentelemetry.sdk")
    start_exporter()
    KEPT[0].clear()
    async with actors.Runtime(tracing=True) as rt:
        inner = await rt.spawn(Worker, name="inner")
        outer = await rt.spawn(Worker, inner, name="outer")
        assert await outer.relay(1) == 2
        assert [x async for x in inner.count.stream(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="no"):
            await inner.fail()
        here = {name: rest for name, *rest in spans()}
        there = {(name, parent): rest for name, *rest, parent in await outer.spans()}
        deep = {name: rest for name, *rest in await inner.spans()}
    trace_id, span_id, _ = here["outer.relay"]
    served = next(v for (name, parent), v in there.items() if parent == span_id)
    assert served[0] == trace_id
    called = next(v for (name, parent), v in there.items() if parent == served[1])
    assert deep["inner.work"][0] == trace_id
    assert deep["inner.work"][2] == called[1]
    assert deep["inner.count"][2] == here["inner.count"][1]
    assert "inner.fail" in here


def test_tracing_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(actors.UsageError, match="opentelemetry-api"):
        actors.Runtime(tracing=True)
