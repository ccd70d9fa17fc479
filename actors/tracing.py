"""OpenTelemetry spans around calls, where that package is installed and a run asks for them.

Owns the translation between spans and the trace fields of a frame. Used by `handle`, `answers` and
`node` (caller) and `mailbox` (actor) when `Runtime(tracing=True)`; otherwise none of it runs. Only
the API is used: which provider exports the spans of a process is that process's business (set it in
the driver, and in `__init__` of an actor).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from .errors import UsageError
from .method import Method, Shape

__all__ = ["Tracing"]

_LOW = (1 << 64) - 1


class Tracing:
    """Of one process. Raises UsageError when opentelemetry-api is not installed."""

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise UsageError(
                "Runtime(tracing=True) needs the package opentelemetry-api; install it, or leave"
                " tracing out"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("shmrl.actors")
        self._open: dict[int, Any] = {}  # calls of this process that wait for their answer

    # ---- the caller ---------------------------------------------------------------------------

    def begin(self, call_id: int, label: str) -> tuple[int, int, int]:
        """A span for a call that is being made; what its frame carries of it."""
        span = self._tracer.start_span(label, kind=self._trace.SpanKind.CLIENT)
        self._open[call_id] = span
        context = span.get_span_context()
        return context.trace_id >> 64, context.trace_id & _LOW, context.span_id

    def end(self, call_id: int, error: str = "") -> None:
        """The call is over: answered, or with an error."""
        span = self._open.pop(call_id, None)
        if span is None:
            return
        if error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end()

    # ---- the actor ----------------------------------------------------------------------------

    def wrap(
        self, function: Callable[..., Any], actor: str, method: Method, ids: tuple[int, int, int]
    ) -> Callable[..., Any]:
        """The method inside a span whose parent is the caller's; of the same shape as before."""
        name = f"{actor}.{method.name}"
        if method.shape in (Shape.INLINE, Shape.ASYNC):
            return self._wrap_async(function, name, ids)
        if method.shape is Shape.ASYNC_STREAM:
            return self._wrap_async_stream(function, name, ids)
        if method.shape is Shape.SYNC_STREAM:
            return self._wrap_stream(function, name, ids)

        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._as_current(name, ids):
                return function(*args, **kwargs)

        return traced

    def _wrap_async(
        self, function: Callable[..., Any], name: str, ids: tuple[int, int, int]
    ) -> Callable[..., Any]:
        async def traced(*args: Any, **kwargs: Any) -> Any:
            with self._as_current(name, ids):
                return await function(*args, **kwargs)

        return traced

    def _wrap_async_stream(
        self, function: Callable[..., Any], name: str, ids: tuple[int, int, int]
    ) -> Callable[..., Any]:
        async def traced(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with self._beside(name, ids):
                async for item in function(*args, **kwargs):
                    yield item

        return traced

    def _wrap_stream(
        self, function: Callable[..., Any], name: str, ids: tuple[int, int, int]
    ) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._beside(name, ids):
                yield from function(*args, **kwargs)

        return traced

    def _parent(self, ids: tuple[int, int, int]) -> Any:
        """The context of the caller's span; None when the call came without one."""
        high, low, span_id = ids
        if not span_id:
            return None
        trace = self._trace
        remote = trace.SpanContext(
            trace_id=high << 64 | low,
            span_id=span_id,
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        return trace.set_span_in_context(trace.NonRecordingSpan(remote))

    def _as_current(self, name: str, ids: tuple[int, int, int]) -> Any:
        return self._tracer.start_as_current_span(
            name, context=self._parent(ids), kind=self._trace.SpanKind.SERVER
        )

    def _beside(self, name: str, ids: tuple[int, int, int]) -> Any:
        """For generators, whose steps run in contexts of their own: not made the current span."""
        return contextlib.closing(
            _Ending(
                self._tracer.start_span(
                    name, context=self._parent(ids), kind=self._trace.SpanKind.SERVER
                )
            )
        )


class _Ending:
    """A span that `contextlib.closing` ends."""

    def __init__(self, span: Any) -> None:
        self.close = span.end
