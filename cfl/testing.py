"""The conformance kit: does a strategy or a local regularizer keep the rules that engines and checkpoints rely on?

    from cfl.testing import check_strategy
    check_strategy(MyStrategy(strength=0.5))

It runs the method on a toy stream, with one head and with a head for each task, and raises ConformanceError with a line
for each fault: the hook, what it does, and what to do.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl import checkpoint, rng, tree
from cfl.config import RunConfig, resolve
from cfl.engines import ENGINES
from cfl.engines.loop import recalled
from cfl.engines.step import Local, LocalStep
from cfl.errors import CflError
from cfl.local.base import LocalRegularizer
from cfl.local.chain import STRATEGY, Chain, own_state
from cfl.record import NullSink
from cfl.runner import Prepared, Session, run
from cfl.strategies.base import Strategy
from cfl.streams import Stream, from_tensors
from cfl.tree import Tree
from cfl.types import MEMORY, Batch, Client

DIMENSIONS, CLASSES = 8, 2
Faults = dict[tuple[str, str], None]  # an ordered set of (hook, what is wrong)
Hooks = Mapping[str, LocalRegularizer]
TOLERANCE = 1e-5  # float32: between one client at a time and many, with and without padding
_CLIENT_HOOKS = ("init_client", "augment", "penalty", "around", "adjust", "finish")
_SERVER_HOOKS = ("plan", "init_server", "sees", "heads", "frozen", "broadcast", "loss", "work", "absorb", "serve")


class ConformanceError(CflError, AssertionError):
    """A method breaks rules; the message has a line for each. faults: (hook, what is wrong)."""

    def __init__(self, method: str, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = list(faults)
        lines = [f"  {hook}: {text}" for hook, text in faults]
        super().__init__("\n".join([f"{method} breaks {len(faults)} rule{'s' * (len(faults) > 1)}:", *lines]))


def toy_stream(tasks: int = 3, train: int = 48, test: int = 40, multi_head: bool = False) -> Stream:
    """`tasks` tasks of `train` and `test` samples (d=8); class c of task t is centred on axis 2t + c."""
    parts = []
    for task in range(tasks):
        draws = rng.generator(rng.key(0, "toy", task))
        y = torch.arange(train + test) % CLASSES
        x = torch.randn(train + test, DIMENSIONS, generator=draws) * 0.3
        x[torch.arange(len(y)), 2 * task + y] += 1.0
        parts.append((x[:train], y[:train], x[train:], y[train:]))
    return from_tensors(parts, name="toy", multi_head=multi_head)


def toy_config(*overrides: str, **layers: Any) -> RunConfig:
    """A small run: 4 clients, 3 a round, 2 rounds a task, an 8-6-6-2 MLP; layers: as for `cfl.resolve`."""
    small = ["tasks=3", "rounds=2", "cohort=3", "partition.clients=4", "local.batch_size=4", "model.hidden=[6,6]"]
    return resolve("permuted-digits", overrides=[*small, *overrides], **layers)


def check_strategy(method: LocalRegularizer, *, config: RunConfig | None = None) -> None:
    """Check a strategy, or a local regularizer under FedAvg, in seconds; raises ConformanceError naming each fault.

    Checked: hooks write to nothing that they are given, draw from no global generator, keep nothing on the object, and
    give the same result again; uploads keep their shapes; clients do not depend on each other, and those that are
    absent keep their state; padding changes nothing; all engines and a batched step agree; a run that is killed in any
    round and resumed gives the same bytes. config: a run of your own on the toy stream, from `toy_config`.
    """
    config = config or toy_config()
    faults: Faults = {}
    for multi_head in (False, True):
        stream = toy_stream(multi_head=multi_head)
        watched = _watched(method, faults)
        try:
            session = _planned(config, stream, watched, faults)
            _check_rounds(session, faults)
            if not faults:  # what follows compares runs, which faults of single hooks would only blur
                _check_batched(_session(config, stream, method), faults)
                _check_engines(config, stream, method, faults)
                _check_resume(config, stream, method, faults)
        except _HookFailed:
            pass  # it is among the faults
        except CflError as error:
            if not faults:
                faults[("run", str(error))] = None
    if faults:
        raise ConformanceError(type(method).__name__, list(faults))


class _HookFailed(Exception):
    """A hook raised; the fault is written down already."""


def _roles(method: LocalRegularizer) -> dict[str, Any]:
    if isinstance(method, Strategy):
        return {"strategy": method, "regularizers": {}}
    return {"strategy": Strategy(), "regularizers": {"checked": method}}


def _session(config: RunConfig, stream: Stream, method: LocalRegularizer) -> Session:
    roles = _roles(method)
    return Session(config, stream, roles["strategy"], roles["regularizers"], None, None, NullSink())


# Single hooks: a subclass of the method's own class looks at each call.


def _watched(method: LocalRegularizer, faults: Faults) -> Any:
    """A copy of the method whose hooks write their faults down."""
    base = type(method)
    hooks = _CLIENT_HOOKS + (_SERVER_HOOKS if isinstance(method, Strategy) else ())
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}

    def watch(hook: str) -> Callable[..., Any]:
        names = list(signature(getattr(base, hook)).parameters)[1:]

        def call(self: Any, *args: Any) -> Any:
            result = _observed(partial(getattr(super(watcher, self), hook), *args), hook, names, args, self, faults)
            if hook == "around":
                inner = result
                return lambda *seen: _observed(partial(inner, *seen), hook, ["params", "ctx"], seen, self, faults)
            if hook in ("finish", "work"):
                place = args[-1] if hook == "work" else args[1]
                key = (hook, place.task, place.phase.name if hook == "work" else "")
                found = {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in result[0].items()}
                if shapes.setdefault(key, found) != found:
                    changed = sorted(n for n in {*found, *shapes[key]} if found.get(n) != shapes[key].get(n))
                    text = f"its upload changes names, shapes or types from call to call ({', '.join(changed)})"
                    faults[
                        (hook, f"{text}; all clients and rounds of a phase must send the same, as uploads are summed")
                    ] = None
            return result

        return call

    watcher = type(base.__name__, (base,), {hook: watch(hook) for hook in hooks})
    clone = copy.copy(method)
    object.__setattr__(clone, "__class__", watcher)
    return clone


def _observed(
    call: Callable[[], Any],
    hook: str,
    names: Sequence[str],
    args: Sequence[Any],
    method: Any,
    faults: Faults,
) -> Any:
    """The result of a hook; what it does beside giving one is written down."""
    before = {path: leaf.clone() for path, leaf in _tensors(dict(zip(names, args, strict=False)))}
    draws, own = _global_draws(), _print([vars(method), _class_values(method)])
    try:
        result, again = call(), call()
    except _HookFailed:
        raise
    except Exception as error:
        faults[(hook, f"raises {type(error).__name__}: {error}")] = None
        raise _HookFailed from error
    after = dict(_tensors(dict(zip(names, args, strict=False))))
    written = [path for path in before if path not in after or not _same(before[path], after[path])]
    if written:
        faults[(hook, f"writes to {_some(written)} in place; make a new tensor or dictionary")] = None
    if added := [path for path in after if path not in before]:
        faults[(hook, f"adds {_some(added)} to what it is given; make a new dictionary")] = None
    if _global_draws() != draws:
        faults[(hook, "draws from a global generator; use cfl.rng.generator(ctx.key) or of info.key")] = None
    if _print([vars(method), _class_values(method)]) != own:
        faults[(hook, "keeps state on the object or its class; return it as client state or a tree of the server")] = (
            None
        )
    elif not callable(result) and not _same(result, again):
        faults[(hook, "gives another result for the same arguments; draw from ctx.key or info.key, keep no state")] = (
            None
        )
    return result


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested values, with the path to it: grads['0.weight'], ctx.state['seen']."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(item, f"{path}[{name!r}]" if path else str(name))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from _tensors(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Client):
        yield from _tensors({task: share.rows for task, share in value.shares.items()}, f"{path}.rows")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _same(a: Any, b: Any) -> bool:
    """Whether two results are equal, tensors to the bit (NaN equals NaN)."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or a == b)


