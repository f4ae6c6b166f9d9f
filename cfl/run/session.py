"""A run in progress: a schedule of rounds, and each one is broadcast, local work, sum, and the server's step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from cfl import engines, models
from cfl.aggregation.protected import UploadProtection
from cfl.assembly import methods, privacy_rules
from cfl.assembly import resolve as configuration
from cfl.config.overrides import change
from cfl.config.schema import RunConfig
from cfl.contract.composed import STRATEGY, ComposedMethod
from cfl.contract.data import MEMORY, Client
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import machine, metrics, optim, options, rng, tree
from cfl.core.errors import CheckpointError, ConfigError, UpdateError
from cfl.engines import Engine, Outcome
from cfl.engines.choose import choose, undecided
from cfl.engines.evaluate import LocalModels, Observer, accuracies, accuracy
from cfl.run import checkpoint
from cfl.run.population import Population
from cfl.run.privacy_budget import Budget
from cfl.run.rounds import Rounds
from cfl.run.run_folder import RunFolder, plain
from cfl.run.sinks import Sink
from cfl.run.state import RunState
from cfl.streams import Stream
from cfl.streams.store import TaskSamples


@dataclass(frozen=True)
class Result:
    """What a run gives: metrics as in metrics.json (fractions, bytes, seconds) and the global model.

    accuracy_matrix: (tasks, tasks) fractions, NaN for tasks not yet seen; params: the final global model.
    """

    metrics: dict[str, Any]
    accuracy_matrix: np.ndarray
    params: tree.Tree
    model: models.Model


class RoundInputs(NamedTuple):
    """What goes into a round: what comes down, who takes part, and their states by id."""

    info: RoundInfo
    shared: TreesByOwner
    clients: list[Client]
    states: dict[int, tree.Tree]


class Session:
    """A run in progress. schedule: (task, phase, round within it) of every round; state: what is computed so far."""

    def __init__(
        self,
        config: RunConfig,
        stream: Stream,
        members: Mapping[str, LocalRegularizer],
        module: nn.Module | None,
        folder: RunFolder | None,
        sink: Sink,
    ) -> None:
        machine.keep_memory()
        self.config, self.folder, self.sink = config, folder, sink
        self.writer = checkpoint.Writer(folder.checkpoints if folder else None, sink.warn)
        own = members != methods.build(config)  # objects of a user's own are known by their classes
        self.method = "+".join(type(member).__name__ for member in members.values()) if own else config.label
        self.device = machine.device(config.device)
        self.stream = stream.to(self.device).with_augment(config.local.augment)
        self.composed = ComposedMethod(members)
        self.strategy = self.composed.strategy
        self.public = self._checked(members)
        self.model = self._model(module)
        methods.check_model(self.model.module, config)
        self.population = Population(self.stream, config)
        self.rounds = Rounds(self.strategy, self.method, self.model, self.stream, self.population, config, self.public)
        self.schedule = self.rounds.schedule
        self.budget = Budget(config, self.schedule, self.population, self.rounds.sees)
        self.protection = UploadProtection(config, self.budget.multiplier)
        server = {"params": self.model.params, **self.strategy.init_server(self.model.params, self.model)}
        self.state = RunState(server, len(stream))
        self._decide()
        self.engine = self._engine(self.config.engine, self.config.block)
        self.fingerprint = self._fingerprint()
        self.clock = time.monotonic()

    def _checked(self, members: Mapping[str, LocalRegularizer]) -> TaskSamples | None:
        """The public data, if any member needs them. Raises ConfigError for members that cannot run like this."""
        for owner, member in members.items():
            options.check(member, owner if owner == STRATEGY else f"regularizer.{owner}")
        methods.check(members, self.config, public=self.stream.public is not None)
        privacy_rules.check(members, self.config)
        if not methods.need_public(members):
            return None
        if self.stream.public is None:
            raise ConfigError(
                f"stream '{self.stream.name}' has no public data, which {self.method} needs; give it some with "
                "cfl.streams.with_public or from_tensors(public=...)"
            )
        return self.stream.public

    def _fingerprint(self) -> str:
        """What a checkpoint has to agree with: the decisive options, and what of the run is no part of them."""
        given = {  # objects of a user's own are no part of the configuration
            "hooks": {owner: repr(member) for owner, member in self.composed.members.items()},
            "params": {name: list(leaf.shape) for name, leaf in self.model.params.items()},
            "tasks": [(task.name, len(task.train), len(task.test)) for task in self.stream.tasks],
        }
        return checkpoint.fingerprint({**self._decisive(configuration.dump(self.config)), "given": given})

    def start(self, resume: bool) -> None:
        """Write the configuration, or take up the last checkpoint; tell the user what is about to run."""
        if self.folder is not None:
            if not resume:
                checkpoint.clear(self.folder.checkpoints)
            elif found := self._last():
                self.state.restore(*found, device=self.device)
            self.folder.write_config(configuration.dump(self.config))
            self.folder.truncate_rounds(self.state.position)
        self.sink.start(self.config, self._notes(), len(self.schedule))

    def _last(self) -> tuple[dict[str, tree.Tree], dict[str, Any]] | None:
        """The last checkpoint. Raises CheckpointError, which names an option that is another in the folder."""
        assert self.folder is not None
        try:
            return checkpoint.load_latest(self.folder.checkpoints, self.fingerprint, self.sink.warn)
        except CheckpointError as error:
            there, here = map(self._decisive, (self.folder.read_config(), configuration.dump(self.config)))
            changed = change(there, here) if there else ""
            raise CheckpointError(f"{error}: {changed}" if changed else str(error)) from None

    @staticmethod
    def _decisive(options: Mapping[str, Any]) -> dict[str, Any]:
        """The options that a checkpoint depends on: the number of processes changes no bit."""
        return {name: value for name, value in options.items() if name != "workers"}

    def close(self) -> None:
        """Give back what the engine holds, such as processes."""
        self.engine.close()

    def prepare(self, position: int) -> RoundInputs:
        """The broadcast and the cohort of a round, from the state that the run is in."""
        info = self.rounds.info(position)
        shared, stored, last = (
            self.composed.broadcast(self.state.server, info),
            self.state.clients,
            self.state.last_task,
        )
        ids = info.uploading
        if not ids and info.privacy and info.privacy.hidden:  # the noise of an empty cohort has the shape of an upload
            ids = self.population.owners(self.rounds.sees(info.task))[:1]
        clients = [self.population.client(id, info.task, self.rounds.sees(info.task)) for id in ids]
        states = {
            id: stored.get(id, {})
            if last.get(id) == info.task
            else self.composed.client_state(stored.get(id), shared["params"], self.model)
            for id in ids
        }
        return RoundInputs(info, shared, clients, states)

    def round(self, position: int, observe: Observer | None = None) -> None:
        """One round of the schedule, and the task's end where it is the last one of a task; observe: as for `run`."""
        task, phase, number = self.schedule[position]
        state = self.state
        info, shared, clients, states = self.prepare(position)
        server_seconds = self._lap()
        seen = self._local_models(info, shared["params"], observe)
        outcome = self.engine.round(info, shared, states, clients, seen)
        client_seconds = self._lap() - (seen.seconds if seen else 0.0)
        if outcome.aborted is None:
            self._absorb(info, shared, outcome)
        state.clients.update((id, leaves) for id, leaves in outcome.states.items() if leaves or states[id])
        state.last_task.update(dict.fromkeys(outcome.states, task))
        for text in outcome.faults(info):
            self.sink.warn(text)

        server_seconds += self._lap()
        state.position = position + 1
        task_done = self.rounds.ends_task(position)
        if task_done:
            self._end_task(task)
        due = phase.train and bool(self.config.eval_every) and (number + 1) % self.config.eval_every == 0
        row = {
            "task": task,
            "phase": phase.name,
            "round": number,
            **outcome.figures(),
            "dropped": info.dropped,
            "accuracy": state.accuracy_matrix[task, task]
            if task_done
            else self._accuracies([task])[0]
            if due
            else None,
            "lr": info.lr,
            **outcome.traffic(info, shared),
            "seconds": client_seconds + server_seconds,
            **({"local": seen.figures} if seen and seen.figures else {}),
        }
        state.count(row)
        if seen and seen.figures:
            state.local = seen.figures
        for kind, seconds in (("clients", client_seconds), ("server", server_seconds)):
            state.spent("measurement" if phase.diagnostic else kind, phase.name, seconds)
        state.spent("measurement", "evaluate", self._lap() + (seen.seconds if seen else 0.0))
        self._record(row, task_done)
        if task_done or state.position % self.config.checkpoint_every == 0:
            self.save(wait=state.position == len(self.schedule))
        state.spent("measurement", "checkpoint", self._lap())

    def save(self, wait: bool = False) -> None:
        """Have a checkpoint of what is done so far written, where there is a folder; wait: until it is on disk."""
        if self.folder is not None:
            self.folder.sync_rounds()  # no checkpoint knows of more rounds than the disk has lines
            trees, meta = self.state.saved()
            self.writer.save(self.state.position, trees, {**meta, "fingerprint": self.fingerprint})
            if wait:
                self.writer.wait()

    def finish(self) -> Result:
        """Metrics of the whole run, on disk where there is a folder."""
        state, acc = self.state, self.state.accuracy_matrix
        owners = self.population.owners(tuple(range(len(self.stream))))
        stored = [self._stored(own) for own in state.clients.values()]
        bare, others = self._stored({}), len(owners) - len(stored)  # the others have no state
        result = {
            "method": self.method,
            "benchmark": self.stream.name,
            "seed": self.config.seed,
            **metrics.summary(acc, self.strategy.sequential),
            "accuracy_matrix": [_row(row) for row in acc],
            "subspace_use": {},
            **state.reports[-1],
            "by_task": state.reports,
            **state.totals(),
            "client_bytes": (sum(stored) + others * bare) / len(owners),
            "client_bytes_max": max([*stored, bare]),  # a state can only add to it
            **self.budget.report(),
        }
        if self.folder is not None:
            self.folder.write_timing(state.seconds)  # first: metrics.json is the sign of a finished run
            self.folder.write_metrics(result)
        self.sink.finish(result)
        return Result(result, acc, state.server["params"], self.model)

    def _engine(self, name: str, block: int | None) -> Engine:
        config = self.config
        return engines.build(
            name,
            block=block,
            cohort=self.rounds.usual_cohort,
            workers=config.workers or machine.cores(),
            known=[self.model, self.public or (), *(task.train for task in self.stream.tasks)],
            model=self.model,
            strategy=self.strategy,
            composed=self.composed,
            optimizer=optim.build(config.local.optimizer, config.local.momentum, config.local.weight_decay),
            epochs=config.local.epochs,
            batch_size=config.local.batch_size,
            weights=config.agg.weights,
            on_bad_update=config.on_bad_update,
            sums=self.protection.sum,
            noise=self.protection.samples,
        )

    def _decide(self) -> None:
        """Settle what the configuration leaves to a measurement."""
        config = self.config
        if not undecided(config.engine, config.block):
            return
        training = (position for position, (_, phase, _) in enumerate(self.schedule) if phase.train)
        rounds = (self.prepare(position) for position in training)
        first = next((round for round in rounds if round.clients), None)
        if first is None:  # nobody ever trains: there is nothing to measure
            self.config = config.model_copy(update={"engine": "loop"} if config.engine == "auto" else {})
            return
        choice = choose(
            config.engine,
            config.block,
            config.workers or machine.cores(),
            config.threads,
            self.device,
            self._engine,
            first,
            config.local.batch_size,
        )
        self.config = config.model_copy(update=choice._asdict())

    def _record(self, row: dict[str, Any], task_done: bool) -> None:
        """Write a round down, and tell the user of it, and of its task where that is over."""
        done, task = self.state.position, row["task"]
        if self.folder is not None:
            self.folder.append_round(row)
        self.sink.round({**row, "rounds_done": done, "rounds_total": len(self.schedule)})
        if task_done:
            spent = {"epsilon": self.budget.so_far(done)} if self.budget.rounds else {}
            name = self.stream.tasks[task].name
            self.sink.task({"task": task, "name": name, "accuracy": _row(self.state.accuracy_matrix[task]), **spent})

    def _absorb(self, info: RoundInfo, shared: TreesByOwner, outcome: Outcome) -> None:
        """The server's step, from the sum of the clients that are in it."""
        survivors = self.rounds.survived(info, tuple(outcome.states), outcome.noise)
        try:
            self.state.server = self.composed.absorb(
                self.state.server, shared, outcome.mean, survivors, self.config.server.lr
            )
        except (RuntimeError, ValueError) as error:
            raise UpdateError(f"the server's step failed ({info.place}): {error}") from error

    def _stored(self, state: tree.Tree) -> int:
        """Bytes that a client keeps between rounds: its trees, the samples of its memory, the public data."""
        state = dict(state)
        places = state.pop(f"{STRATEGY}/{MEMORY}", torch.empty(0, 2))
        public = len(self.public) * self.public.pool.images[0].nbytes if self.public else 0  # they have no labels
        samples = sum(self.stream.tasks[int(task)].train.sample_bytes for task, _ in places.tolist())
        return public + tree.nbytes(state) + samples

    def _accuracies(self, tasks: Iterable[int]) -> list[float]:
        served = {task: self.strategy.serve(self.state.server, task) for task in tasks}
        parts = {task: self.stream.tasks[task].test for task in served}
        return accuracies(self.model, served, parts, self.config.eval_batch_size)

    def _score(self, params: tree.Tree, task: int) -> float:
        return accuracy(self.model, params, self.stream.tasks[task].test, task, self.config.eval_batch_size)

    def _end_task(self, task: int) -> None:
        """Append a row to the accuracy matrix: every task seen so far, with the global model."""
        self.state.accuracy_matrix[task, : task + 1] = self._accuracies(range(task + 1))
        self.state.reports.append(plain(self.strategy.report(self.state.server, self.model)))
        if task + 1 < len(self.stream):
            server, self.state.clients = self.composed.end_task(self.state.server, self.state.clients)
            self.state.server = self.strategy.begin_task(server, task + 1, self.model)

    def _local_models(self, info: RoundInfo, params: tree.Tree, observe: Observer | None) -> LocalModels | None:
        """What looks at the clients' models of this round; None where nobody does."""
        every = self.config.eval_local
        due = info.phase.train and bool(every) and (info.trained + 1) % every == 0
        if not due and observe is None:
            return None
        return LocalModels(info, params, self._score if due else None, observe)

    def _lap(self) -> float:
        """Seconds since the last lap, with all that the device was told to do."""
        machine.synchronize(self.device)
        before, self.clock = self.clock, time.monotonic()
        return self.clock - before

    def _model(self, module: nn.Module | None) -> models.Model:
        stream, config = self.stream, self.config.model
        if module is None:
            with rng.fork(rng.key(self.config.seed, "model")):
                module = models.build(config.name, stream.input_shape, stream.tasks[0].classes, config.options)
        return models.Model(
            module,
            stream.input_shape,
            [task.classes for task in stream.tasks],
            multi_head=stream.multi_head,
            norm_stats=config.norm_stats,
            seed=self.config.seed,
            device=self.device,
        )

    def _notes(self) -> list[str]:
        notes = [*self.strategy.notes(self.model), *self.population.notes(), *self.budget.notes()]
        if self.state.position:
            notes = [*notes, f"resumed after {self.state.position} of {len(self.schedule)} rounds"]
        return notes


def _row(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else float(value) for value in values]
