"""Checks of rounds and runs: dependence between clients, absent clients, other engines, and resuming after a kill."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from cfl.config.schema import FlowerConfig, RunConfig
from cfl.contract import LocalRegularizer, RoundInputs, Strategy, TreesByOwner
from cfl.contract.composed import STRATEGY
from cfl.core import CflError, Tree, machine, tree
from cfl.core.errors import few
from cfl.runtime import checkpoint
from cfl.runtime.builder import build_session
from cfl.runtime.runner import run
from cfl.runtime.session import Session
from cfl.runtime.sinks import NullSink
from cfl.streams import Stream, selected
from cfl.testing.hooks import Faults, HookFailed, unlike

# Error between single clients and blocks, with and without padding; in bf16, that of rounding a factor of a product.
TOLERANCE = {"float32": 1e-5, "bf16": 2.0**-8}


def session(config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None = None) -> Session:
    """Return a run of the method that has not started."""
    roles = _roles(method)
    return build_session(config, stream, {STRATEGY: roles["strategy"], **roles["regularizers"]}, module)


def planned(
    config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None, faults: Faults
) -> Session:
    """Return a run after a check of its phases; raise HookFailed if the plan is invalid. method: from `watched`."""
    try:
        found = session(config, stream, method, module)
    except CflError as error:
        faults.add("plan", str(error))
        raise HookFailed from error
    for phase in {phase.name: phase for _, phase, _ in found.schedule}.values():
        if phase.work and type(method).__mro__[1].work is Strategy.work:  # type: ignore[attr-defined]
            faults.add("plan", f"phase '{phase.name}' has work=True, but the class has no hook `work`")
    return found


def check_rounds(session: Session, plain: Session, faults: Faults) -> None:
    """In every round, compute each client alone, in reverse order, and compare with the round of the cohort.

    session: of a watched method; plain: the same run of the method itself, for the clients alone.
    """
    tasks, sent = [task for task, *_ in session.schedule], dict[int, TreesByOwner]()
    for position, (task, phase, _) in enumerate(session.schedule):
        info, shared, clients, states = session.prepare(position)
        if clients:
            _check_kept(session, shared, sent.setdefault(task, shared), faults)
        hook = "finish" if phase.train else "work"
        kept = {id: tree.clone(leaves) for id, leaves in session.state.clients.items()}
        session.round(position)
        if faults:
            return
        own = replace(info, model=plain.model)  # the model that its engine switches between the modes
        alone = [
            plain.engine.round(RoundInputs(own, shared, [client], {client.id: states[client.id]}))
            for client in reversed(clients)
        ]
        # The state of a regularizer ends with its task, so compare it within the task only.
        prefix = "" if tasks[position + 1 : position + 2] in ([], [task]) else f"{STRATEGY}/"
        after = {id: _with_prefix(leaves, prefix) for id, leaves in session.state.clients.items()}
        for outcome in alone:
            for id, leaves in outcome.states.items():
                if differing := [*unlike(_with_prefix(leaves, prefix), after.get(id, {}))]:
                    text = "the state of a client depends on the other clients in the round, or on their order"
                    faults.add(hook, f"{text} ({few(differing, 2)}); use only the state that the hook gets and returns")
        for id, leaves in kept.items():
            if id not in info.clients and (differing := [*unlike(_with_prefix(leaves, prefix), after[id])]):
                text = "the state of a client changes in a round without it"
                faults.add(hook, f"{text} ({few(differing, 2)}); do not write to a state in place")


def _check_kept(session: Session, shared: TreesByOwner, first: TreesByOwner, faults: Faults) -> None:
    """Compare the trees that clients keep with those of the first broadcast of the task."""
    for name in session.strategy.kept:
        if differing := [*unlike(first.get(name, {}), shared.get(name, {}), name)]:
            text = f"a tree in `kept` changes within a task ({few(differing, 2)})"
            faults.add("broadcast", f"{text}; send the same tree in all rounds of the task, or leave it out of `kept`")


def _with_prefix(leaves: Tree, prefix: str) -> Tree:
    return {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}


ENGINES: dict[str, dict[str, Any]] = {  # blocks and processes are checked one at a time; both would only take longer
    "loop": {},
    "vmapped": {"block": 2},
    "pool": {"block": 2, "workers": 1},
    "flower": {"block": 1, "workers": 2, "flower": FlowerConfig(address="in-process")},
}
ADVICE = {
    "vmapped": "hooks run under torch.func.vmap: use torch.where for branches, do not call .item(), index by "
    "ctx.client[None] instead of ctx.client, and multiply by ctx.batch.mask",
    "pool": "client hooks run in other processes: keep nothing outside client states and the server's trees",
    "flower": "client hooks run on other machines: keep nothing outside client states and the server's trees",
}


def check_engines(config: RunConfig, stream: Stream, method: LocalRegularizer, pool: bool, faults: Faults) -> None:
    """Compare the weights of the run between engines."""
    expected = run(config, stream=stream, progress=False, **_roles(method)).params
    for engine, options in ENGINES.items():
        if engine in ("pool", "flower") and not pool or engine == "flower" and find_spec("flwr") is None:
            continue
        settings = config.model_copy(update={"engine": engine, **options})
        try:
            found = run(settings, stream=stream, progress=False, **_roles(method)).params
        except CflError as error:
            faults.add("run", f"engine '{engine}' fails: {error}; {ADVICE.get(engine, 'see the message')}")
            continue
        filled = ((name, leaf) for name, leaf in expected.items() if leaf.numel())
        worst, name = max((float((leaf - found[name]).abs().max()), name) for name, leaf in filled)
        if worst > TOLERANCE[config.precision]:
            text = f"engine '{engine}' gives '{name}' that differs by {worst:.1e} from '{config.engine}'; "
            faults.add("run", f"{text}{ADVICE.get(engine, 'keep no state outside client states and trees')}")


def check_resume(
    config: RunConfig,
    stream: Stream,
    method: LocalRegularizer,
    module: nn.Module | None,
    every_round: bool,
    faults: Faults,
) -> None:
    """Resume the run as if it had been killed in every round, or in one, and compare the last checkpoints.

    The copy of a run's folder within a round is what a kill in this round leaves. Another run then replaces anything
    that the process may have kept of this one. The latest kill is resumed first, so that the rounds before a kill were
    never computed since.
    """
    total = len(session(config, stream, method, module).schedule)
    with tempfile.TemporaryDirectory() as folder:
        kills, whole = range(2, total + 1) if every_round else [total // 2 + 1], Path(folder) / "whole"
        expected = _saved(config, stream, method, module, whole, sink=_Copies(whole, kills))
        another = config.model_copy(update={"seed": config.seed + 1})
        run(another, stream=stream, model=module, progress=False, **_roles(method))
        for after in reversed(kills):
            found = _saved(config, stream, method, module, _copy_of(whole, after))
            for name, leaves in expected.items():
                if differing := [*unlike(leaves, found.get(name), name)]:
                    text = (
                        f"killed in round {after} of {total} and resumed, the run ends with another {few(differing, 2)}"
                    )
                    remedy = "keep all that later rounds need in client states or the server's trees"
                    faults.add("finish" if name.startswith("client/") else "absorb", f"{text}; {remedy}")
            if faults:
                return


def check_later_tasks(
    config: RunConfig, stream: Stream, method: LocalRegularizer, module: nn.Module | None, faults: Faults
) -> None:
    """Finish the run without its last task, let it go on with that task, and compare with the run of all tasks."""
    first, rounds = len(stream) - 1, config.rounds
    fixed = isinstance(method, Strategy) and method.not_extendable
    if not first or fixed or config.dp.target_epsilon is not None:
        return
    config = config.model_copy(update={"tasks": None})
    short = config.model_copy(update={"rounds": rounds[:first] if isinstance(rounds, tuple) else rounds})
    with tempfile.TemporaryDirectory() as folder:
        expected = _saved(config, stream, method, module, Path(folder) / "whole")
        _saved(short, selected(stream, first), method, module, Path(folder) / "parts")
        found = _saved(config, stream, method, module, Path(folder) / "parts")
    for name, leaves in expected.items():
        if differing := [*unlike(leaves, found.get(name), name)]:
            text = f"a run that goes on with a later task ends with another {few(differing, 2)} than a run of all tasks"
            faults.add("init_server", f"{text}; let nothing depend on the number of tasks, or set `not_extendable`")


def _roles(method: LocalRegularizer) -> dict[str, Any]:
    if isinstance(method, Strategy):
        return {"strategy": method, "regularizers": {}}
    return {"strategy": Strategy(), "regularizers": {"checked": method}}


class _Copies(NullSink):
    """Copy a run's folder in the middle of rounds, before the round is saved. after: the numbers of these rounds."""

    def __init__(self, path: Path, after: Sequence[int]) -> None:
        self.path, self.after = path, after

    def round(self, row: dict[str, Any]) -> None:
        if row["rounds_done"] in self.after:
            machine.await_writers()
            shutil.copytree(self.path, _copy_of(self.path, row["rounds_done"]))


def _copy_of(path: Path, after: int) -> Path:
    return path.with_name(f"{path.name}-{after}")


def _saved(
    config: RunConfig,
    stream: Stream,
    method: LocalRegularizer,
    module: nn.Module | None,
    path: Path,
    sink: NullSink = NullSink(),  # silent in a notebook, too
) -> dict[str, Tree]:
    """Run or resume to the end, and return the trees of the last checkpoint."""
    run(config, output=path, resume=True, stream=stream, model=module, sink=sink, **_roles(method))
    fingerprint = session(config, stream, method, module).recorder.fingerprint.text
    found = checkpoint.load_latest(path / "checkpoints", fingerprint, lambda text: None)
    return found[0] if found else {}
