"""The rounds of a run before they run: cohort, learning rate, broadcast, and the client states that go in."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from cfl.aggregation import scope
from cfl.assembly import privacy_rules
from cfl.config.schema import RunConfig
from cfl.contract import MEMORY, RoundInfo, RoundInputs, Server, TreesByOwner
from cfl.contract.composed import STRATEGY, ComposedMethod
from cfl.core import Tree, plugins, tree
from cfl.models import Model
from cfl.runtime import schedule
from cfl.runtime.population import Population
from cfl.runtime.state import RunState
from cfl.streams import Stream
from cfl.streams.store import TaskSamples


class Rounds:
    """The rounds of a run. schedule: (task, phase, round within the phase) of each.

    label: name of the method in metrics.json and messages; public: public data, if a method reads them;
    positions: the key of each round to its place in the schedule;
    usual_cohort: clients in a training round of the task with the most owners, for which engines size their blocks.
    Raises ConfigError if the strategy's plan cannot be run.
    """

    def __init__(
        self,
        composed: ComposedMethod,
        label: str,
        model: Model,
        stream: Stream,
        population: Population,
        config: RunConfig,
        public: TaskSamples | None,
    ) -> None:
        self.composed, self.strategy, self.model, self.label = composed, composed.strategy, model, label
        self.population, self.config, self.public, self.tasks = population, config, public, len(stream)
        registered = config.benchmark in plugins.benchmarks.names()  # else the stream is the user's own
        others = plugins.benchmarks.get(config.benchmark).names if registered else ()
        tasks = [task.name for task in stream.tasks]
        self.schedule = schedule.planned(self.strategy, label, tasks, config.rounds, others)
        self._rates = schedule.rates(self.schedule, config.local)
        self._trained = schedule.trained(self.schedule)
        self._trained_in_run = schedule.trained(self.schedule, restart=False)
        self._keys = schedule.keys(config.seed, self.schedule)
        self.positions = {key: position for position, key in enumerate(self._keys)}
        owners = {task: len(population.owners(self.sees(task))) for task in range(self.tasks)}
        privacy_rules.check_schedule((phase for _, phase, _ in self.schedule), owners, config)
        self.usual_cohort = min(config.cohort, max(owners.values()))

    def sees(self, task: int) -> tuple[int, ...]:
        """Tasks whose data the clients train on in this task."""
        return tuple(self.strategy.sees(task, self.tasks))

    def ends_task(self, position: int, skipped: Collection[int]) -> bool:
        """Whether a round is the last round of its task. skipped: places of rounds that will not run."""
        after = schedule.following(self.schedule, position, skipped)
        return after == len(self.schedule) or self.schedule[after][0] > self.schedule[position][0]

    def begin_task(self, task: int, state: RunState) -> None:
        """Let the methods end the task before and begin this one."""
        server, clients = self.composed.end_task(state.server, state.clients)
        begun = self.strategy.begin_task(server, task, self.model)
        self.composed.check(STRATEGY, "begin_task", begun, server, f"task {task}")
        state.server, state.clients = begun, clients

    def inputs(self, position: int, state: RunState) -> RoundInputs:
        """Draw the cohort of a round, make its broadcast, and look up the states of the clients that upload."""
        info = self.info(position)
        shared = self.composed.broadcast(state.server, info)
        tasks, ids = self.sees(info.task), info.uploading
        if not ids and info.privacy and info.privacy.hidden:  # noise for an empty cohort takes its shape from an upload
            ids = self.population.owners(tasks)[:1]
        return self.of_clients(ids, info, shared, state.clients, state.last_task)

    def of_clients(
        self,
        ids: Sequence[int],
        info: RoundInfo,
        shared: TreesByOwner,
        stored: Mapping[int, Tree],
        last_task: Mapping[int, int],
    ) -> RoundInputs:
        """Add the data of clients, and their states as they enter the round, to its description and broadcast.

        stored: id to state, if not empty; last_task: id to the last task in which the client took part.
        """
        sees = self.sees(info.task)
        states = {
            id: stored.get(id, {})
            if last_task.get(id) == info.task
            else self.composed.client_state(stored.get(id), shared["params"], self.model)
            for id in ids
        }
        return RoundInputs(info, shared, [self.population.client(id, info.task, sees) for id in ids], states)

    def stored_bytes(self, state: Tree) -> int:
        """Bytes of a client's trees and of the samples in its memory."""
        state = dict(state)
        memory = state.pop(f"{STRATEGY}/{MEMORY}", torch.empty(0, 2))
        tasks = self.population.stream.tasks
        return tree.nbytes(state) + sum(tasks[int(task)].train.sample_bytes for task, _ in memory.tolist())

    def held(self, inputs: RoundInputs, last_task: Mapping[int, int]) -> int:
        """Bytes of a round's broadcast that its clients have from earlier rounds of the task, see `Strategy.kept`."""
        info = inputs.info
        again = sum(last_task.get(id) == info.task for id in info.clients)
        return again * self.kept_bytes(inputs.shared)

    def kept_at_end(self, server: Server, last: int) -> int:
        """Bytes of the kept trees on a client of the last task, once the run is over. server: its trees at the end."""
        if not self.strategy.kept:
            return 0
        with_clients = ((task, phase.cohort != "none") for task, phase, _ in self.schedule)
        places = [place for place, found in enumerate(with_clients) if found == (last, True)]
        return self.kept_bytes(self.strategy.broadcast(server, self.info(places[-1]))) if places else 0

    def kept_bytes(self, shared: TreesByOwner) -> int:
        """Bytes of a broadcast that each of its clients stores until the next task."""
        return sum(tree.nbytes(shared[name]) for name in self.strategy.kept if name in shared)

    def cohort(self, position: int) -> tuple[int, ...]:
        """Draw the clients of a round."""
        task, phase, _ = self.schedule[position]
        return self.population.cohort(phase, self.sees(task), self._trained_in_run[position], self._keys[position])

    def info(self, position: int) -> RoundInfo:
        """Describe a round to the strategy."""
        (task, phase, number), key = self.schedule[position], self._keys[position]
        sees, heads = self.sees(task), tuple(self.strategy.heads(task, self.tasks))
        owners, expected = self.population.owners(sees), self.population.expected(phase, sees)
        cohort = self.cohort(position)
        info = RoundInfo(
            task=task,
            tasks=self.tasks,
            phase=phase,
            round=number,
            clients=cohort,
            names=(*self.model.trainable(task, heads), *self.model.buffers(task)),
            frozen=self.strategy.frozen(task, self.model) | self.model.frozen,
            heads=heads,
            population=self.config.partition.clients,
            owners=len(owners),
            fraction=self.population.fraction(cohort, sees),
            lr=self._rates[position],
            model=self.model,
            key=key,
            public=self.public,
            trained=self._trained[position],
            expected=expected,
            dropped=self.population.dropped(cohort, key),
            privacy=scope.privacy(phase, expected < len(owners), self.config),
            pixels_of=tuple(each.train.pool.pixels for each in self.population.stream.tasks[: task + 1]),
            masked=self.config.class_loss == "current",
        )
        return replace(info, frozen=info.frozen | self.strategy.paused(info))

    def survived(self, info: RoundInfo, ids: tuple[int, ...], noise: float) -> RoundInfo:
        """Describe a round after aggregation. ids: clients in the sums; noise: standard deviation of noise in them."""
        privacy = info.privacy._replace(noise=noise) if info.privacy else None
        if privacy and privacy.hidden:
            expected, fraction = info.expected, info.expected / info.owners
        else:
            expected, fraction = float(len(ids)), self.population.fraction(ids, self.sees(info.task))
        return replace(info, clients=ids, fraction=fraction, expected=expected, privacy=privacy)
