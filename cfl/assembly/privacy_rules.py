"""What secure aggregation and differential privacy exclude, refused with the reason before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cfl.aggregation.scope import releases
from cfl.config.schema import RunConfig
from cfl.contract.rounds import Phase
from cfl.core.errors import ConfigError


def check(members: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError with all that a run's members and options hold against the protection that is asked for.

    members: owner to strategy or regularizer.
    """
    faults = [*_secure(members, config), *_budget(config)]
    if config.dp.level != "none":
        faults += [*_assumptions(members, config), *_members(members, config)]
    if faults:
        raise ConfigError("; ".join(faults))


def _secure(members: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    if config.secagg == "none":
        return
    for owner, member in members.items():
        if member.gathers == "stack":
            yield f"'{owner}' shows what each client sends, and secagg={config.secagg} hides it; set secagg=none"
    if min(config.cohort, config.partition.clients) < 2:
        yield f"a secure sum of one client is its upload: secagg={config.secagg} needs a cohort of 2 or more"
    room = config.secure.bits - 1 - config.secure.fraction_bits - math.log2(config.partition.clients)
    if room < 0:
        yield (
            f"secure.fraction_bits={config.secure.fraction_bits} leaves no room in secure.bits={config.secure.bits} "
            f"for sums of {config.partition.clients} clients; lower it by {math.ceil(-room)} or more"
        )


def _budget(config: RunConfig) -> Iterator[str]:
    given = [name for name in ("target_epsilon", "noise_multiplier") if getattr(config.dp, name) is not None]
    if config.dp.level == "none":
        yield from (f"dp.{name} is set, but dp.level is none; set dp.level to client or example" for name in given)
    elif len(given) != 1:
        what = "takes only one of dp.target_epsilon and" if given else "needs dp.target_epsilon or"
        yield f"dp.level={config.dp.level} {what} dp.noise_multiplier"


def _assumptions(members: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """What the accountants assume of sampling and weights."""
    dp, strategy = config.dp, members["strategy"]
    released = releases(strategy.plan(0, 2, 2), config)  # of later tasks `check_schedule` knows more
    if not released:
        yield f"dp.protect=work protects nothing: '{config.method}' sends updates only; set dp.protect=all"
    if dp.protect == "all" and config.agg.weights != "uniform":
        yield "agg.weights=samples gives sums no fixed divisor, and tells what clients hold; set agg.weights=uniform"
    yield from sampling(released, config)


def sampling(released: Iterable[Phase], config: RunConfig) -> Iterator[str]:
    """What the accountants hold against the sampling of phases in which something private is released."""
    drawn = [phase for phase in released if phase.cohort == "sampled" and config.cohort < config.partition.clients]
    if config.dp.level != "client" or not drawn or not config.dp.amplify:
        return
    if config.secagg != "none":
        yield (
            f"with secagg={config.secagg} the server is not trusted, and it knows who takes part, so that no sampling "
            "amplifies; set dp.amplify=false"
        )
    elif config.sampling == "fixed":
        yield (
            "sampling=fixed has no bound in the accountants, which amplify by Poisson sampling; set sampling=poisson, "
            "or dp.amplify=false to count each round in which a client takes part in full"
        )
    elif config.dp.protect == "work" and any(phase.train for phase in drawn):
        yield (
            "updates that dp.protect=work leaves bare show who takes part in the same round, so that no sampling "
            "amplifies; set dp.amplify=false"
        )


def check_schedule(phases: Iterable[Phase], owners: Mapping[int, int], config: RunConfig) -> None:
    """Raise ConfigError for rounds that the accountants do not cover, and sums of too few clients.

    phases: of the whole run; owners: task to the number of clients that hold data of it.
    """
    phases = list(phases)
    for fault in sampling(releases(phases, config), config) if config.dp.level != "none" else ():
        raise ConfigError(fault)
    if config.secagg == "none":
        return
    for task, count in owners.items():
        if count < 2:
            raise ConfigError(
                f"a secure sum of one client is its upload, and only one holds data of task {task}: raise "
                "partition.task_share or set secagg=none"
            )
    cohorts = {phase.cohort for phase in phases if not (phase.diagnostic or phase.stores)}
    _check_quorum(cohorts, owners.values(), config)


def _check_quorum(cohorts: Iterable[str], owners: Iterable[int], config: RunConfig) -> None:
    """Raise ConfigError where the accomplices in a cohort of a possible size are enough to rebuild a secret."""
    from cfl.aggregation.secagg import accomplices, needed  # brings scipy.stats, which other runs do without

    sizes = set[int]()
    for count in owners:
        drawn = range(2, count + 1) if config.sampling == "poisson" else [min(config.cohort, count)]
        sizes.update(drawn, [count] if "available" in cohorts else [])
    for size in sorted(sizes):
        if needed(config.secure.quorum, size) <= accomplices(size):
            raise ConfigError(
                f"secure.quorum={config.secure.quorum:g} lets {needed(config.secure.quorum, size)} of {size} clients "
                f"open a sum, and as many may work with the server ({accomplices(size)}); raise it"
            )


def _members(members: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    for owner, member in members.items():
        name = config.method if owner == "strategy" else owner
        if member.gathers == "stack" and config.secagg == "none":
            yield f"'{name}' shows what each client sends, and dp.level={config.dp.level} protects sums only"
        # Not inherited: a subclass that looks at data in another way must say for itself that it is safe.
        safe = vars(type(member)).get("per_sample", False)
        if config.dp.level == "example" and not safe and (config.dp.protect == "all" or owner == "strategy"):
            yield f"'{name}' uses samples beyond the gradients that dp.level=example bounds; set dp.level=client"