def _global_draws() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return bytes(torch.get_rng_state().tolist()), kind, np.asarray(keys).tobytes(), *rest, random.getstate()


def _class_values(method: Any) -> dict[str, Any]:
    """What a class holds beside functions: where a method might hide its state."""
    kinds = (list, dict, set, Tensor, int, float)
    parents = [parent for parent in type(method).__mro__ if parent.__module__ != "builtins"]
    return {
        f"{parent.__name__}.{name}": value
        for parent in parents
        for name, value in vars(parent).items()
        if isinstance(value, kinds) and not name.startswith("__")
    }


def _print(value: Any) -> str:
    """A text that changes when the value does."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_print(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_print, value)) + "]"
    return repr(value)


# Rounds: clients alone and together, absent clients.


def _planned(config: RunConfig, stream: Stream, watched: LocalRegularizer, faults: Faults) -> Session:
    """A session whose phases are as they should be."""
    try:
        session = _session(config, stream, watched)
    except CflError as error:
        faults[("plan", str(error))] = None
        raise
    for phase in {phase.name: phase for _, phase, _ in session.schedule}.values():
        if phase.work and type(watched).__mro__[1].work is Strategy.work:  # type: ignore[attr-defined]
            faults[("plan", f"phase '{phase.name}' has work=True, but the class has no hook `work`")] = None
    return session


def _check_rounds(session: Session, faults: Faults) -> None:
    """Every round of the run: each client alone, then the cohort."""
    for position, (_, phase, _) in enumerate(session.schedule):
        prepared = session.prepare(position)
        info, shared, clients, states = prepared
        hook = "work" if phase.work and not phase.train else "finish"
        alone = [
            session.engine.round(info, shared, {client.id: states[client.id]}, [client], session.rates[position])
            for client in reversed(clients)
        ]
        kept = {id: tree.clone(leaves) for id, leaves in session.state.clients.items()}
        session.round(position)
        for outcome in alone:
            for id, leaves in outcome.states.items():
                if not _same(leaves, session.state.clients.get(id, {})):
                    text = "the state of a client depends on which other clients take part, or on their order"
                    faults[(hook, f"{text}; state is what the hook gets and returns, by client id")] = None
        for id, leaves in kept.items():
            if id not in info.clients and not _same(leaves, session.state.clients[id]):
                faults[(hook, "the state of a client changes in a round in which it is absent; write to no state")] = (
                    None
                )


# One local step: padded, and of many clients at once.


def _check_batched(session: Session, faults: Faults) -> None:
    """In the first round of each task: one step of each client, alone, padded, and many at once under vmap."""
    for position, (_, phase, number) in enumerate(session.schedule):
        if phase.train and number == 0:
            steps = _Steps(session, session.prepare(position))
            for fails in (steps.padding, steps.dead_step, steps.vmap):
                text = fails(session.chain.members)
                if text:
                    faults[(steps.culprit(fails), text)] = None
        session.round(position)


class _Steps:
    """The first local step of a round's clients. Each check gives what is wrong with hooks, or nothing."""

    def __init__(self, session: Session, prepared: Prepared) -> None:
        self.session, self.info, self.shared = session, prepared.info, prepared.shared
        self.clients: list[tuple[Batch, Batch, Tree]] = []
        for client in prepared.clients:
            state, size = prepared.states[client.id], session.config.local.batch_size
            places = own_state(state, STRATEGY).get(MEMORY, torch.empty(0, 2, dtype=torch.int64))
            self.clients.append(
                (next(client.batches(size)), next(recalled(client, places, size, self.info.key)), state)
            )
        session.model.module.train()

    def step(self, hooks: Hooks, batch: Batch, memory: Batch, state: Tree, key: int = 0) -> Local:
        """A client's trained leaves, buffers and optimiser after its first step."""
        session, info = self.session, self.info
        chain, optimizer, lr = Chain(hooks), session.engine.optimizer, session.config.local.lr
        step = LocalStep(session.model, info.task, info.frozen, chain, optimizer, True, info.heads)
        return step(step.start(self.shared["params"]), batch, self.shared, state, lr, 0, key, memory)[0]

    def padding(self, hooks: Hooks) -> str:
        for batch, memory, state in self.clients:
            if not _near(self.step(hooks, batch, memory, state), self.step(hooks, _padded(batch), memory, state)):
                return "padding in a batch changes the step; multiply by ctx.batch.mask, and divide by its sum"
        return ""

    def dead_step(self, hooks: Hooks) -> str:
        for batch, memory, state in self.clients:
            after = self.step(hooks, batch._replace(mask=torch.zeros_like(batch.mask)), memory, state)
            if not _same(after.params, tree.select(self.shared["params"], after.params)):
                return "a step of padding alone changes the weights"
        return ""

    def vmap(self, hooks: Hooks) -> str:
        groups: dict[str, list[tuple[Batch, Batch, Tree]]] = {}
        for batch, memory, state in self.clients:
            kinds = {name: (leaf.shape, leaf.dtype) for name, leaf in state.items()}
            groups.setdefault(f"{kinds} {batch.x.shape} {memory.x.shape}", []).append((batch, memory, state))
        return next(filter(None, (self._together(hooks, members) for members in groups.values())), "")

    def _together(self, hooks: Hooks, members: Sequence[tuple[Batch, Batch, Tree]]) -> str:
        """Clients with states of equal shapes, stacked."""
        alone = [self.step(hooks, *member) for member in members]
        if not all(_near(one, self.step(hooks, *member, key=1)) for one, member in zip(alone, members, strict=True)):
            return ""  # draws from ctx.key may differ between engines
        batches, memories, states = zip(*members, strict=True)
        parts = [_stacked(batches), _stacked(memories), tree.stack(states)]

        def one(batch: Tree, memory: Tree, state: Tree) -> Local:
            return self.step(hooks, Batch(**batch), Batch(**memory), state)

        try:
            together = torch.func.vmap(one, randomness="different")(*parts)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            return f"cannot run for many clients at once ({first}); use torch.where for branches, and no .item()"
        for number, expected in enumerate(alone):
            found = Local(*(tree.map(lambda leaf: leaf[number], leaves) for leaves in together))  # noqa: B023
            if not _near(expected, found):
                return "many clients at once (vmap) give another step than one at a time"
        return ""

    def culprit(self, fails: Callable[[Hooks], str]) -> str:
        """The hook without which a check passes."""
        members = self.session.chain.members
        owner = list(members)[-1]
        base = Strategy if isinstance(members[owner], Strategy) else LocalRegularizer
        for hook in (*_CLIENT_HOOKS, "loss"):
            if getattr(type(members[owner]), hook, None) is getattr(base, hook, None):
                continue
            clone = copy.copy(members[owner])
            lacking = type(type(clone).__name__, (type(clone),), {hook: getattr(base, hook)})
            object.__setattr__(clone, "__class__", lacking)
            if not fails({**members, owner: clone}):
                return hook
        return "local step"


