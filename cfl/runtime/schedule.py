"""The schedule of a run: its rounds in order, with their keys and learning rates."""

from collections.abc import Collection, Mapping, Sequence

from cfl.config.schema import LocalConfig
from cfl.contract import Phase, Strategy
from cfl.core import ConfigError, rng, unknown

Schedule = list[tuple[int, Phase, int]]
"""(task, phase, round within the phase) of every round."""


def planned(
    strategy: Strategy,
    method: str,
    tasks: Sequence[str],
    rounds: int | tuple[int, ...] | Mapping[str, int],
    others: Collection[str] = (),
) -> Schedule:
    """List all rounds that a strategy plans. method: its name in messages; tasks: names of the tasks.

    rounds: training rounds of each task, in order or by name, or one number for all tasks; others: further names that
    it may have, of tasks that the run leaves out; empty if these are unknown.
    Raises ConfigError if the rounds do not fit the tasks, and for an invalid plan.
    """
    plans = [strategy.plan(task, len(tasks), number) for task, number in enumerate(_each(rounds, tasks, others))]
    for task, plan in enumerate(plans):
        names = [phase.name for phase in plan]
        if not any(phase.rounds for phase in plan):
            raise ConfigError(f"{method} plans no round for task {task}; add a cfl.Phase with one or more rounds")
        if len(set(names)) < len(names):
            raise ConfigError(f"{method} plans phases {names} for task {task}; give each phase its own name")
    return [
        (task, phase, number) for task, plan in enumerate(plans) for phase in plan for number in range(phase.rounds)
    ]


def _each(
    rounds: int | tuple[int, ...] | Mapping[str, int], tasks: Sequence[str], others: Collection[str]
) -> Sequence[int]:
    """Training rounds of each task. A preset names all tasks, `others` among them."""
    if isinstance(rounds, int):
        return [rounds] * len(tasks)
    if isinstance(rounds, tuple):
        if len(rounds) != len(tasks):
            raise ConfigError(f"rounds lists {len(rounds)} numbers for {len(tasks)} tasks; give one number per task")
        return rounds
    lacking = [name for name in tasks if name not in rounds]
    for name in rounds if others or lacking else ():
        if name not in {*tasks, *others}:
            raise unknown("task in rounds", name, {*tasks, *others})
    if lacking:
        raise ConfigError(f"rounds has no number for task '{lacking[0]}'; add it, or give one number for all tasks")
    return [rounds[name] for name in tasks]


def trained(schedule: Schedule, restart: bool = True) -> list[int]:
    """Count the training rounds before each round, within its task or, without `restart`, within the run."""
    counts, before, last = [], 0, 0
    for task, phase, _ in schedule:
        if restart and task != last:
            before, last = 0, task
        counts.append(before)
        before += phase.train
    return counts


def skipped(schedule: Schedule, position: int, what: str) -> list[int]:
    """Places of the rounds that a stop after a round skips. what: see `cfl.Callback.stop`."""
    task, phase, _ = schedule[position]
    return [
        place
        for place, (other, where, _) in enumerate(schedule)
        if place > position and ((other, where.name) == (task, phase.name) or (what == "run" and other > task))
    ]


def following(schedule: Schedule, position: int, skipped: Collection[int]) -> int:
    """Place of the first round after a round that is not skipped; the length of the schedule if there is none."""
    return next((place for place in range(position + 1, len(schedule)) if place not in skipped), len(schedule))


def keys(seed: int, schedule: Schedule) -> list[int]:
    """The key of each round's draws.

    Training rounds are counted across the phases of a task, so that methods with different phases draw alike.
    """
    return [
        rng.key(seed, "round", task, *(("train", before) if phase.train else (phase.name, number)))
        for (task, phase, number), before in zip(schedule, trained(schedule), strict=True)
    ]


def rates(schedule: Schedule, local: LocalConfig) -> list[float]:
    """The learning rate of each round, decayed once per training round since the task (or the run) began."""
    return [local.lr * local.lr_decay**earlier for earlier in trained(schedule, local.lr_restart)]
