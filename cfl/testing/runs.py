"""Rounds and whole runs: clients alone and together, absent clients, other engines, kills in every round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from cfl.config.schema import RunConfig
from cfl.contract.composed import STRATEGY
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.strategy import Strategy
from cfl.core import tree
from cfl.core.errors import CflError
from cfl.core.tree import Tree
from cfl.run import checkpoint
from cfl.run.runner import run
from cfl.run.session import Session
from cfl.run.sinks import NullSink
from cfl.streams import Stream
from cfl.testing.hooks import Faults, HookFailed, same

TOLERANCE = 1e-5  # float32: between one client at a time and many, with and without padding


def session(config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None = None) -> Session:
    """A run of the method, not yet begun."""
    roles = _roles(method)
    return Session(config, stream, {STRATEGY: roles["strategy"], **roles["regularizers"]}, module, None, NullSink())


def planned(
    config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None, faults: Faults
) -> Session:
    """A run whose phases are as they should be. method: from `watched`."""
    try:
        found = session(config, stream, method, module)
    except CflError as error:
        faults.add("plan", str(error))
        raise HookFailed from error
    for phase in {phase.name: phase for _, phase, _ in found.schedule}.values():
        if phase.work and type(method).__mro__[1].work is Strategy.work:  # type: ignore[attr-defined]
            faults.add("plan", f"phase '{phase.name}' has work=True, but the class has no hook `work`")
    return found


def check_rounds(session: Session, faults: Faults) -> None:
    """Every round of the run: each client alone, in reverse order, then the cohort."""
    tasks = [task for task, *_ in session.schedule]
    for position, (task, phase, _) in enumerate(session.schedule):
        info, shared, clients, states = session.prepare(position)
        hook = "finish" if phase.train else "work"
        alone = [
            session.engine.round(info, shared, {client.id: states[client.id]}, [client]) for client in reversed(clients)
        ]
        kept = {id: tree.clone(leaves) for id, leaves in session.state.clients.items()}
        session.round(position)
        # With its task a regularizer's state is gone, whatever the hooks did.
        prefix = "" if tasks[position + 1 : position + 2] in ([], [task]) else f"{STRATEGY}/"
        after = {id: _begun(leaves, prefix) for id, leaves in session.state.clients.items()}
        for outcome in alone:
            for id, leaves in outcome.states.items():
                if not same(_begun(leaves, prefix), after.get(id, {})):
                    text = "the state of a client depends on which other clients take part, or on their order"
                    faults.add(hook, f"{text}; keep it in what the hook gets and returns")
        for id, leaves in kept.items():
            if id not in info.clients and not same(_begun(leaves, prefix), after[id]):
                faults.add(hook, "the state of a client changes in a round in which it is absent; write to no state")


def _begun(leaves: Tree, prefix: str) -> Tree:
    return {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}


ENGINES = {  # one thing at a time: blocks, processes; both together add nothing but seconds
    "loop": {},
    "vmapped": {"block": 2},
    "pool": {"block": 2, "workers": 1},
}
ADVICE = {
    "vmapped": "hooks see one client at a time through torch.func.vmap: use torch.where for branches, no .item(), and "
    "multiply by ctx.batch.mask",
    "pool": "hooks of clients run in other processes: keep nothing outside client states and the server's trees",
}


def check_engines(
    config: RunConfig, stream: Stream, method: LocalRegularizer, pool: bool, draws: bool, faults: Faults
) -> None:
    """The whole run with every engine. draws: local steps draw from ctx.key, which may differ in blocks of clients."""
    expected = run(config, stream=stream, **_roles(method)).params
    for engine, options in ENGINES.items():
        if engine == "pool" and not pool or engine == "vmapped" and draws:
            continue
        settings = config.model_copy(update={"engine": engine, **options})
        try:
            found = run(settings, stream=stream, **_roles(method)).params
        except CflError as error:
            faults.add("run", f"engine '{engine}' fails: {error}; {ADVICE.get(engine, 'see the message')}")
            continue
        worst = max(float((leaf - found[name]).abs().max()) for name, leaf in expected.items() if leaf.numel())
        if worst > TOLERANCE:
            text = f"engine '{engine}' gives weights that differ by {worst:.1e} from '{config.engine}'; "
            faults.add("run", f"{text}{ADVICE.get(engine, 'keep no state outside the trees')}")


def check_resume(
    config: RunConfig,
    stream: Stream,
    method: LocalRegularizer,
    module: nn.Module | None,
    every_round: bool,
    faults: Faults,
) -> None:
    """Kill the run in every round, or in one, resume, and compare all that is saved at its end."""
    total = len(session(config, stream, method, module).schedule)
    with tempfile.TemporaryDirectory() as folder:
        expected = _saved(config, stream, method, module, Path(folder) / "whole")
        for after in range(2, total + 1) if every_round else [total // 2 + 1]:
            path = Path(folder) / str(after)
            try:
                run(config, output=path, stream=stream, model=module, sink=_Kill(after), **_roles(method))
            except _Killed:
                # what the process may remember of this run is now of another one
                run(config.model_copy(update={"seed": config.seed + 1}), stream=stream, model=module, **_roles(method))
                found = _saved(config, stream, method, module, path)
            for name in [name for name in expected if not same(expected[name], found.get(name))]:
                hook = "finish" if name.startswith("client/") else "absorb"
                text = f"killed in round {after} of {total} and resumed, the run ends with another '{name}'"
                faults.add(hook, f"{text}; what later rounds need belongs to client states or the server's trees")
            if faults:
                return


def _roles(method: LocalRegularizer) -> dict[str, Any]:
    if isinstance(method, Strategy):
        return {"strategy": method, "regularizers": {}}
    return {"strategy": Strategy(), "regularizers": {"checked": method}}


class _Killed(Exception):
    """The run was killed on purpose."""


class _Kill(NullSink):
    """Ends a run in the middle of a round, before it is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, row: dict[str, Any]) -> None:
        if row["rounds_done"] == self.after:
            raise _Killed


def _saved(
    config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None, path: Path
) -> dict[str, Tree]:
    """Run, or resume, to the end: the trees of the last checkpoint."""
    run(config, output=path, resume=True, stream=stream, model=module, **_roles(method))
    fingerprint = session(config, stream, method, module).fingerprint
    found = checkpoint.load_latest(path / "checkpoints", fingerprint, lambda text: None)
    return found[0] if found else {}
