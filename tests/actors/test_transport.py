"""Who may talk to an actor, and what a broken or hostile message does (nothing)."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

import actors
from actors import messages
from actors.lanes import _HELLO, _MAGIC
from actors.rundir import runs_root
from actors.zmq_lane import new_keys


class Service:
    def __init__(self) -> None:
        self.n = 0

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def echo(self, value: Any) -> Any:
        return value

    async def forever(self) -> None:
        await asyncio.Event().wait()

    async def address(self) -> str:
        return actors.current().handle._peer.address


class Caller:
    def __init__(self, service: actors.Handle) -> None:
        self.service = service

    async def add(self, n: int) -> int:
        await asyncio.gather(*(self.service.add(1) for _ in range(n)))
        total: int = await self.service.add(0)
        return total

    async def echo(self, value: Any) -> Any:
        return await self.service.echo(value)

    async def forever(self) -> None:
        await self.service.forever()

    async def address_of_service(self) -> str:
        return self.service._peer.address


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_actors_call_each_other_over_either_lane(transport: Any) -> None:
    async with actors.Runtime(transport=transport) as rt:
        service = await rt.spawn(Service)
        caller = await rt.spawn(Caller, service)
        assert await caller.add(3000) == 3000
        for size in (0, 1, 63, 64, 65_000, 1 << 20, 8 << 20):
            assert len(await caller.echo(b"x" * size)) == size
        assert (await caller.address_of_service()).startswith(f"{transport}://")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_death_is_noticed_over_either_lane(transport: Any) -> None:
    async with actors.Runtime(transport=transport) as rt:
        service = await rt.spawn(Service, restart=actors.Restart(max=1, within=60))
        caller = await rt.spawn(Caller, service)
        assert await caller.add(1) == 1
        waiting = caller.forever()
        assert await caller.add(1) == 2
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(actors.ActorDied) as caught:
            await asyncio.wait_for(waiting, 1.0)
        assert caught.value.exit_code == -signal.SIGKILL


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def hostile_call(path: Path) -> bytes:
    body = pickle.dumps(((Bomb(path),), {}))
    return messages.pack(messages.Kind.CALL, 1, 1, method=b"echo", body=body)


@pytest.mark.parametrize("greeting", ["none", "wrong token", "wrong version"])
async def test_nothing_is_unpickled_before_the_greeting_of_this_run(
    tmp_path: Path, greeting: str
) -> None:
    trap = tmp_path / "exploded"
    async with actors.Runtime() as rt:
        service = await rt.spawn(Service)
        path = next((runs_root() / rt.name).glob("a*.sock"))
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(str(path))
            said = hostile_call(trap)
            if greeting != "none":
                version = messages.PROTOCOL_VERSION + (greeting == "wrong version")
                hello = _HELLO.pack(_MAGIC, version, 99, 1, b"\0" * 32)
                said = messages.pack(messages.Kind.HELLO, 0, body=hello) + said
            attacker.sendall(said)  # at once: who is thrown out after the greeting can send no more
            attacker.settimeout(5)
            with suppress(ConnectionResetError):  # the same, with bytes that nobody has read
                assert await asyncio.to_thread(attacker.recv, 1) == b""
        assert await service.add(1) == 1
        assert not trap.exists()


async def test_a_tcp_peer_without_the_runs_key_gets_nothing_through(tmp_path: Path) -> None:
    trap = tmp_path / "exploded"
    async with actors.Runtime(transport="tcp") as rt:
        service = await rt.spawn(Service)
        address = service._peer.address
        stranger = new_keys()
        with zmq.Context() as context:
            plain = context.socket(zmq.DEALER)
            curve = context.socket(zmq.DEALER)
            # Even one that knows the server's public key, but has a key pair of its own.
            curve.curve_serverkey = rt._supervisor._config.keys[0].encode()  # type: ignore
            curve.curve_publickey, curve.curve_secretkey = stranger
            for attacker in (plain, curve):
                attacker.linger = 0
                attacker.connect(address)
                attacker.send(hostile_call(trap))
            assert await asyncio.to_thread(plain.poll, 300) == 0
            assert await asyncio.to_thread(curve.poll, 300) == 0
            plain.close()
            curve.close()
        assert await service.add(1) == 1
        assert not trap.exists()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        (64).to_bytes(4, "little") + b"\x63" * 60,
        (1 << 31).to_bytes(4, "little") + b"\0" * 60,
        messages.HEADER.pack(64, 2, 0, 9999, 1, 1, 9, 9, 9, 9, 0, 0, 0, 0),
    ],
    ids=["ones", "unknown kind", "too long", "lying lengths"],
)
async def test_garbage_on_a_socket_closes_that_link_only(garbage: bytes) -> None:
    async with actors.Runtime() as rt:
        service = await rt.spawn(Service)
        path = next((runs_root() / rt.name).glob("a*.sock"))
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(str(path))
            hello = _HELLO.pack(
                _MAGIC, messages.PROTOCOL_VERSION, 99, 1,
                bytes.fromhex(rt._supervisor._config.token),  # type: ignore[union-attr]
            )  # fmt: skip
            attacker.sendall(messages.pack(messages.Kind.HELLO, 0, body=hello) + garbage)
            attacker.settimeout(5)
            assert await asyncio.to_thread(attacker.recv, 1) == b""
        assert await service.add(1) == 1


@pytest.mark.parametrize("other_end", ["nobody", "silent"])
async def test_a_tcp_address_that_does_not_answer_fails_the_call(other_end: str) -> None:
    async with actors.Runtime(transport="tcp") as rt:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            if other_end == "silent":
                listener.listen()
            peer = rt._node.peer(77, "ghost")
            peer.state, peer.incarnation = "up", 1
            peer.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            ghost = actors.Handle(rt._node, 77, "ghost", "Ghost", {"work": 0})
            with pytest.raises(actors.ActorDied, match="link to its process broke"):
                await asyncio.wait_for(ghost.work(), 10)


async def test_the_runs_directory_is_ours_alone() -> None:
    async with actors.Runtime() as rt:
        await rt.spawn(Service)
        folder = runs_root() / rt.name
        for path in (runs_root(), folder):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with pytest.raises(actors.RunExists, match=str(os.getpid())):
            async with actors.Runtime(name=rt.name):
                pass
    assert not folder.exists()


async def test_several_machines_are_refused_and_said_to_be_planned() -> None:
    with pytest.raises(actors.UsageError, match="unix"):
        actors.Runtime(transport="rdma")  # type: ignore[arg-type]


async def test_a_frame_survives_any_split_of_the_stream() -> None:
    """A link is fed byte by byte, and with several frames in one piece."""
    from actors.transport import UnixLink

    frames = [messages.pack(messages.Kind.CALL, i, 1, method=b"m" * i) for i in range(40)]
    frames.append(messages.pack(messages.Kind.CALL, 99, 1, body=b"x" * 200_000))
    ours, theirs = socket.socketpair()
    got: list[bytes] = []
    done = asyncio.get_running_loop().create_future()

    class Owner:
        def on_frame(self, link: Any, frame: memoryview) -> None:
            got.append(bytes(frame))
            if len(got) == len(frames):
                done.set_result(None)

        def on_link_closed(self, link: Any, why: str) -> None:
            pass

    link = UnixLink(asyncio.get_running_loop(), ours, Owner(), trusted=True)

    def feed() -> None:
        stream = b"".join(frames)
        for i in range(3000):
            theirs.sendall(stream[i : i + 1])
        theirs.sendall(stream[3000:])

    await asyncio.to_thread(feed)
    await asyncio.wait_for(done, 10)
    assert got == frames
    link.close()
    theirs.close()


async def test_a_link_that_breaks_between_living_processes_is_made_anew() -> None:
    async with actors.Runtime() as rt:
        service = await rt.spawn(Service)
        caller = await rt.spawn(Breaker, service)
        assert await caller.add() == 1
        with pytest.raises(actors.ActorDied, match="link to its process broke"):
            await asyncio.wait_for(caller.break_link_in_flight(), 5)
        assert await asyncio.wait_for(caller.add(), 5) == 2


class Breaker(Caller):
    async def add(self, n: int = 1) -> int:
        total: int = await self.service.add(n)
        return total

    async def break_link_in_flight(self) -> None:
        waiting = self.service.forever()
        await self.service.add(0)
        link = self.service._peer.link
        assert link is not None
        link.close()
        await waiting


async def test_an_object_hosted_by_an_actor_is_called_by_another_and_ends_with_its_host() -> None:
    async with actors.Runtime() as rt:
        host = await rt.spawn(Landlord)
        await host.open("guest")
        guest = await rt.lookup("guest")
        caller = await rt.spawn(Caller, guest)
        assert await caller.add(3) == 3
        assert await guest.add(1) == 4
        await host.kill()
        with pytest.raises(actors.ActorDied, match="host"):
            await asyncio.wait_for(guest.add(1), 5)


class Landlord:
    async def open(self, name: str) -> None:
        await actors.current().runtime.host(Service(), name=name)


async def test_a_hosted_object_can_be_taken_away_and_its_name_given_again() -> None:
    async with actors.Runtime() as rt:
        one, two = Service(), Service()
        first = await rt.host(one, name="books")
        assert await first.add(1) == 1
        await first.stop()
        with pytest.raises(actors.ActorDied, match="no longer hosted"):
            await first.add(1)
        second = await rt.host(two, name="books")
        assert await second.add(5) == 5
