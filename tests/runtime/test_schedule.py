"""The order of rounds, the training rounds before each, and the learning rates that follow."""

import pytest

import cfl
from cfl.config.schema import LocalConfig
from cfl.contract import Phase
from cfl.core import ConfigError
from cfl.runtime import schedule


class Plans(cfl.Strategy):
    """Two phases of training around one without; the last task has the first alone."""

    def plan(self, task, tasks, rounds):
        first = Phase("train", rounds - 1)
        middle = Phase("store", cohort="available", train=False, work=True)
        return [first] if task == tasks - 1 else [first, middle, Phase("again")]


PLANNED = schedule.planned(Plans(), "plans", "ab", (3, 4))


def test_rounds_come_by_task_then_phase_then_number():
    places = [(task, phase.name, number) for task, phase, number in PLANNED]
    assert places[:4] == [(0, "train", 0), (0, "train", 1), (0, "store", 0), (0, "again", 0)]
    assert places[4:] == [(1, "train", 0), (1, "train", 1), (1, "train", 2)]


def test_training_rounds_are_counted_over_the_phases_of_a_task():
    assert schedule.trained(PLANNED) == [0, 1, 2, 2, 0, 1, 2]
    assert schedule.trained(PLANNED, restart=False) == [0, 1, 2, 2, 3, 4, 5]


def test_training_rounds_draw_alike_however_phases_cut_them():
    keys = schedule.keys(5, PLANNED)
    plain = schedule.keys(5, [(task, Phase("train", 3), number) for task in (0, 1) for number in range(3)])
    assert [keys[place] for place in (0, 1, 3, 4, 5, 6)] == plain and keys[2] not in plain
    assert len(set(keys)) == len(keys) and not set(keys) & set(schedule.keys(6, PLANNED))
    with pytest.raises(ConfigError, match="a phase called 'train' has to train"):
        Phase("train", train=False, work=True)


def test_rates_decay_with_the_training_rounds():
    local = LocalConfig(lr=0.8, lr_decay=0.5)
    assert schedule.rates(PLANNED, local) == [0.8, 0.4, 0.2, 0.2, 0.8, 0.4, 0.2]
    whole = local.model_copy(update={"lr_restart": False})
    assert schedule.rates(PLANNED, whole) == [0.8, 0.4, 0.2, 0.2, 0.1, 0.05, 0.025]


def test_rounds_of_another_number_of_tasks_are_refused():
    with pytest.raises(ConfigError, match="rounds lists 2 numbers for 3 tasks"):
        schedule.planned(Plans(), "plans", "abc", (3, 4))


def test_rounds_may_be_given_by_the_names_of_the_tasks():
    named = {"a": 3, "b": 4, "c": 9}  # those of a task that is left out do no harm
    assert schedule.planned(Plans(), "plans", "ab", named, "abc") == PLANNED
    turned = schedule.planned(Plans(), "plans", "ba", named, "abc")
    # b has 4 rounds: 3 of training, one to store and one again; a, the last task, has 3: 2 of training
    assert [phase.name for _, phase, _ in turned] == ["train"] * 3 + ["store", "again"] + ["train"] * 2
    with pytest.raises(ConfigError, match="rounds has no number for task 'd'; add it"):
        schedule.planned(Plans(), "plans", "abd", named, "abc")
    with pytest.raises(ConfigError, match="unknown task in rounds 'minst'; did you mean 'mnist'"):
        schedule.planned(Plans(), "plans", ["digits"], {"digits": 3, "minst": 4}, ["digits", "mnist"])
    for others in ((), ("a", "b", "c")):  # a name that no task has comes before a task without a number
        with pytest.raises(ConfigError, match=r"unknown task in rounds 'foo'; known: a, b"):
            schedule.planned(Plans(), "plans", "ab", {"foo": 3}, others)