def _stacked(batches: Sequence[Batch]) -> Tree:
    """The leaves of batches of equal shapes, by field, without those that are None."""
    fields = [name for name, leaf in batches[0]._asdict().items() if leaf is not None]
    return {name: torch.stack([getattr(batch, name) for batch in batches]) for name in fields}


def _padded(batch: Batch) -> Batch:
    """The batch, and as many samples again that count for nothing."""
    x = torch.cat([batch.x, torch.full_like(batch.x, 3.0)])
    y, ids = torch.cat([batch.y, torch.zeros_like(batch.y)]), torch.cat([batch.ids, -torch.ones_like(batch.ids)])
    task = None if batch.task is None else torch.cat([batch.task, batch.task])
    return Batch(x, y, torch.cat([batch.mask, torch.zeros_like(batch.mask)]), ids, task)


def _near(a: Local, b: Local) -> bool:
    return all(
        torch.allclose(leaf.float(), other[name].float(), atol=TOLERANCE, rtol=TOLERANCE)
        for one, other in zip(a, b, strict=True)
        for name, leaf in one.items()
    )


# Whole runs: other engines, kills.


def _check_engines(config: RunConfig, stream: Stream, method: LocalRegularizer, faults: Faults) -> None:
    expected = run(config, stream=stream, **_roles(method)).params
    for engine in ENGINES:
        found = run(config.model_copy(update={"engine": engine}), stream=stream, **_roles(method)).params
        worst = max(float((leaf - found[name]).abs().max()) for name, leaf in expected.items() if leaf.numel())
        if worst > TOLERANCE:
            faults[
                ("run", f"engine '{engine}' gives weights that differ by {worst:.1e} from engine '{config.engine}'")
            ] = None


