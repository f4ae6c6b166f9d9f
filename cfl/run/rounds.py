"""What each round of a run is before it runs: its place, its cohort, its learning rate, and who may see what."""

from __future__ import annotations

from dataclasses import replace

from cfl.aggregation import scope
from cfl.assembly import privacy_rules
from cfl.config.schema import RunConfig
from cfl.contract.data import Samples
from cfl.contract.rounds import RoundInfo
from cfl.contract.strategy import Strategy
from cfl.models.handle import Model
from cfl.run import schedule
from cfl.run.population import Population
from cfl.streams import Stream


class Rounds:
    """The rounds of a run. schedule: (task, phase, round within it) of each.

    usual_cohort: clients of a round of training in the task that most have data of; blocks are made for so many.
    Raises ConfigError for a plan that cannot be run.
    """

    def __init__(
        self,
        strategy: Strategy,
        method: str,
        model: Model,
        stream: Stream,
        population: Population,
        config: RunConfig,
        public: Samples | None,
    ) -> None:
        self.strategy, self.model, self.population = strategy, model, population
        self.config, self.public, self.tasks = config, public, len(stream)
        self.schedule = schedule.planned(strategy, method, [task.name for task in stream.tasks], config.rounds)
        self._rates = schedule.rates(self.schedule, config.local)
        self._trained = schedule.trained(self.schedule)
        self._keys = schedule.keys(config.seed, self.schedule)
        owners = {task: len(population.owners(self.sees(task))) for task in range(self.tasks)}
        privacy_rules.check_schedule((phase for _, phase, _ in self.schedule), owners, config)
        self.usual_cohort = min(config.cohort, max(owners.values()))

    def sees(self, task: int) -> tuple[int, ...]:
        """Tasks whose data the clients train on in this task."""
        return self.strategy.sees(task, self.tasks)

    def ends_task(self, position: int) -> bool:
        """Whether a round is the last one of its task."""
        return position + 1 == len(self.schedule) or self.schedule[position + 1][0] > self.schedule[position][0]

    def info(self, position: int) -> RoundInfo:
        """A round as strategies see it."""
        (task, phase, number), key = self.schedule[position], self._keys[position]
        sees, heads = self.sees(task), self.strategy.heads(task, self.tasks)
        owners, expected = self.population.owners(sees), self.population.expected(phase, sees)
        cohort = self.population.cohort(phase, sees, key)
        return RoundInfo(
            task=task,
            tasks=self.tasks,
            phase=phase,
            round=number,
            clients=cohort,
            names=(*self.model.trainable(task, heads), *self.model.buffers(task)),
            frozen=self.strategy.frozen(task, self.model),
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
        )

    def survived(self, info: RoundInfo, ids: tuple[int, ...], noise: float) -> RoundInfo:
        """A round as the server sees it in the end. ids: of the clients that are in the sums; noise: in these."""
        privacy = info.privacy._replace(noise=noise) if info.privacy else None
        if privacy and privacy.hidden:
            expected, fraction = info.expected, info.expected / info.owners
        else:
            expected, fraction = float(len(ids)), self.population.fraction(ids, self.sees(info.task))
        return replace(info, clients=ids, fraction=fraction, expected=expected, privacy=privacy)
