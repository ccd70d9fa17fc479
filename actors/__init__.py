"""Actors: plain classes in processes of their own, called like objects, supervised like Erlang's.

    import actors

    class Counter:
        def __init__(self): self.n = 0
        async def add(self, k): self.n += k; return self.n

    async def main():
        async with actors.Runtime() as rt:
            counter = await rt.spawn(Counter, name="counter")
            print(await counter.add(2))

    actors.run(main())

Importing it loads neither torch nor pyzmq (used for tcp alone) nor, until a runtime has a store,
`shmstore`.
"""

from .context import ActorContext, current
from .errors import (
    ActorDied,
    ActorError,
    CallCycle,
    CallTimeout,
    InitFailed,
    MessageTooLarge,
    NameTaken,
    NoSuchActor,
    NoSuchMethod,
    NotInActor,
    NotSerializable,
    NotSupported,
    PlacementError,
    ProtocolError,
    QueueFull,
    RemoteError,
    RunExists,
    RuntimeClosed,
    SpawnDied,
    SpawnFailed,
    TemplateDied,
    UsageError,
    WouldBlockLoop,
)
from .handle import Handle, RemoteMethod, Team
from .method import method
from .records import Event, Restart
from .runtime import Runtime, run

__all__ = [
    "ActorContext",
    "ActorDied",
    "ActorError",
    "CallCycle",
    "CallTimeout",
    "Event",
    "Handle",
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
    "RemoteMethod",
    "Restart",
    "RunExists",
    "Runtime",
    "RuntimeClosed",
    "SpawnDied",
    "SpawnFailed",
    "Team",
    "TemplateDied",
    "UsageError",
    "WouldBlockLoop",
    "current",
    "method",
    "run",
]
