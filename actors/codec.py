"""Values to bytes and back: pickle 5, buffers and refs through the store, errors as text.

Owns the choice of what travels inside a frame and what goes through the shared arena, and the one
seam between actors and `shmstore` (imported only when a runtime has a store). Called by `node` and
`mailbox`, from any thread; a `Codec` holds no state that changes.

What it promises: a value that cannot travel raises `NotSerializable` before anything is sent; an
`ObjectRef` at any depth is in `Encoded.keep`, and the sender holds that until the receiver's ACK.
Arrays arrive read-only, whatever their size, so that size never changes the meaning of a call.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .errors import ActorError, NotSerializable, RemoteError
from .messages import BUFFER_COUNT_MAX, Buffer, Flag

__all__ = ["STORE_BYTES_MIN", "Blob", "Codec", "Encoded", "StoreLike", "decoding_node"]

# Below this a buffer is cheaper inside the frame than as an object in the arena (put, ACK, get);
# measured by bench/actors.py, docs/decisions/0302.
STORE_BYTES_MIN = 32 * 1024
# Text of a remote traceback is cut in the middle beyond this.
TRACEBACK_CHARS_MAX = 64 * 1024

# As plain numbers: an operation on a Flag costs a microsecond, and every message needs two.
_REFS, _BODY_STORED = int(Flag.REFS), int(Flag.BODY_STORED)

# These never hold refs, buffers or anything of `__main__`.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class StoreLike(Protocol):
    """What the actors need of a `shmstore.Store`."""

    def put(self, value: object) -> Any: ...
    def get(self, ref: Any, timeout: float | None = None) -> Any: ...
    def hold(self, ref: Any) -> Any: ...


class Encoded(NamedTuple):
    """A value ready to be framed. `keep` holds what must live until the receiver's ACK."""

    body: bytes
    flags: int = 0
    buffers: tuple[Buffer, ...] = ()
    inline: tuple[memoryview, ...] = ()
    keep: tuple[object, ...] = ()


@dataclass(frozen=True)
class Blob:
    """A value that a middleman forwards without unpickling it (spawn arguments through the hub)."""

    body: bytes
    buffers: tuple[object, ...] = ()  # bytes, or an ObjectRef
    refs: tuple[object, ...] = ()  # every ref inside the body, so that the middleman holds it


class _Decoding(threading.local):
    """Which node is unpickling in this thread: handles inside the value are bound to it."""

    node: Any = None


_decoding = _Decoding()


def decoding_node() -> Any:
    """The node whose message is being unpickled in this thread, or None."""
    return _decoding.node


