"""The public interface by name: everything that the design promises can be imported and called so.

Owns one table: `package.name(parameters)`, as the documents write it. A parameter with `=` must be
optional in the code; others must exist by that name. What the calls do is in tests/contract/.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest

from tests import tree

PROMISED = """
shmstore.Store.create(name, capacity, max_objects=, max_sessions=, spill_dir=)
shmstore.Store.attach(name)
shmstore.Store.close()
shmstore.Store.unlink(name)
shmstore.Store.list()
shmstore.Store.put(value, session=, timeout=)
shmstore.Store.get(ref, timeout=)
shmstore.Store.build(shape, dtype, session=)
shmstore.Store.free(refs, strict=)
shmstore.Store.stats()
shmstore.Store.check()
shmstore.Store.sweep()
shmstore.ObjectRef.hex()
shmstore.ObjectRef.nbytes
shmstore.ObjectRef.alive
shmstore.ObjectRef.__bytes__()
shmstore.StoreError
shmstore.StoreFull
shmstore.ObjectFreed
shmstore.ObjectNotSealed
shmstore.SessionReleased
shmstore.SessionExists
shmstore.NotOwner
shmstore.LayoutMismatch
shmstore.sessions.Sessions.open(session, owner)
shmstore.sessions.Sessions.attach(session, ref, parent=)
shmstore.sessions.Sessions.objects(session)
shmstore.sessions.Sessions.truncate(session, keep)
shmstore.sessions.Sessions.transfer(sessions, src, dst, strict=)
shmstore.sessions.Sessions.release(sessions, owner, strict=)
shmstore.sessions.Sessions.release_owned(owner)
shmstore.sessions.Sessions.owner(session)
shmstore.sessions.Sessions.list(owner=)
shmstore.sessions.Sessions.bind(owner, heir=)
shmstore.testing
actors.Runtime(store=, name=)
actors.Runtime.spawn(cls, name=, gpus=, cpus=, env=, restart=, detached=)
actors.Runtime.spawn_many(cls, n)
actors.Runtime.lookup(name)
actors.Runtime.snapshot()
actors.Runtime.host(obj, name)
actors.Restart(max=, within=)
actors.Handle.stop()
actors.Handle.kill()
actors.Handle.watch()
actors.RemoteMethod.using(timeout=, group=, retries=, when_down=)
actors.RemoteMethod.result(timeout=)
actors.RemoteMethod.tell()
actors.RemoteMethod.stream()
actors.run(main)
actors.method
actors.current()
actors.ActorDied(actor, reason, exit_code=, stderr_tail=)
actors.RemoteError
actors.CallCycle
actors.QueueFull
actors.testing
trainer.TraceStore(store)
trainer.TraceStore.open(session_id, owner)
trainer.TraceStore.insert(session_id, segment, parent=)
trainer.TraceStore.search(session_id, text=, token_ids=)
trainer.TraceStore.export(session_id, text=, node=, token_ids=)
trainer.TraceStore.release(session_ids, owner)
trainer.TraceStore.leaves(session_id)
trainer.Segment(token_ids, labels, logprobs, model_steps, text=, routed_experts=)
trainer.Rollout
trainer.Group
trainer.Status.INIT
trainer.Status.COMPLETED
trainer.Status.ABORTED
trainer.Status.EXPIRED
trainer.Status.FAILED
trainer.Status.FILTERED
trainer.ReplayBuffer(store, order=, max_bytes=, expiry=)
trainer.ReplayBuffer.put(group, task=, owner, train_step=)
trainer.ReplayBuffer.take(need, train_step, owner, timeout=)
trainer.ReplayBuffer.refresh(train_step)
trainer.ReplayBuffer.count(task, status)
trainer.ReplayBuffer.snapshot(folder)
trainer.ReplayBuffer.resume(folder, store)
"""


def lines() -> list[str]:
    return [line.strip() for line in PROMISED.strip().splitlines() if line.strip()]


def resolve(dotted: str) -> Any:
    """The object behind `package.module.Class.method`."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        path = tree.ROOT / module.replace(".", "/")
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            found = importlib.import_module(module)
            for attribute in parts[end:]:
                found = getattr(found, attribute)
            return found
    raise AssertionError(f"no module of {dotted}")


def parameters(dotted: str, promised: Any) -> dict[str, bool]:
    """{name: optional}; of C functions, which cannot be asked, from the hand-written stub."""
    try:
        signature = inspect.signature(promised)
        if not _only_star(signature):
            return {
                name: parameter.default is not inspect.Parameter.empty
                for name, parameter in signature.parameters.items()
                if parameter.kind not in _STARRED
            }
    except ValueError:
        pass
    wanted = dotted.rpartition(".")[2]
    for node in ast.walk(tree.syntax(tree.ROOT / "shmstore" / "_core.pyi")):
        if isinstance(node, ast.FunctionDef) and node.name == wanted:
            return _of_stub(node)
    raise AssertionError(f"{dotted} has no signature and no stub")


_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _only_star(signature: inspect.Signature) -> bool:
    kinds = {p.kind for p in signature.parameters.values() if p.name not in ("self", "cls")}
    return bool(kinds) and kinds <= set(_STARRED)


def _of_stub(node: ast.FunctionDef) -> dict[str, bool]:
    plain = [*node.args.posonlyargs, *node.args.args]
    first_default = len(plain) - len(node.args.defaults)
    found = {argument.arg: place >= first_default for place, argument in enumerate(plain)}
    found |= {
        argument.arg: default is not None
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    }
    return found


@pytest.mark.parametrize("line", lines())
def test_what_is_promised_is_there(line: str) -> None:
    dotted, _, arguments = line.partition("(")
    promised = resolve(dotted)
    if not arguments:
        return
    assert callable(promised)
    if arguments == ")":
        return
    have = parameters(dotted, promised)
    for argument in filter(None, (part.strip() for part in arguments.rstrip(")").split(","))):
        name, optional = argument.rstrip("="), argument.endswith("=")
        assert name in have, f"{dotted} has no parameter {name}: {sorted(have)}"
        assert not optional or have[name], f"{dotted}: {name} must be optional"
    promised_names = {a.strip().rstrip("=") for a in arguments.rstrip(")").split(",")}
    extra = {n for n, optional in have.items() if not optional} - promised_names
    assert extra - {"self", "cls"} == set(), f"{dotted} demands {extra}"


@pytest.mark.parametrize("package", tree.PACKAGES)
def test_all_names_what_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__), key=list(module.__all__).index)
    for name in module.__all__:
        assert hasattr(module, name), f"{package}.__all__ names {name}, which is not there"
