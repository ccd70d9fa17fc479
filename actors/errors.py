"""Every way in which the actor runtime says no.

Owns the exception tree of `actors`; nothing here touches processes or sockets. Any module may
raise these; users catch `ActorError` or one of its leaves.

    ActorError
    ├── RemoteError            the method raised; also an instance of the remote exception's class
    ├── ActorDied              the actor's process is gone, or going (reason, exit code, stderr)
    │   └── SpawnDied          ... while `__init__` was running (also a SpawnFailed)
    ├── SpawnFailed            the actor could not be started
    │   └── InitFailed         `__init__` raised (also a RemoteError, and what was raised)
    ├── CallCycle              the call would wait for itself
    ├── CallTimeout            the deadline of the call passed (also a TimeoutError)
    ├── QueueFull              a bounded queue has no room
    ├── PlacementError         more devices or cores were asked for than there are
    ├── NotSerializable        a value cannot travel (also a TypeError)
    ├── MessageTooLarge        a message is longer than the protocol allows
    ├── NoSuchActor            nobody of that name (also a LookupError)
    ├── NoSuchMethod           the actor has no such method (also an AttributeError)
    ├── NameTaken              a live actor has that name already
    ├── RunExists              a live run has that name already
    ├── RuntimeClosed          the runtime is not, or no longer, running
    │   └── TemplateDied       ... of which the process that forks actors died, again and again
    ├── NotInActor             `actors.current()` outside an actor
    ├── UsageError             an argument that the runtime does not accept (also a ValueError)
    ├── WouldBlockLoop         a blocking call on the thread that has to serve it
    ├── ProtocolError          the other side sent what the protocol does not know
    └── NotSupported           planned, and not there yet
"""

from __future__ import annotations

__all__ = [
    "ActorDied",
    "ActorError",
    "CallCycle",
    "CallTimeout",
    "InitFailed",
    "MessageTooLarge",
    "NameTaken",
    "NoSuchActor",
    "NoSuchMethod",
    "NotInActor",
    "NotSerializable",
    "NotSupported",
    "PlacementError",
    "ProtocolError",
    "QueueFull",
    "RemoteError",
    "RunExists",
    "RuntimeClosed",
    "SpawnDied",
    "SpawnFailed",
    "TemplateDied",
    "UsageError",
    "WouldBlockLoop",
]


class ActorError(Exception):
    """The root: catch this to catch everything the runtime raises on purpose."""


class RemoteError(ActorError):
    """A method of an actor raised.

    The error that arrives is an instance of `RemoteError` and of the class that was raised, when
    that class can be imported and subclassed here; `cause` is then the exception itself. In any
    case `remote_type` and `remote_traceback` are text.
    """

    cause: BaseException | None = None
    remote_type: str = ""
    remote_traceback: str = ""


class ActorDied(ActorError):
    """The call cannot be answered because the actor's process is gone.

    The call ran at most once; whether it ran is not known. Attributes: `actor` (name), `reason`,
    `exit_code` (as `subprocess` counts: negative is a signal; None when not known), `stderr_tail`,
    `restarting` (it is being started again).
    """

    def __init__(
        self,
        actor: str,
        reason: str,
        exit_code: int | None = None,
        stderr_tail: str = "",
        restarting: bool = False,
    ) -> None:
        super().__init__(actor, reason, exit_code, stderr_tail, restarting)
        self.actor = actor
        self.reason = reason
        self.exit_code = exit_code
        self.stderr_tail = stderr_tail
        self.restarting = restarting

    def __str__(self) -> str:
        text = f"actor {self.actor!r} died: {self.reason}"
        if self.exit_code is not None:
            text += f" (exit code {self.exit_code})"
        if self.restarting:
            text += '; it is being started again, and `using(when_down="wait")` waits for that'
        if self.stderr_tail:
            text += "; its last lines on stderr:\n" + self.stderr_tail
        return text


class SpawnFailed(ActorError):
    """`spawn` did not produce a running actor."""


class InitFailed(SpawnFailed, RemoteError):
    """`__init__` raised; an instance of the class that it raised as well."""


class SpawnDied(SpawnFailed, ActorDied):
    """The process ended before `__init__` returned."""


class CallCycle(ActorError):
    """An actor, through others, calls a method of itself that is not reentrant."""


class CallTimeout(ActorError, TimeoutError):
    """The deadline of the call, or of the call that made it, has passed."""


class QueueFull(ActorError):
    """A bounded queue is full; the message was not sent."""


class PlacementError(ActorError):
    """The machine does not have, or no longer has, what the actor asks for."""


class NotSerializable(ActorError, TypeError):
    """A value cannot be pickled; nothing was sent."""


class MessageTooLarge(ActorError):
    """A message is longer than `messages.FRAME_BYTES_MAX`."""


class NoSuchActor(ActorError, LookupError):
    """No actor of this name or number is known to the run."""


class NoSuchMethod(ActorError, AttributeError):
    """The class of the actor has no public method of this name."""


class NameTaken(ActorError):
    """Another live actor of the run has this name."""


class RunExists(ActorError):
    """Another live run has this name."""


class RuntimeClosed(ActorError):
    """The runtime was not entered yet, or has been left."""


class TemplateDied(RuntimeClosed):
    """The process that forks actors died before it had said that it forked this one. If it had, the
    new process ends by itself. The runtime tries a few more of its kind before it raises this."""


class NotInActor(ActorError):
    """`actors.current()` was called outside an actor."""


class UsageError(ActorError, ValueError):
    """An argument is not what the runtime accepts; the text says what is allowed."""


class WouldBlockLoop(ActorError):
    """`.result()` on the thread whose event loop has to bring the answer."""


class ProtocolError(ActorError):
    """A peer broke the wire protocol; its link is closed."""


class NotSupported(ActorError):
    """Part of the design, not built yet; the text says what to use instead."""
