"""The description of a round in a message."""

import pytest

from cfl.assembly import methods
from cfl.core import CflError
from cfl.flower import wire
from cfl.flower.messages import described, rebuilt
from cfl.flower.wire import WireError
from cfl.runtime.builder import build_session
from tests import toy

OPTIONS = {
    "plain": ("fedavg", ()),
    "several phases": ("fot+scaffold", ("secagg=full", "drop_rate=0.5")),
    "private": ("fot", ("dp.noise_multiplier=1", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson")),
    "with public data": ("feddf", ("public.name=stream",)),
    "a seed of 128 bits": ("fedavg", (f"seed={2**128 - 1}",)),
}


def rounds_of(name):
    method, options = OPTIONS[name]
    config = toy.config("tasks=2", *options, method=method)
    return build_session(config, toy.stream(2), methods.build(config)).rounds


@pytest.mark.parametrize("name", OPTIONS)
def test_every_round_comes_back(name):
    rounds = rounds_of(name)
    for position in range(len(rounds.schedule)):
        info = rounds.info(position)
        found = rebuilt(wire.unpack(wire.pack(described(info))), rounds.model, rounds.public)
        assert found == info and found.model is rounds.model and found.public is rounds.public


FOREIGN = {
    "nothing": lambda data: None,
    "a list": lambda data: [],
    "no phase": lambda data: {name: value for name, value in data.items() if name != "phase"},
    "an unknown entry": lambda data: {**data, "batch": 1},
    "a phase that is none": lambda data: {**data, "phase": "train"},
    "a phase with an unknown entry": lambda data: {**data, "phase": {**data["phase"], "code": 1}},
    "a phase that does nothing": lambda data: {**data, "phase": {**data["phase"], "train": False}},
    "leaves that are none": lambda data: {**data, "frozen": 3},
    "a privacy that is none": lambda data: {**data, "privacy": {"level": "none"}},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_round_is_refused(name):
    rounds = rounds_of("plain")
    with pytest.raises(CflError if "does nothing" in name else WireError, match="does not describe a round|phase"):
        rebuilt(FOREIGN[name](described(rounds.info(0))), rounds.model, None)