class Codec:
    """Encodes and decodes for one node; knows the node's store, if there is one."""

    def __init__(self, store: StoreLike | None = None, node: Any = None) -> None:
        self.store = store
        self._node = node
        self._ref_type: type | None = None
        self._pickling: Any = None
        if store is not None:
            from shmstore import ObjectRef, pickling  # lazily: without a store no numpy is needed

            self._ref_type, self._pickling = ObjectRef, pickling

    # ---- values -------------------------------------------------------------------------------

    def encode(self, value: object) -> Encoded:
        """Pickle `value`. Raises NotSerializable with the reason."""
        if value is None:
            return _EMPTY
        return self._encode(value, type(value) in _PLAIN)

    def encode_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
        """Pickle the arguments of a call; marks those that are refs themselves (top level)."""
        if not kwargs:
            if not args:
                return _EMPTY
            plain = True
            for arg in args:
                if type(arg) not in _PLAIN:
                    plain = False
                    break
            return self._encode((args, kwargs), plain)
        return self._encode((args, kwargs), False)

    def _encode(self, value: object, plain: bool) -> Encoded:
        if plain:
            body = pickle.dumps(value, 5)
            if self.store is None or len(body) < STORE_BYTES_MIN:
                return Encoded(body)
            return self._spill(body, [], [])
        raw: list[pickle.PickleBuffer] = []
        if self.store is None:
            body = _dumps(value, raw)
            if not raw:
                return Encoded(body)
            return self._spill(body, raw, [])
        pickling = self._pickling
        with pickling.collecting_refs() as refs:
            body = _dumps(value, raw, pickling.dumps if "torch" in sys.modules else None)
        if not raw and not refs and len(body) < STORE_BYTES_MIN:
            return Encoded(body)
        return self._spill(body, raw, list(refs))

    def _spill(self, body: bytes, raw: list[pickle.PickleBuffer], refs: list[object]) -> Encoded:
        """Decide for each buffer: inside the frame, or an object in the store."""
        if len(raw) > BUFFER_COUNT_MAX:
            # Too many for the table; the pickle carries them in-band, which is only slower.
            raise NotSerializable(
                f"the value has {len(raw)} separate buffers, at most {BUFFER_COUNT_MAX} travel in"
                " one message; join small arrays, or put them into the store and pass the refs"
            )
        flags = _REFS if refs else 0
        keep: list[object] = list(refs)
        buffers: list[Buffer] = []
        inline: list[memoryview] = []
        for view in [_flat(b) for b in raw]:
            if self.store is not None and view.nbytes >= STORE_BYTES_MIN:
                ref = self._put(view)
                keep.append(ref)
                buffers.append(Buffer(view.nbytes, bytes(ref)))
                flags |= _REFS
            else:
                buffers.append(Buffer(view.nbytes, None))
                inline.append(view)
        if self.store is not None and len(body) >= STORE_BYTES_MIN:
            ref = self._put(memoryview(body))
            keep.append(ref)
            buffers.insert(0, Buffer(len(body), bytes(ref)))
            flags |= _REFS | _BODY_STORED
            body = b""
        return Encoded(body, flags, tuple(buffers), tuple(inline), tuple(keep))

    def _put(self, view: memoryview) -> Any:
        import numpy as np

        assert self.store is not None
        return self.store.put(np.frombuffer(view, dtype=np.uint8))

    def decode(
        self,
        body: memoryview | bytes,
        flags: int = 0,
        buffers: Sequence[Buffer] = (),
        inline: Sequence[memoryview] = (),
    ) -> Any:
        """The value. Raises whatever unpickling raises; the caller turns that into an answer.

        Only for messages of an authenticated link.
        """
        _decoding.node = self._node
        if not buffers:
            if not flags & _REFS:
                return pickle.loads(body)
            with self._adopting():
                return pickle.loads(body)
        found = self._fetch(buffers, inline)
        if flags & _BODY_STORED:
            body = found.pop(0)
        with self._adopting() if flags & _REFS else nullcontext():
            return pickle.loads(body, buffers=found)

    def _fetch(self, buffers: Sequence[Buffer], inline: Sequence[memoryview]) -> list[Any]:
        """The out-of-band buffers, zero-copy from the arena or copied out of the frame."""
        found: list[Any] = []
        views = iter(inline)
        for buffer in buffers:
            if buffer.ref is None:
                found.append(bytes(next(views)))
            else:
                found.append(memoryview(self.get(self.ref_of(buffer.ref))))
        return found

    def _adopting(self) -> AbstractContextManager[object]:
        from shmstore.pickling import adopting_refs

        return adopting_refs(self._need_store())

    # ---- refs ---------------------------------------------------------------------------------

    def is_ref(self, value: object) -> bool:
        """True for an ObjectRef (of a runtime that has a store)."""
        return self._ref_type is not None and type(value) is self._ref_type

    def ref_of(self, name: bytes) -> Any:
        """The plain ref of these 24 bytes."""
        self._need_store()
        assert self._ref_type is not None
        return self._ref_type.from_bytes(name)  # type: ignore[attr-defined]

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        """The value of a ref; `timeout=None` does not wait for the seal."""
        return self._need_store().get(ref, timeout=timeout)

    def _need_store(self) -> Any:
        if self.store is None:
            raise ActorError(
                "the message names an object in a store, and this runtime has none;"
                ' start it with Runtime(store="1GiB")'
            )
        return self.store

    # ---- blobs --------------------------------------------------------------------------------

    def seal_blob(self, value: object) -> Blob:
        """Pickle once, to be forwarded (and sent again on each restart) without unpickling."""
        raw: list[pickle.PickleBuffer] = []
        if self.store is None:
            return Blob(_dumps(value, raw), tuple(bytes(_flat(b)) for b in raw))
        from shmstore import pickling

        with pickling.collecting_refs() as refs:
            body = _dumps(value, raw, pickling.dumps if "torch" in sys.modules else None)
        buffers: list[object] = []
        for view in [_flat(b) for b in raw]:
            buffers.append(self._put(view) if view.nbytes >= STORE_BYTES_MIN else bytes(view))
        return Blob(body, tuple(buffers), tuple(refs))

    def open_blob(self, blob: Blob) -> Any:
        """The value of a blob."""
        _decoding.node = self._node
        buffers = [memoryview(self.get(b)) if self.is_ref(b) else b for b in blob.buffers]
        with self._adopting() if blob.refs else nullcontext():
            return pickle.loads(blob.body, buffers=buffers)

    # ---- errors -------------------------------------------------------------------------------

    def encode_error(self, error: BaseException, trace_text: str | None = None) -> Encoded:
        """An exception as pickles of it and of its pieces, and as text; never fails."""
        if trace_text is None:
            trace_text = _format(error)
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        state = {k: v for k, v in error.__dict__.items() if _try_dumps(v) is not None}
        picture = (
            _try_dumps(error),
            _try_dumps(type(error)),
            _try_dumps(error.args),
            _try_dumps(state),
            name,
            _text_of(error),
            trace_text,
        )
        return Encoded(pickle.dumps(picture, 5))

    def decode_error(self, body: memoryview | bytes) -> BaseException:
        """The error to raise at the caller: RemoteError and, if it can be, the remote class too."""
        whole, cls, args, state, name, text, trace_text = pickle.loads(body)
        _decoding.node = self._node
        cause = _try_loads(whole)
        if not isinstance(cause, BaseException):
            # Its __init__ does not take what pickle gives it: put it together without __init__.
            cause = _assemble(_try_loads(cls), _try_loads(args), _try_loads(state))
        return make_remote_error(cause, name, text, trace_text)


