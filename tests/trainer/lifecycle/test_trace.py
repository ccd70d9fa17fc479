"""Trace sessions on a real arena: the tree, prefixes, export, routing, release."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstore import SessionExists, SessionReleased, Store
from shmstore.testing import temporary_store
from trainer import segment_codec
from trainer.errors import BadSegment, RoutingGap, TraceError, TraceMismatch
from trainer.rollout import Rollout, Status
from trainer.segment import IGNORE_LABEL, Segment
from trainer.testing import make_segment
from trainer.trace import Match, TraceStore


def _text_segment(text: str, model_step: int | None = 0) -> Segment:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    n = len(tokens)
    sampled = model_step is not None
    return Segment(
        token_ids=tokens,
        labels=tokens if sampled else np.full(n, IGNORE_LABEL, np.int32),
        logprobs=np.zeros(n, np.float32),
        model_steps=np.full(n, -1 if model_step is None else model_step, np.int32),
        text=text,
    )


@pytest.fixture
def talk(traces: TraceStore) -> TraceStore:
    """root "say " -> "hello" -> " again";  root -> "help";  a second root "tell"."""
    traces.open("s", owner="producer-0")
    traces.insert("s", _text_segment("say ", None))
    traces.insert("s", _text_segment("hello"), parent=0)
    traces.insert("s", _text_segment(" again", 3), parent=1)
    traces.insert("s", _text_segment("help"), parent=0)
    traces.insert("s", _text_segment("tell", None))
    return traces


def test_search_finds_the_longest_path_of_whole_segments(talk: TraceStore) -> None:
    assert talk.search("s", text="say hello again!") == Match(15, (0, 1, 2))
    assert talk.search("s", text="say hell") == Match(4, (0,))
    assert talk.search("s", text="say help me") == Match(8, (0, 3))
    assert talk.search("s", text="tell") == Match(4, (4,))
    assert talk.search("s", text="nothing") == Match(0, ())


def test_a_prefix_of_tokens_finds_the_same_path_as_its_text(talk: TraceStore) -> None:
    for query in ("say hello again!", "say hell", "tell me", ""):
        tokens = list(query.encode())
        assert talk.search("s", token_ids=tokens) == talk.search("s", text=query)


def test_export_gives_one_path_by_node_text_or_tokens(talk: TraceStore) -> None:
    by_node = talk.export("s", node=2)
    assert bytes(by_node.token_ids.astype(np.uint8)) == b"say hello again"
    assert by_node.nodes == (0, 1, 2)
    assert (by_node.labels[:4] == IGNORE_LABEL).all()
    assert by_node.model_steps.tolist() == [-1] * 4 + [0] * 5 + [3] * 6
    assert by_node.routed_experts is None
    for other in (
        talk.export("s", text="say hello again"),
        talk.export("s", token_ids=list(b"say hello again")),
    ):
        assert other.nodes == by_node.nodes
        np.testing.assert_array_equal(other.token_ids, by_node.token_ids)


def test_many_paths_at_once_are_what_they_are_one_by_one(traces: TraceStore) -> None:
    ids = ["a", "b", "c"]
    for session_id in ids:
        traces.open(session_id, owner="producer-0")
    traces.insert_shared(ids, make_segment(5, model_step=None))
    places = [(one, traces.insert(one, make_segment(3 + n), parent=0)) for n, one in enumerate(ids)]
    together = traces.export_nodes(places)
    for (session_id, node), trace in zip(places, together, strict=True):
        alone = traces.export(session_id, node=node)
        for name in ("token_ids", "labels", "logprobs", "model_steps", "routed_experts"):
            np.testing.assert_array_equal(getattr(trace, name), getattr(alone, name))
        assert trace.nodes == alone.nodes
    traces.release(ids, owner="producer-0")


def test_paths_of_one_batch_may_differ_in_their_routing(traces: TraceStore) -> None:
    """None, narrow, wide, of another form, and with a row that the next segment brought."""
    wide = Segment([1, 2], [1, 2], [0, 0], [0, 0], "", np.full((2, 2, 2), 300, np.uint16))
    late = Segment(
        [3], [3], [0], [0], "", np.full((1, 2, 2), 5, np.uint8),
        routed_before=np.full((1, 2, 2), 6, np.uint8),
    )  # fmt: skip
    made = [
        [make_segment(3, layers=0)],
        [make_segment(4)],
        [wide],
        [make_segment(2, layers=3, top_k=1)],
        [make_segment(5, last_routed=False), late],
        [make_segment(3, last_routed=False)],
    ]
    places = []
    for number, segments in enumerate(made):
        traces.open(f"s-{number}", owner="producer-0")
        node = None
        for segment in segments:
            node = traces.insert(f"s-{number}", segment, parent=node)
        assert node is not None
        places.append((f"s-{number}", node))
    for some in (places, places[1:2] + places[4:], places[:1] * 2):
        for (session_id, node), trace in zip(some, traces.export_nodes(some), strict=True):
            alone = traces.export(session_id, node=node)
            assert (trace.routed_experts is None) == (alone.routed_experts is None)
            if trace.routed_experts is not None and alone.routed_experts is not None:
                assert trace.routed_experts.dtype == alone.routed_experts.dtype
                np.testing.assert_array_equal(trace.routed_experts, alone.routed_experts)
            np.testing.assert_array_equal(trace.token_ids, alone.token_ids)
    joined = traces.export_nodes(places[4:5])[0].routed_experts
    assert joined is not None
    assert (joined[4] == 6).all()
    assert (joined[5] == 5).all()


def test_a_long_path_is_its_segments_behind_each_other(traces: TraceStore) -> None:
    """Long enough that it is copied without the GIL."""
    traces.open("s", owner="p")
    made = [make_segment(40_001, first_token=n, layers=3, top_k=2) for n in (0, 7)]
    node = None
    for segment in made:
        node = traces.insert("s", segment, parent=node)
    trace = traces.export("s")
    for name in ("token_ids", "labels", "logprobs", "model_steps", "routed_experts"):
        wanted = np.concatenate([getattr(segment, name) for segment in made])
        np.testing.assert_array_equal(getattr(trace, name), wanted)


def test_a_path_of_batches_that_others_wrote_is_exported_as_well(
    traces: TraceStore, store: Store
) -> None:
    segment, empty = make_segment(3, text="one"), make_segment(0)
    traces.open("s", owner="p")
    store.put(segment_codec.to_batch(segment), session="s")
    traces.insert("s", empty, parent=0)
    traces.insert("s", segment, parent=1)
    trace = traces.export("s")
    assert trace.nodes == (0, 1, 2)
    assert trace.token_ids.tolist() == [0, 1, 2] * 2
    assert trace.routed_experts is not None
    assert segment.routed_experts is not None
    np.testing.assert_array_equal(trace.routed_experts[:3], segment.routed_experts)
    assert traces.search("s", text="oneone") == Match(6, (0, 1, 2))


def test_what_is_no_segment_is_not_exported(traces: TraceStore, store: Store) -> None:
    traces.open("s", owner="p")
    store.put(np.arange(4), session="s")
    with pytest.raises(TraceError, match="not a segment, but ndarray"):
        traces.export("s")


def test_a_segment_whose_trailer_was_overwritten_is_not_exported(
    traces: TraceStore, store: Store
) -> None:
    """As another process may leave it that writes where it must not."""
    traces.open("s", owner="p")
    whole = bytearray(segment_codec.stream(make_segment(3)))
    whole[len(whole) - 46] ^= 0x80  # the count of its tokens
    store.put_stream([whole], session="s")
    with pytest.raises(TraceError, match=r"of 131 tokens .* its trailer was overwritten"):
        traces.export("s")


def test_rows_for_tokens_that_a_path_does_not_have_are_refused(traces: TraceStore) -> None:
    traces.open("s", owner="p")
    row = np.zeros((1, 2, 2), np.uint8)
    traces.insert("s", Segment([1], [1], [0], [0], "", row, routed_before=row))
    with pytest.raises(RoutingGap, match=r"of 1 tokens before it .* and its path has 0 there"):
        traces.export("s")


def test_reading_a_batch_leaves_nothing_pinned(traces: TraceStore, store: Store) -> None:
    traces.open("s", owner="p")
    traces.insert("s", make_segment(3))
    traces.insert("s", make_segment(3, layers=0), parent=0)
    for places in ([("s", 0), ("s", 0)], [("s", 0), ("s", 1)], [("s", 0), ("s", 2)]):
        try:
            assert len(traces.export_nodes(places)) == len(places)
        except TraceError:
            assert places[1][1] > 0
        assert store.stats().pinned == 0


def test_export_says_where_a_query_leaves_the_trace(talk: TraceStore) -> None:
    with pytest.raises(TraceMismatch, match="diverges at 8: the query goes on with 'i world'") as e:
        talk.export("s", text="say hellii world".replace("ii", "i", 1))
    assert (e.value.length, e.value.node) == (8, 0)
    with pytest.raises(TraceMismatch, match="no path of exactly these 7 tokens"):
        talk.export("s", token_ids=list(b"say hel"))


def test_export_without_a_query_needs_a_single_leaf(talk: TraceStore) -> None:
    assert talk.leaves("s") == [2, 3, 4]
    with pytest.raises(TraceError, match=r"has the leaves \[2, 3, 4\]"):
        talk.export("s")
    talk.open("one", owner="producer-0")
    talk.insert("one", _text_segment("x"))
    assert len(talk.export("one")) == 1


def test_a_node_that_does_not_exist_is_named(talk: TraceStore) -> None:
    for look in (talk.export, talk.segment, talk.path):
        with pytest.raises(TraceError, match="nodes 0 to 4; there is no node 7"):
            look("s", node=7)


def test_a_session_without_segments_says_so(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    for look in (traces.export, traces.segment, traces.path):
        with pytest.raises(TraceError, match=r"'s' has no segments; there is no node 0"):
            look("s", node=0)
    with pytest.raises(TraceError, match=r"'s' has no segments; there is no path"):
        traces.export("s")


def test_several_trainable_segments_of_one_session_share_their_beginning(talk: TraceStore) -> None:
    one, other = talk.export("s", node=2), talk.export("s", node=3)
    np.testing.assert_array_equal(one.token_ids[:4], other.token_ids[:4])
    assert one.n_trainable == 11
    assert other.n_trainable == 4


def test_inserting_into_a_released_session_raises_and_never_resurrects_it(
    traces: TraceStore, store: Store
) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", make_segment(4))
    assert traces.release(["s", "unknown", "s"], owner="producer-0") == ["s"]
    with pytest.raises(SessionReleased):
        traces.insert("s", make_segment(4))
    assert "s" not in store.sessions
    assert store.stats().objects == 0


def test_opening_a_live_session_again_is_refused(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    with pytest.raises(SessionExists):
        traces.open("s", owner="producer-0")


def test_a_shared_prompt_is_stored_once_and_lives_until_the_last_session_ends(
    traces: TraceStore, store: Store
) -> None:
    ids = ["a", "b", "c"]
    for session_id in ids:
        traces.open(session_id, owner="producer-0")
    assert traces.insert_shared(ids, make_segment(4, model_step=None)) == [0, 0, 0]
    assert store.stats().objects == 1
    traces.release(["a", "b"], owner="producer-0")
    assert len(traces.export("c")) == 4
    traces.release(["c"], owner="producer-0")
    assert store.stats().objects == 0


def test_turns_with_and_without_routing_in_one_path_are_an_error_that_names_them(
    traces: TraceStore,
) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", make_segment(3))
    traces.insert("s", make_segment(3, layers=0), parent=0)
    traces.insert("s", make_segment(3), parent=1)
    with pytest.raises(RoutingGap, match=r"nodes \[1\] carry no routed experts") as error:
        traces.export("s", node=2)
    assert error.value.nodes == (1,)


def test_the_missing_row_of_a_turn_is_brought_by_the_next_segment(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    first = make_segment(3, last_routed=False)
    second = make_segment(2)
    row = np.array([[[7, 6], [5, 4]]], np.uint8)
    traces.insert("s", first)
    traces.insert("s", second, parent=0)
    with pytest.raises(RoutingGap, match="last 1 tokens of node 0"):
        traces.export("s", node=1)
    traces.truncate("s", keep=1)
    bringing = Segment(
        second.token_ids,
        second.labels,
        second.logprobs,
        second.model_steps,
        routed_experts=second.routed_experts,
        routed_before=row,
    )
    traces.insert("s", bringing, parent=0)
    routed = traces.export("s", node=1).routed_experts
    assert routed is not None
    np.testing.assert_array_equal(routed[:2], first.routed_experts)
    np.testing.assert_array_equal(routed[2:3], row)
    np.testing.assert_array_equal(routed[3:], second.routed_experts)


def test_only_the_very_last_row_of_a_trace_may_be_unknown_and_is_zero(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", make_segment(5, last_routed=False))
    routed = traces.export("s").routed_experts
    assert routed is not None
    assert len(routed) == 5
    assert not routed[4].any()


def test_an_exported_trace_outlives_the_release_of_its_session(
    traces: TraceStore, store: Store
) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", make_segment(5))
    trace = traces.export("s")
    before = trace.token_ids.copy()
    traces.release(["s"], owner="producer-0")
    assert store.stats().used == 0
    np.testing.assert_array_equal(trace.token_ids, before)


def test_exported_arrays_are_contiguous_and_of_the_contract_types(traces: TraceStore) -> None:
    traces.open("s", owner="producer-0")
    traces.insert("s", make_segment(5))
    traces.insert("s", make_segment(4), parent=0)
    trace = traces.export("s")
    types = {"token_ids": "i4", "labels": "i4", "logprobs": "f4", "model_steps": "i4"}
    for name, dtype in types.items():
        array = getattr(trace, name)
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous
    assert trace.routed_experts is not None
    assert trace.routed_experts.shape == (9, 2, 2)


def test_routing_of_two_widths_on_one_path_is_exported_in_the_wider(traces: TraceStore) -> None:
    traces.open("s", owner="p")
    routed = [np.full((2, 1, 2), 7, np.uint8), np.full((2, 1, 2), 300, np.uint16)]
    node = None
    for part in routed:
        segment = Segment([1, 2], [1, 2], [0, 0], [0, 0], "", part)
        node = traces.insert("s", segment, parent=node)
    trace = traces.export("s")
    assert trace.routed_experts is not None
    assert trace.routed_experts.dtype == np.uint16
    np.testing.assert_array_equal(trace.routed_experts, np.concatenate(routed))


def test_what_is_no_segment_is_not_inserted(traces: TraceStore, store: Store) -> None:
    traces.open("s", owner="p")
    with pytest.raises(BadSegment, match="takes a Segment, not ndarray"):
        traces.insert("s", np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(BadSegment, match="takes a Segment, not str"):
        traces.insert_shared(["s"], "text")  # type: ignore[arg-type]
    assert store.stats().objects == 0


def test_a_query_that_ends_inside_a_segment_is_told_so(talk: TraceStore) -> None:
    with pytest.raises(TraceMismatch, match="it diverges at 7: the query ends there, inside a"):
        talk.export("s", text="say hel")


def test_a_rollout_is_described_from_its_trace(talk: TraceStore) -> None:
    described = talk.describe(Rollout("s", status=Status.COMPLETED))
    # Node 4 is a second root of prompt tokens only; the leaves are what the model ended.
    assert described.leaves == (2, 3)
    assert (described.model_step_min, described.model_step_max) == (0, 3)
    assert (described.n_prompt_nodes, described.n_prompt_tokens) == (1, 4)


def test_a_session_of_other_things_than_segments_is_left_as_it_is(
    traces: TraceStore, store: Store
) -> None:
    traces.open("s", owner="producer-0")
    store.put(np.arange(4), session="s")
    rollout = Rollout("s")
    assert traces.describe(rollout) is rollout


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 6), st.text("ab", min_size=1, max_size=3)), max_size=8),
    st.text("ab", max_size=12),
)
def test_search_agrees_with_trying_every_path(rows: list[tuple[int, str]], query: str) -> None:
    with temporary_store("4MiB") as store:
        traces = TraceStore(store)
        traces.open("s", owner="p")
        paths: list[str] = []
        for parent, text in rows:
            parent = parent if 0 <= parent < len(paths) else -1
            traces.insert("s", _text_segment(text), None if parent < 0 else parent)
            paths.append((paths[parent] if parent >= 0 else "") + text)
        best = max((len(p) for p in paths if query.startswith(p)), default=0)
        assert traces.search("s", text=query).length == best
        assert traces.search("s", token_ids=list(query.encode())).length == best
        traces.release(["s"], owner="p")
