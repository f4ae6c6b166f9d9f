"""Misuse of privacy: phases whose uploads nothing would protect, secure sums that accomplices could open."""

from collections.abc import Callable
from dataclasses import replace

import cfl
from cfl.aggregation.protected import UploadProtection
from cfl.contract import Phase
from cfl.core import ConfigError, UpdateError
from tests import toy

PRIVATE = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson", "dp.amplify=false", "dp.accountant=rdp")


class Stores(cfl.Strategy):
    """Sends what a phase with stores=True must keep."""

    def plan(self, task, tasks, rounds):
        return cfl.with_consolidation(task, tasks, rounds)

    def work(self, params, client, shared, state, info):
        return {"counts": client.targets.double().sum()}, state


class Measures(cfl.Strategy):
    """Trains in a phase that nothing protects."""

    def plan(self, task, tasks, rounds):
        return [Phase("train", rounds), Phase("measure", diagnostic=True)]


def run(*options, method="fedavg", **more):
    """A run of a task of one round, or more."""
    config = toy.config("tasks=1", "rounds=1", *options, method=method)
    return cfl.run(config, stream=toy.stream(config.tasks), **more)


def secure(clients: int, cohort: int, *options: str):
    """A run under secure aggregation with so many clients, one sample each."""
    people = (f"partition.clients={clients}", f"cohort={cohort}", "local.batch_size=1")
    return run("secagg=sum", *people, *options)


CASES: dict[str, tuple[Callable, type[Exception], str]] = {
    "a phase that trains and stores": (
        lambda: Phase("keep", work=True, stores=True),
        ConfigError,
        r"phase 'keep' has train=True and stores=True, .*without protection; set train=False, or stores=False",
    ),
    "a phase that trains and measures": (
        lambda: Phase("look", diagnostic=True),
        ConfigError,
        r"phase 'look' has train=True and diagnostic=True, .*; set train=False, or diagnostic=False",
    ),
    "a training phase that is changed to store": (
        lambda: replace(Phase("again"), stores=True),
        ConfigError,
        r"phase 'again' has train=True and stores=True",
    ),
    "a plan with such a phase": (lambda: run(strategy=Measures()), ConfigError, r"phase 'measure' has train=True"),
    "an upload of a phase that stores": (
        lambda: run("tasks=2", strategy=Stores()),
        UpdateError,
        r"work uploads \['counts'\] in a phase with stores=True \(task 0, phase consolidate.*return them in the state, "
        r"or set stores=False",
    ),
    "two neighbours": (
        lambda: secure(40, 40, "secure.neighbours=2"),
        ConfigError,
        r"secure\.neighbours=2 is not safe in a cohort of 40 clients; the smallest number that is: 28; set it to null",
    ),
    "two neighbours in a cohort of 20": (
        lambda: run("secagg=full", "partition.clients=20", "cohort=20", "local.batch_size=1", "secure.neighbours=2"),
        ConfigError,
        r"secure\.neighbours=2 is not safe in a cohort of 20 clients; the smallest number that is: 19; set it to null",
    ),
    "neighbours for more drop-outs": (
        lambda: secure(40, 40, "secure.neighbours=28", "drop_rate=0.1"),
        ConfigError,
        r"secure\.neighbours=28 is not safe in a cohort of 40 clients; the smallest number that is: 39; set it to null",
    ),
    "a quorum of accomplices": (
        lambda: secure(20, 20, "secure.quorum=0.1"),
        ConfigError,
        r"secure\.quorum=0\.1 lets 2 of 20 clients open a sum, and 2 may collude with the server; raise it to 0\.15$",
    ),
    "a small cohort of many": (
        lambda: secure(48, 6),
        ConfigError,
        r"secure\.quorum=0\.5 lets 3 of 6 clients open a sum, and 5 may collude .*; raise it to 1, or raise cohort$",
    ),
    "a mean Poisson cohort that is too small": (
        lambda: secure(48, 6, "sampling=poisson"),
        ConfigError,
        r"secure\.quorum=0\.5 lets 3 of 6 clients open a sum",
    ),
    "noise that integers cut off": (
        lambda: UploadProtection(toy.config(*PRIVATE, "secagg=sum", "secure.bits=16", "secure.fraction_bits=8"), 99.0),
        ConfigError,
        r"secure\.bits=16 with secure\.fraction_bits=8 limit entries .* raise secure\.bits or lower secure\.fraction",
    ),
}


WELCOME: dict[str, Callable] = {
    "more neighbours than there are clients": lambda: secure(20, 20, "secure.neighbours=1000").params,
    "a small cohort of many with a high quorum": lambda: secure(48, 6, "secure.quorum=1").params,
    "a phase that measures": lambda: Phase("look", train=False, work=True, diagnostic=True).diagnostic,
    "a phase that stores": lambda: Phase("keep", train=False, work=True, stores=True).stores,
}
