"""Names and counted references: who keeps a never-attached object alive, and refs inside
messages."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from shmstore import (
    BadRef,
    Draft,
    NotStorable,
    ObjectFreed,
    ObjectNotSealed,
    ObjectRef,
    SessionReleased,
    Store,
    StoreClosed,
    StoreError,
    headers,
)
from shmstore.pickling import adopting_refs, collecting_refs
from shmstore.testing import Puppet, temporary_store


def test_a_ref_is_24_bytes_hashable_ordered_and_survives_every_spelling(store: Store) -> None:
    refs = [store.put(i) for i in range(5)]
    assert [len(bytes(ref)) for ref in refs] == [24] * 5
    assert [len(ref.hex()) for ref in refs] == [48] * 5
    for ref in refs:
        for again in (
            ObjectRef.from_bytes(bytes(ref)),
            ObjectRef.from_hex(ref.hex()),
            pickle.loads(pickle.dumps(ref)),
        ):
            assert again == ref
            assert hash(again) == hash(ref)
            assert not again.counted
    assert len(set(refs)) == 5
    assert sorted(refs) == refs, "younger refs sort later"
    assert refs[0] < refs[1] <= refs[1]
    assert refs[0] != "text"
    with pytest.raises(TypeError):
        refs[0] < 3  # noqa: B015


def test_the_same_ref_hashes_equally_in_another_process(store: Store) -> None:
    ref = store.put(b"x")
    with Puppet() as puppet:
        digest = puppet.call(lambda state, r: (hash(r), r.hex(), bytes(r)), ref)
    assert digest == (hash(ref), ref.hex(), bytes(ref))


def test_an_unattached_object_lives_exactly_as_long_as_counted_references(store: Store) -> None:
    ref = store.put(b"payload")
    second = store.hold(ref)
    name = ObjectRef.from_bytes(bytes(ref))
    del ref
    assert name.alive
    assert store.get(name) == b"payload"
    del second
    assert not name.alive
    with pytest.raises(ObjectFreed):
        store.get(name)
    with pytest.raises(ObjectFreed):
        store.hold(name)
    assert store.stats().used == 0


def test_copies_of_a_ref_are_the_same_counted_ref(store: Store) -> None:
    ref = store.put(1)
    assert copy.copy(ref) is ref
    assert copy.deepcopy([ref])[0] is ref


def test_a_view_keeps_the_bytes_after_the_object_has_ended(store: Store) -> None:
    ref = store.put(np.arange(1000))
    view = store.get(ref)
    assert store.free(ref) == 1
    assert not ref.alive
    with pytest.raises(ObjectFreed):
        store.get(ref)
    stats = store.stats()
    assert (stats.objects, stats.doomed) == (0, 1)
    assert stats.deferred_bytes > 0
    others = [store.put(np.full(1000, 7)) for _ in range(50)]
    assert view.sum() == 499500, "no other object got the bytes"
    del view, others
    assert store.stats().used == 0


def test_free_counts_what_it_ended_and_takes_anything_twice(store: Store) -> None:
    refs = [store.put(i) for i in range(4)]
    assert store.free([refs[0], refs[0], refs[1]]) == 2
    assert store.free(refs) == 2
    assert store.free(refs) == 0
    assert store.free([]) == 0
    assert store.free(ref for ref in refs) == 0
    # An iterator may hold the only references.
    assert store.free(store.put(bytes([i])) for i in range(3)) == 3
    assert store.free(map(store.put, [b"a", b"b"])) == 2
    assert store.free(iter([store.put(b"c")])) == 1


def test_free_counts_what_an_iterator_alone_held(store: Store) -> None:
    assert store.free(store.put(bytes([n])) for n in range(3)) == 3
    assert store.free(map(store.put, [b"1", b"2"])) == 2


def test_a_stale_ref_never_yields_other_bytes(store: Store) -> None:
    stale = []
    for i in range(300):
        ref = store.put(np.full(16, i))
        stale.append(ObjectRef.from_bytes(bytes(ref)))
        store.free(ref)
    live = store.put(np.full(16, -1))
    for name in stale:
        assert not name.alive
        with pytest.raises(ObjectFreed):
            store.get(name)
    assert store.get(live)[0] == -1


def test_refs_can_be_referred_to_weakly(store: Store) -> None:
    ref = store.put(1)
    weak = weakref.ref(ref)
    assert weak() is ref
    del ref
    assert weak() is None


def test_a_ref_without_an_open_store_says_so() -> None:
    with temporary_store("4MiB") as gone:
        ref = gone.put(b"x")
        gone.close()
        with pytest.raises(StoreClosed, match="attached"):
            _ = ref.alive
        with pytest.raises(StoreClosed):
            gone.get(ref)


def test_collecting_refs_finds_them_at_any_depth_and_nests(store: Store) -> None:
    refs = [store.put(i) for i in range(3)]
    message: Any = {"a": [refs[0], (refs[1],)], "b": {"deep": [{"er": refs[2]}]}}
    with collecting_refs() as outer:
        with collecting_refs() as inner:
            pickle.dumps(message)
        pickle.dumps(refs[0])
    assert sorted(set(inner)) == sorted(refs)
    assert outer == [refs[0]]
    pickle.dumps(refs)
    assert len(outer) == 1, "nothing is collected outside"


def test_adopted_refs_are_counted_and_gone_ones_become_names(store: Store) -> None:
    kept, lost = store.put(b"kept"), store.put(b"lost")
    data = pickle.dumps([kept, lost])
    store.free(lost)
    with adopting_refs(store):
        adopted = pickle.loads(data)
    assert adopted[0].counted
    assert not adopted[1].counted
    del kept
    assert store.get(adopted[0]) == b"kept"
    with pytest.raises(ObjectFreed):
        store.get(adopted[1])
    assert not pickle.loads(data)[0].counted, "outside, refs are plain names"


def test_collectors_are_a_threads_own(store: Store) -> None:
    ref = store.put(1)
    with collecting_refs() as mine:
        thread = threading.Thread(target=pickle.dumps, args=(ref,))
        thread.start()
        thread.join()
    assert mine == []


def test_a_ref_of_another_arena_is_a_bad_ref_everywhere(store: Store) -> None:
    with temporary_store("4MiB") as other:
        foreign = other.put(b"theirs")
        for use in (store.get, store.hold):
            with pytest.raises(BadRef):
                use(foreign)
        with adopting_refs(store):
            assert not pickle.loads(pickle.dumps(foreign)).counted
        del foreign


def test_the_last_reference_may_go_in_any_thread(store: Store) -> None:
    refs = [store.put(np.zeros(100)) for _ in range(200)]
    halves = [refs[::2], refs[1::2]]
    del refs
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.stats().objects == 0


# -- drafts
# -------------------------------------------------------------------------------------------


def test_build_writes_in_place_and_seals(store: Store) -> None:
    with store.build((3, 4), "f4") as draft:
        draft.array[...] = 2
        early = draft.ref
        with pytest.raises(ObjectNotSealed):
            store.get(early)
        with pytest.raises(ObjectNotSealed):
            store.get(early, timeout=0.01)
        assert early.alive
    ref = draft.ref
    assert ref == early
    assert ref.counted
    assert store.get(ref).tolist() == [[2.0] * 4] * 3


def test_the_array_of_a_draft_is_read_only_after_the_seal(store: Store) -> None:
    with store.build(4, "i8") as draft:
        array = draft.array
        array[...] = 1
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="no numpy array"):
        _ = draft.array


def test_a_view_that_outlives_the_seal_never_touches_another_object(store: Store) -> None:
    with store.build(4096, "u1") as draft:
        piece = draft.array[10:20]
        draft.array[...] = 1
    ref = draft.ref
    store.free(ref)
    others = [store.put(np.zeros(4096, "u1")) for _ in range(100)]
    piece[...] = 9  # legal: the slice was made while the draft was writable
    assert all(int(store.get(other).sum()) == 0 for other in others)
    del piece, draft, others, ref
    gc.collect()
    assert store.stats().used == 0


def test_a_view_of_a_draft_that_was_freed_unsealed_never_touches_another_object(
    store: Store,
) -> None:
    draft = store.build(4096, "u1")
    piece = draft.array[10:20]
    assert store.free(draft.ref) == 1
    with pytest.raises(ObjectFreed):
        draft.seal()
    others = [store.put(np.zeros(4096, "u1")) for _ in range(50)]
    piece[...] = 9  # legal: the slice was made while the draft was writable
    assert all(int(store.get(other).sum()) == 0 for other in others)
    del piece, draft, others
    gc.collect()
    stats = store.stats()
    assert (stats.used, stats.building, stats.pinned) == (0, 0, 0)


def test_a_block_that_raises_discards_the_draft_even_with_views_alive(store: Store) -> None:
    kept: list[Any] = []
    draft = store.build(4096, "u1")
    name = draft.ref

    def write_half(unfinished: Draft) -> None:
        with unfinished:
            kept.append(unfinished.array[5:])
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_half(draft)
    assert not name.alive
    with pytest.raises(ObjectFreed):
        store.get(name)
    others = [store.put(np.zeros(4096, "u1")) for _ in range(50)]
    kept[0][...] = 9
    assert all(int(store.get(other).sum()) == 0 for other in others)
    kept.clear()
    del others, draft
    gc.collect()
    assert store.stats().used == 0


def test_build_makes_torch_tensors_too(store: Store) -> None:
    torch = pytest.importorskip("torch")
    with store.build((2, 3), torch.bfloat16) as draft:
        draft.tensor.fill_(3)
        with pytest.raises(ValueError, match="torch dtype"):
            _ = draft.array
    assert store.get(draft.ref).sum() == 18


def test_build_and_put_attach_to_a_session_in_the_same_step(store: Store) -> None:
    store.sessions.open("s", owner="me")
    with store.build(4, "u1", session="s") as draft:
        draft.array[...] = 1
        assert store.sessions.objects("s") == []
    ref = store.put(b"x", session="s", parent=0)
    assert [(entry.ref, entry.parent) for entry in store.sessions.objects("s")] == [
        (draft.ref, None),
        (ref, 0),
    ]
    assert not ref.counted


def test_sealing_twice_and_bad_shapes_are_refused(store: Store) -> None:
    draft = store.build(1)
    draft.seal()
    with pytest.raises(ValueError, match="over"):
        draft.seal()
    draft.discard()
    for shape in (-1, (2, -3), (1.5,), "ab", (True,)):
        with pytest.raises(ValueError, match="shape"):
            store.build(shape)  # type: ignore[arg-type]
    for dtype in ("no such", object):
        with pytest.raises((ValueError, TypeError)):
            store.build(1, dtype)


def test_a_waiting_get_wakes_when_another_process_seals(store: Store) -> None:
    with Puppet() as puppet:

        def begin(state: Any, name: str) -> ObjectRef:
            state["store"] = Store.attach(name)
            state["draft"] = state["store"].build(8, "i4")
            return state["draft"].ref  # type: ignore[no-any-return]

        def finish(state: Any) -> None:
            state["draft"].array[...] = 5
            state["ref"] = state["draft"].seal()

        ref = puppet.call(begin, store.name)
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(int(store.get(ref, timeout=20).sum())))
        waiter.start()
        puppet.call(finish)
        waiter.join()
        assert got == [40]


def test_put_stream_gathers_an_arrow_stream_from_parts(store: Store) -> None:
    pa = pytest.importorskip("pyarrow")
    batch = pa.record_batch({"x": [1, 2, 3]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    stream = memoryview(sink.getvalue())
    ref = store.put_stream([stream[:100], stream[100:]])
    assert store.get(ref).equals(batch)
    assert ref.nbytes == len(stream)
    with pytest.raises(ValueError, match="sort"):
        store.put_stream([stream], sort="no such")


def test_put_parts_gathers_into_a_session(store: Store) -> None:
    head = headers.pack(headers.Kind.BYTES, 0)
    store.sessions.open("s", owner="o")
    column = np.arange(3, dtype="<u2")
    parts = [b"ab", "é", bytearray(b"c"), column, memoryview(b"xyz")[::1], column[:0]]
    store.put_parts(head, parts, "s")
    store.put_parts(head, (b"second",), "s", parent=0)
    first, second = store.sessions.objects("s")
    assert store.get(first.ref) == b"ab\xc3\xa9c" + column.tobytes() + b"xyz"
    assert (store.get(second.ref), second.parent) == (b"second", 0)


def test_put_parts_leaves_nothing_behind_when_it_is_refused(store: Store) -> None:
    head = headers.pack(headers.Kind.BYTES, 0)
    store.sessions.open("s", owner="o")
    with pytest.raises(SessionReleased):
        store.put_parts(head, [b"x"], "gone")
    with pytest.raises(StoreError, match="parent 5"):
        store.put_parts(head, [b"x"], "s", parent=5)
    for strided in (np.arange(6)[::2], memoryview(b"abcdef")[::2]):
        with pytest.raises(NotStorable, match="contiguous bytes"):
            store.put_parts(head, [b"x", strided], "s")
    with pytest.raises(UnicodeEncodeError):
        store.put_parts(head, ["\ud800"], "s")
    assert (store.stats().objects, store.stats().used) == (0, 0)
