"""Trace sessions: the tree of segments of one conversation, in the arena (lifecycle, "session";
L05, L18).

There is no server. `insert`, `search`, `export` and `release` work on shared memory in the caller's
own process; any number of `TraceStore` objects in any number of processes see the same sessions. A
node is the position of a segment in its session; each node but a root has a parent. A session that
was released is gone: inserting into it raises `SessionReleased`, and never brings it back.

Nothing is cached and no view is kept after a call, so a released session's bytes return at once.
Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmstore import headers
from trainer import segment_codec
from trainer.errors import BadSegment, RoutingGap, TraceError, TraceMismatch
from trainer.rollout import Rollout
from trainer.segment import NO_MODEL_STEP, Segment, Trace
from trainer.segment_codec import Columns

if TYPE_CHECKING:
    from shmstore import Entry, ObjectRef, Store

__all__ = ["Match", "TraceStore"]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a query that is made of whole segments.

    `length` in tokens, or in characters when the query was text; `nodes` is its path from the root.
    """

    length: int
    nodes: tuple[int, ...]


class TraceStore:
    """Trace sessions of one arena."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions = store.sessions

    def open(self, session_id: str, owner: str) -> None:
        """Begin a session; `SessionExists` while one of this id lives."""
        self._sessions.open(session_id, owner=owner)

    def insert(
        self,
        session_id: str,
        segment: Segment,
        parent: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Add a segment below `parent` (None: a new root); -> its node.

        `SessionReleased` when the session is gone; `StoreFull` when the arena has no room within
        `timeout` seconds (None: does not wait). The segment is visible to all processes when this
        returns, and never in part.
        """
        if type(segment) is not Segment:
            _check_segment(segment)
        return segment_codec.writer.append(self._store, session_id, segment, parent, timeout)

    def insert_shared(
        self,
        session_ids: Sequence[str],
        segment: Segment,
        parent: int | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Store a segment once and add it to several sessions: the prompt of a group.

        -> its node in each. All sessions get it, or those before the one that is released.
        """
        if len(session_ids) == 1:
            return [self.insert(session_ids[0], segment, parent, timeout)]
        return self.attach(session_ids, self.put_apart(segment, timeout), parent)

    def put_apart(self, segment: Segment, timeout: float | None = None) -> ObjectRef:
        """Store a segment for `attach`; it ends with the reference when it is not attached.

        `StoreFull` as in `insert`. For who may give up while a thread of its waits for room: no
        session is written to behind its back.
        """
        _check_segment(segment)
        return segment_codec.writer.put(self._store, segment, None, timeout)

    def attach(
        self, session_ids: Sequence[str], ref: ObjectRef, parent: int | None = None
    ) -> list[int]:
        """Add a stored segment to sessions; as `insert_shared`."""
        return self._store.session_attach_to_all(session_ids, ref, parent)

    def segment(self, session_id: str, node: int) -> Segment:
        """One segment as read-only views; they pin its bytes while they are kept."""
        entry = self._entry(self._objects(session_id), session_id, node)
        return self._read(entry.ref).as_segment()

    def leaves(self, session_id: str) -> list[int]:
        """Nodes without children, in the order of insertion."""
        entries = self._objects(session_id)
        parents = {entry.parent for entry in entries}
        return [node for node in range(len(entries)) if node not in parents]

    def search(
        self,
        session_id: str,
        text: str | None = None,
        token_ids: ArrayLike | None = None,
    ) -> Match:
        """The longest prefix of the query that the session stores as a path of whole segments."""
        best, _ = self._longest(self._objects(session_id), _query(text, token_ids))
        return best

    def export(
        self,
        session_id: str,
        node: int | None = None,
        text: str | None = None,
        token_ids: ArrayLike | None = None,
        *,
        with_routing: bool = True,
    ) -> Trace:
        """The path from a root to `node`, or the path that is exactly `text` or `token_ids`; copied
        once.

        With none of them given the session must have one leaf. Raises `TraceMismatch` when no path
        is exactly the query, `RoutingGap` when only some segments of the path carry routed experts.
        """
        if text is not None or token_ids is not None:
            if node is not None:
                raise TraceError("export takes one of node, text and token_ids")
            nodes = self._exact_path(session_id, _query(text, token_ids))
            if not nodes:
                return _NO_TRACE
            node = nodes[-1]
        elif node is None:
            node = self._only_leaf(session_id)
        return self._traces([(session_id, node)], with_routing)[0]

    def export_nodes(self, places: Sequence[tuple[str, int]]) -> list[Trace]:
        """The paths to many (session, node), as `export` gives each."""
        return self._traces(places, True)

    def release(self, session_ids: Sequence[str], owner: str, strict: bool = False) -> list[str]:
        """End those of the sessions that exist and are `owner`'s; -> their ids (L03, L04)."""
        return self._sessions.release(session_ids, owner, strict)

    def truncate(self, session_id: str, keep: int) -> int:
        """Let go of all segments from position `keep` on; -> how many."""
        return self._sessions.truncate(session_id, keep)

    def path(self, session_id: str, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        return self._path_to(self._objects(session_id), session_id, node)

    def parents(self, session_id: str) -> list[int | None]:
        """The parent of each node, in the order of insertion."""
        return [entry.parent for entry in self._objects(session_id)]

    def describe(self, rollout: Rollout) -> Rollout:
        """The rollout with what its session says about it: leaves, counts of tokens, model steps.

        For loops that do not keep these themselves. A session that holds other things than segments
        is left as it is.
        """
        entries = self._objects(rollout.session_id)
        found = [self._columns(entry.ref) for entry in entries]
        parts = [columns for columns in found if columns is not None]
        if len(parts) < len(found):
            return rollout
        sampled = [part.model_steps[part.model_steps != NO_MODEL_STEP] for part in parts]
        first = next((n for n, steps in enumerate(sampled) if len(steps)), len(parts))
        steps = np.concatenate(sampled) if sampled else np.empty(0, np.int32)
        n_prompt = sum(len(part.token_ids) for part in parts[:first])
        return rollout.evolve(
            leaves=tuple(_leaves_with_samples(entries, sampled)),
            n_prompt_nodes=first,
            n_prompt_tokens=n_prompt,
            n_response_tokens=sum(len(part.token_ids) for part in parts) - n_prompt,
            n_sampled_tokens=len(steps),
            model_step_min=int(steps.min()) if len(steps) else None,
            model_step_max=int(steps.max()) if len(steps) else None,
        )

    def length(self, session_id: str) -> int:
        """How many segments the session has."""
        return len(self._objects(session_id))

    def nbytes(self, session_id: str) -> int:
        """Bytes of the arena that the session's segments take."""
        return sum(entry.ref.nbytes for entry in self._objects(session_id))

    # -- inside ----------------------------------------------------------------------------------

    def _objects(self, session_id: str) -> list[Entry]:
        return self._sessions.objects(session_id)

    def _traces(self, places: Sequence[tuple[str, int]], with_routing: bool) -> list[Trace]:
        paths = self._store.read_paths(places, with_routing, self._converted, _refuse)
        return [Trace(*path) for path in paths]

    def _read(self, ref: ObjectRef) -> Columns:
        columns = segment_codec.view(memoryview(self._store.pin(ref)))
        return columns if columns is not None else segment_codec.read(self._store.get(ref))

    def _converted(self, ref: ObjectRef) -> bytes:
        """A segment that was not written here, as one that was; `TraceError` for what is none."""
        return segment_codec.stream(self._read(ref).as_segment())

    def _columns(self, ref: ObjectRef) -> Columns | None:
        """None for an object that is no segment; nothing of a user's is decoded to find out."""
        whole = memoryview(self._store.pin(ref))
        if headers.unpack(whole).kind is not headers.Kind.ARROW:
            return None
        columns = segment_codec.view(whole)
        if columns is not None:
            return columns
        value = self._store.get(ref)
        return segment_codec.read(value) if segment_codec.is_segment(value) else None

    def _entry(self, entries: list[Entry], session_id: str, node: int) -> Entry:
        if not 0 <= node < len(entries):
            raise _no_such_node(session_id, node, len(entries))
        return entries[node]

    def _only_leaf(self, session_id: str) -> int:
        leaves = self.leaves(session_id)
        if not leaves:
            raise TraceError(f"session {session_id!r} has no segments; there is no path")
        if len(leaves) > 1:
            raise TraceError(
                f"session {session_id!r} has the leaves {leaves}; say which path with node=, text= "
                "or token_ids="
            )
        return leaves[0]

    def _path_to(self, entries: list[Entry], session_id: str, node: int) -> list[int]:
        path = [node]
        parent = self._entry(entries, session_id, node).parent
        while parent is not None:
            path.append(parent)
            parent = entries[parent].parent
        return path[::-1]

    def _exact_path(self, session_id: str, query: _Query) -> list[int]:
        best, partial = self._longest(self._objects(session_id), query)
        if best.length == len(query):
            return list(best.nodes)
        unit = "characters" if query.text is not None else "tokens"
        where = f"node {best.nodes[-1]}" if best.nodes else "the root"
        raise TraceMismatch(
            f"session {session_id!r} has no path of exactly these {len(query)} {unit}: whole "
            "segments "
            f"match up to {best.length} (after {where}), and it diverges at {partial}: "
            f"{query.around(partial)}",
            length=partial,
            node=best.nodes[-1] if best.nodes else -1,
        )

    def _longest(self, entries: list[Entry], query: _Query) -> tuple[Match, int]:
        """Depth first over the paths that match; -> (longest of whole segments, longest at all)."""
        children: dict[int | None, list[int]] = {}
        for node, entry in enumerate(entries):
            children.setdefault(entry.parent, []).append(node)
        best = Match(0, ())
        partial = 0
        # A path is extended from the stack, so deep conversations need no recursion.
        stack: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        while stack:
            length, path = stack.pop()
            if length > best.length or (length == best.length and len(path) > len(best.nodes)):
                best = Match(length, path)
            # Reversed, so that the first inserted of equal segments is explored first and wins.
            for node in reversed(children.get(path[-1] if path else None, [])):
                columns = self._read(entries[node].ref)
                common, whole = query.common_prefix(length, columns)
                partial = max(partial, length + common)
                if whole:
                    stack.append((length + common, (*path, node)))
        return best, max(partial, best.length)


def _leaves_with_samples(
    entries: Sequence[Entry], sampled: Sequence[NDArray[np.int32]]
) -> list[int]:
    """Leaves of paths on which the model has sampled; there is nothing to train on the others."""
    has_samples: list[bool] = []
    for entry, steps in zip(entries, sampled, strict=True):  # a parent stands before its children
        above = entry.parent is not None and has_samples[entry.parent]
        has_samples.append(above or bool(len(steps)))
    parents = {entry.parent for entry in entries}
    return [n for n, has in enumerate(has_samples) if has and n not in parents]


def _check_segment(segment: Segment) -> None:
    if not isinstance(segment, Segment):
        raise BadSegment(f"insert takes a Segment, not {type(segment).__name__} {segment!r:.80}")


class _Query:
    """A prefix that is looked for: as text or as token ids."""

    def __init__(self, text: str | None, tokens: NDArray[np.int32] | None) -> None:
        self.text = text
        self.tokens = tokens

    def __len__(self) -> int:
        if self.text is not None:
            return len(self.text)
        assert self.tokens is not None
        return len(self.tokens)

    def common_prefix(self, at: int, columns: Columns) -> tuple[int, bool]:
        """How much of a segment equals the query from `at` on, and whether that is all of it."""
        if self.text is not None:
            text = columns.text
            if self.text.startswith(text, at):
                return len(text), True
            rest = self.text[at : at + len(text)]
            return next(
                (i for i, (a, b) in enumerate(zip(rest, text, strict=False)) if a != b), len(rest)
            ), False
        assert self.tokens is not None
        stored = columns.token_ids
        rest_ids = self.tokens[at : at + len(stored)]
        differs = np.flatnonzero(rest_ids != stored[: len(rest_ids)])
        if len(differs):
            return int(differs[0]), False
        return len(rest_ids), len(rest_ids) == len(stored)

    def around(self, at: int) -> str:
        """What the query has there."""
        if at >= len(self):
            return "the query ends there, inside a segment"
        if self.text is not None:
            return f"the query goes on with {self.text[at : at + 40]!r}"
        assert self.tokens is not None
        return f"the query goes on with {self.tokens[at : at + 8].tolist()}"


def _query(text: str | None, token_ids: ArrayLike | None) -> _Query:
    if (text is None) == (token_ids is None):
        raise TraceError("give the prefix either as text= or as token_ids=")
    if text is not None:
        return _Query(text, None)
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise TraceError(
            f"token_ids has shape {tokens.shape} and type {tokens.dtype}; need [n] of integers"
        )
    return _Query(None, tokens.astype(np.int32, copy=False))


_NO_TRACE = Trace(
    np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
)


def _no_such_node(session_id: str, node: int, n_nodes: int) -> TraceError:
    has = f"nodes 0 to {n_nodes - 1}" if n_nodes else "no segments"
    return TraceError(f"session {session_id!r} has {has}; there is no node {node}")


def _refuse(what: str, session_id: str, path: tuple[int, ...], details: Any) -> NoReturn:
    """Say what `read_paths` found wrong with a path."""
    where = f"session {session_id!r}"
    if what == "node":
        node, n_nodes = details
        raise _no_such_node(session_id, node, n_nodes)
    if what == "before":
        node, n_before, length = details
        raise RoutingGap(
            f"{where}: node {node} brings the routed experts of {n_before} tokens before it "
            f"(routed_before), and its path has {length} there",
            (node,),
        )
    if what == "unknown":
        n_unknown, node, behind = details
        lacks = f"{where}: the last {n_unknown} tokens of node {node} have no routed experts"
        if behind is None:
            raise RoutingGap(
                f"{lacks}; only the very last token of a trace may lack its row", (node,)
            )
        raise RoutingGap(
            f"{lacks} and node {behind} after it does not bring them (routed_before)", (node,)
        )
    assert what == "differ", what
    without = tuple(node for node, form in details if form is None)
    if without:
        raise RoutingGap(
            f"{where}: of the path {list(path)} the nodes {list(without)} carry no routed experts "
            "and the others do; either all segments of a trace carry them or none",
            without,
        )
    raise RoutingGap(
        f"{where}: routed experts of one path differ in (layers, top_k): "
        f"{sorted({form for _, form in details})}",
        tuple(node for node, _ in details),
    )
