"""The rounds of a run in order, and what follows from a round's place among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cfl import rng
from cfl.errors import ConfigError
from cfl.types import Phase

if TYPE_CHECKING:
    from cfl.config import LocalConfig
    from cfl.strategies.base import Strategy

Schedule = list[tuple[int, Phase, int]]
"""(task, phase, round within the phase) of every round."""


def planned(strategy: Strategy, method: str, tasks: int, rounds: int | tuple[int, ...]) -> Schedule:
    """All rounds that a strategy plans. rounds: training rounds of each task, or one number for all.

    Raises ConfigError for a number of rounds that do not fit the tasks, and plans that are none. method: its name.
    """
    if isinstance(rounds, tuple) and len(rounds) != tasks:
        raise ConfigError(f"rounds lists {len(rounds)} numbers for {tasks} tasks; give one a task")
    each = rounds if isinstance(rounds, tuple) else (rounds,) * tasks
    plans = [strategy.plan(task, tasks, each[task]) for task in range(tasks)]
    for task, plan in enumerate(plans):
        if not all(isinstance(phase, Phase) for phase in plan):
            raise ConfigError(f"{method} plans task {task} as {plan}; give a list of cfl.Phase")
        names = [phase.name for phase in plan]
        if len(set(names)) < len(names) or not any(phase.rounds for phase in plan):
            raise ConfigError(f"{method} plans phases {names} for task {task}; give each a name of its own")
    return [
        (task, phase, number) for task, plan in enumerate(plans) for phase in plan for number in range(phase.rounds)
    ]


def key(seed: int, task: int, phase: str, number: int) -> int:
    """The key of all draws of a round. phase: its name; number: of the round within it."""
    return rng.key(seed, "round", task, phase, number)


def trained(schedule: Schedule, restart: bool = True) -> list[int]:
    """For each round, how many rounds of training came before it, in its task or (without `restart`) in the run."""
    counts, before, last = [], 0, 0
    for task, phase, _ in schedule:
        if restart and task != last:
            before, last = 0, task
        counts.append(before)
        before += phase.train
    return counts


def rates(schedule: Schedule, local: LocalConfig) -> list[float]:
    """The learning rate of each round, decayed by the training rounds since the task (or the run) began."""
    return [local.lr * local.lr_decay**earlier for earlier in trained(schedule, local.lr_restart)]