log = logging.getLogger("actors")

_EMPTY = Encoded(b"")
_mixed: dict[tuple[type, type], type] = {}


def make_remote_error(
    cause: BaseException | None,
    name: str,
    text: str,
    trace_text: str,
    base: type[ActorError] = RemoteError,
) -> ActorError:
    """A `base` error that is, where possible, also an instance of the class of `cause`."""
    error: ActorError | None = None
    if isinstance(cause, Exception):
        error = _mix(base, cause)
    if error is None:
        error = base(f"{name}: {text}" if text else name)
    if isinstance(error, RemoteError):
        error.cause = cause
        error.remote_type = name
        error.remote_traceback = trace_text
    if trace_text:
        error.add_note("remote traceback:\n" + trace_text.rstrip())
    return error


def _mix(base: type[ActorError], cause: Exception) -> ActorError | None:
    """An instance of both classes with the arguments and attributes of `cause`; None if refused."""
    key = (base, type(cause))
    try:
        mixed = _mixed.get(key)
        if mixed is None:
            mixed = _mixed[key] = _mixed_class(base, type(cause))
        given = _init_args(cause)
        # Built-in classes keep state in C slots that only __init__ fills; others keep it in
        # __dict__, and their __init__ may want arguments that we do not have. Along the layout, not
        # the order of look-up: of a StoreFull that is Exception, although it is a MemoryError too.
        native: type[Exception] = type(cause)
        while native.__module__ != "builtins":
            assert native.__base__ is not None
            native = native.__base__
        error: ActorError = native.__new__(mixed, *given)
        native.__init__(error, *given)
        error.args = cause.args
        if isinstance(cause, (ImportError, NameError)):
            error.name = cause.name  # type: ignore[attr-defined]
        error.__dict__.update(cause.__dict__)
        return error
    except Exception:  # a class that refuses to be subclassed or made: plain RemoteError instead
        return None