class _Kill(NullSink):
    """Ends a run in the middle of a round, before it is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, row: dict[str, Any]) -> None:
        if row["rounds_done"] == self.after:
            raise _Killed


class _Killed(Exception):
    """The run was killed on purpose."""


def _check_resume(config: RunConfig, stream: Stream, method: LocalRegularizer, faults: Faults) -> None:
    """Kill the run in every round, resume, and compare all that is saved at its end."""
    total = len(_session(config, stream, method).schedule)
    with tempfile.TemporaryDirectory() as folder:
        expected = _saved(config, stream, method, Path(folder) / "whole")
        for after in range(2, total + 1):
            path = Path(folder) / str(after)
            try:
                run(config, output=path, stream=stream, sink=_Kill(after), **_roles(method))
            except _Killed:
                found = _saved(config, stream, method, path)
            for name in [name for name in expected if not _same(expected[name], found.get(name))]:
                hook = "finish" if name.startswith("client/") else "absorb"
                text = f"killed in round {after} of {total} and resumed, the run ends with another '{name}'"
                faults[(hook, f"{text}; all that later rounds need must be in client states or the server's trees")] = (
                    None
                )
            if faults:
                return


def _saved(config: RunConfig, stream: Stream, method: LocalRegularizer, path: Path) -> dict[str, Tree]:
    """Run, or resume, to the end: the trees of the last checkpoint."""
    run(config, output=path, resume=True, stream=stream, **_roles(method))
    session = _session(config, stream, method)
    found = checkpoint.load_latest(path / "checkpoints", session.fingerprint, lambda text: None)
    return found[0] if found else {}
