"""Phases that a strategy may plan."""

import pytest

from cfl.contract import Phase
from cfl.core import ConfigError


def test_a_phase_without_clients_neither_trains_nor_works():
    phase = Phase("think", 2, cohort="none", train=False)
    assert (phase.rounds, phase.train, phase.work) == (2, False, False)


@pytest.mark.parametrize(("train", "work"), [(True, False), (False, True), (True, True)])
def test_clients_that_are_not_there_do_nothing(train, work):
    text = f"phase 'think' has 2 rounds, cohort=none, train={train} and work={work}"
    with pytest.raises(ConfigError, match=text):
        Phase("think", 2, cohort="none", train=train, work=work)


@pytest.mark.parametrize("cohort", ["sampled", "available"])
def test_clients_that_are_there_have_something_to_do(cohort):
    with pytest.raises(ConfigError, match=f"'idle' has 1 rounds, cohort={cohort}, train=False and work=False"):
        Phase("idle", cohort=cohort, train=False)
    Phase("busy", cohort=cohort, train=False, work=True)


def test_what_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="unknown cohort of phase 'think' 'non'; did you mean 'none'"):
        Phase("think", cohort="non", train=False)
    with pytest.raises(ConfigError, match="a phase called 'train' has to train"):
        Phase("train", cohort="none", train=False)