def _init_args(cause: Exception) -> tuple[Any, ...]:
    """What the built-in part was made with; an OSError keeps its file names outside `args`."""
    if isinstance(cause, OSError) and len(cause.args) == 2 and cause.filename is not None:
        return (*cause.args, cause.filename, None, cause.filename2)
    return cause.args


def _mixed_class(base: type[ActorError], remote: type[Exception]) -> type:
    # The remote class first: it may have a C layout, and `__new__` follows the first base.
    bases: tuple[type, ...] = (remote, base)
    if issubclass(base, remote):
        bases = (base,)
    elif issubclass(remote, base):
        bases = (remote,)

    def text(self: Any) -> str:
        cause = getattr(self, "cause", None)
        return _text_of(cause) if cause is not None else Exception.__str__(self)

    def reduce(self: Any) -> Any:
        return (_rebuild, (base, self.cause, self.remote_type, self.remote_traceback))

    members = {"__str__": text, "__reduce__": reduce, "__module__": remote.__module__}
    return type(remote.__name__, bases, members)


def _rebuild(
    base: type[ActorError], cause: BaseException | None, name: str, trace_text: str
) -> ActorError:
    """Unpickle an error that was passed on (an actor that lets its own call's error out)."""
    return make_remote_error(cause, name, _text_of(cause) if cause else "", trace_text, base)


Dumps = Callable[[object, Callable[[pickle.PickleBuffer], object]], bytes]


def _dumps(
    value: object, raw: list[pickle.PickleBuffer], with_tensors: Dumps | None = None
) -> bytes:
    """Pickle 5 out of band; by value (cloudpickle) for what only exists in this process.

    `with_tensors`: the store's pickler, which knows torch tensors as buffers; slower, so it is used
    where torch is loaded.
    """
    try:
        if with_tensors is not None:
            body = with_tensors(value, raw.append)
        else:
            body = pickle.dumps(value, 5, buffer_callback=raw.append)
        if b"__main__" not in body:
            return body
    except Exception as error:  # lambdas, local classes: cloudpickle may know them
        log.debug("pickling %s by value: %s", type(value).__qualname__, error)
    raw.clear()
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return cloudpickle.dumps(value, 5, buffer_callback=raw.append)  # type: ignore[no-any-return]
    except Exception as error:
        raise NotSerializable(
            f"a value of type {type(value).__qualname__} cannot travel to another process:"
            f" {type(error).__name__}: {error}"
        ) from error


def _try_dumps(value: object) -> bytes | None:
    """The pickle, or None: what a user's __reduce__ raises is no reason to lose the error."""
    raw: list[pickle.PickleBuffer] = []
    try:
        body = _dumps(value, raw)
        return pickle.dumps(value, 5) if raw else body
    except Exception:  # whatever a user's __reduce__ raises
        return None


def _try_loads(body: bytes | None) -> Any:
    """The value, or None when it cannot be made here (class not importable, __init__ objects)."""
    if body is None:
        return None
    try:
        return pickle.loads(body)
    except Exception:  # whatever a user's __init__ or __setstate__ raises
        return None


def _assemble(cls: Any, args: Any, state: Any) -> BaseException | None:
    """An exception of this class without running its __init__; None when the class is missing."""
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    args = args if isinstance(args, tuple) else ()
    try:
        error: BaseException = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(state or {})
    except Exception:  # a class that cannot be made without its __init__: text remains
        return None
    return error


def _flat(buffer: pickle.PickleBuffer) -> memoryview:
    """The bytes of a buffer, C- or Fortran-contiguous alike."""
    return buffer.raw()


def _format(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    if len(text) > TRACEBACK_CHARS_MAX:
        half = TRACEBACK_CHARS_MAX // 2
        text = text[:half] + "\n... cut ...\n" + text[-half:]
    return text


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a user's __str__ raised; its type is all there is
        return f"<unprintable, its __str__ raised {type(broken).__name__}>"
