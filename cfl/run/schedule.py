"""The rounds of a run in order, and what follows from a round's place among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cfl.config.schema import LocalConfig
from cfl.contract.rounds import Phase
from cfl.contract.strategy import Strategy
from cfl.core import rng
from cfl.core.errors import ConfigError

Schedule = list[tuple[int, Phase, int]]
"""(task, phase, round within the phase) of every round."""


def planned(
    strategy: Strategy, method: str, tasks: Sequence[str], rounds: int | tuple[int, ...] | Mapping[str, int]
) -> Schedule:
    """All rounds that a strategy plans, for the tasks of these names.

    rounds: training rounds of each task, in order or by name, or one number for all; method: its name.
    Raises ConfigError for a number of rounds that do not fit the tasks, and plans that are none.
    """
    plans = [strategy.plan(task, len(tasks), number) for task, number in enumerate(_each(rounds, tasks))]
    for task, plan in enumerate(plans):
        if not all(isinstance(phase, Phase) for phase in plan):
            raise ConfigError(f"{method} plans task {task} as {plan}; give a list of cfl.Phase")
        names = [phase.name for phase in plan]
        if len(set(names)) < len(names) or not any(phase.rounds for phase in plan):
            raise ConfigError(f"{method} plans phases {names} for task {task}; give each a name of its own")
    return [
        (task, phase, number) for task, plan in enumerate(plans) for phase in plan for number in range(phase.rounds)
    ]


def _each(rounds: int | tuple[int, ...] | Mapping[str, int], tasks: Sequence[str]) -> Sequence[int]:
    """Training rounds of each task. Names of other tasks are left aside: a preset names those of all tasks."""
    if isinstance(rounds, int):
        return [rounds] * len(tasks)
    if isinstance(rounds, tuple):
        if len(rounds) != len(tasks):
            raise ConfigError(f"rounds lists {len(rounds)} numbers for {len(tasks)} tasks; give one a task")
        return rounds
    for name in tasks:
        if name not in rounds:
            raise ConfigError(f"rounds has no number for task '{name}'; add it, or give one number for all tasks")
    return [rounds[name] for name in tasks]


def trained(schedule: Schedule, restart: bool = True) -> list[int]:
    """For each round, how many rounds of training came before it, in its task or (without `restart`) in the run."""
    counts, before, last = [], 0, 0
    for task, phase, _ in schedule:
        if restart and task != last:
            before, last = 0, task
        counts.append(before)
        before += phase.train
    return counts


def keys(seed: int, schedule: Schedule) -> list[int]:
    """The key of all draws of each round.

    Training rounds are counted through the phases of a task, so methods that cut them differently draw alike.
    """
    return [
        rng.key(seed, "round", task, *(("train", before) if phase.train else (phase.name, number)))
        for (task, phase, number), before in zip(schedule, trained(schedule), strict=True)
    ]


def rates(schedule: Schedule, local: LocalConfig) -> list[float]:
    """The learning rate of each round, decayed by the training rounds since the task (or the run) began."""
    return [local.lr * local.lr_decay**earlier for earlier in trained(schedule, local.lr_restart)]
