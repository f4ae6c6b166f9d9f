"""Rules of secure aggregation and differential privacy, checked before a run starts."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cfl.aggregation.mask_graph import unsafe
from cfl.aggregation.scope import releases
from cfl.assembly.methods import name_of
from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Phase
from cfl.contract.checked import Checked
from cfl.core import ConfigError, packages
from cfl.core.content import foreign


def check(methods: Mapping[str, Any], config: RunConfig) -> None:
    """Raise one ConfigError with all rules that the methods and options of a run break.

    methods: owner to strategy or regularizer.
    """
    faults = [*_secure_sums(methods, config), *_budget(config), *_attack(config)]
    if config.dp.level != "none":
        faults += [*_accounting(methods, config), *_uploads(methods, config)]
    if faults:
        raise ConfigError("; ".join(faults))


def check_schedule(phases: Iterable[Phase], owners: Mapping[int, int], config: RunConfig) -> None:
    """Raise ConfigError for rounds that the accountants do not cover, and for secure sums that are not safe.

    phases: of the whole run; owners: task to the number of clients that hold data of it.
    """
    phases = list(phases)
    for fault in _sampling(releases(phases, config), config):
        raise ConfigError(fault)
    if config.secagg == "none":
        return
    for task, count in owners.items():
        if not count:  # only where nodes have data of their own
            raise ConfigError(
                f"no node has data of task {task}, so it has no secure sum: give two nodes or more a file "
                f"task{task}.npz, or set secagg=none"
            )
        if count < 2:
            raise ConfigError(
                f"a secure sum of one client is its upload, and only one holds data of task {task}: raise "
                "partition.task_share or set secagg=none"
            )
    cohorts = {phase.cohort for phase in phases if phase.protected} - {"none"}
    if config.sampling == "round" and "sampled" in cohorts and config.cohort < max(owners.values(), default=0):
        raise ConfigError(
            "everybody can compute the cohorts of sampling=round, so accomplices of the server may have chosen theirs; "
            "secure sums need cohorts that nobody can foresee: set sampling=fixed"
        )
    # Of Poisson cohorts the mean size; a round whose cohort is not safe is aborted.
    sizes = {(min(config.cohort, n) if kind == "sampled" else n, n) for kind in cohorts for n in owners.values()}
    for size, count in sorted(sizes):
        if danger := unsafe(size, count, config):
            raise ConfigError(danger)


def check_packages(config: RunConfig) -> None:
    """Raise ConfigError if a package that protects the uploads is not installed; a finished run is read without it."""
    if config.secagg != "none":
        packages.need("privacy", f"secagg={config.secagg}")
    if config.dp.level != "none":
        packages.need("privacy", f"dp.level={config.dp.level}")


def shows_each(method: LocalRegularizer) -> bool:
    """Whether the server needs each client's own upload: to stack a method's uploads, or to combine the updates."""
    return method.gathers == "stack" or method.sees_each


def _secure_sums(methods: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield methods and options that secure aggregation excludes."""
    if config.secagg == "none":
        if config.secure.consistency:
            yield "secure.consistency=true checks no sum with secagg=none; set secagg=full"
        return
    for owner, method in methods.items():
        if shows_each(method):
            name = name_of(owner, method, config)
            yield f"'{name}' needs each client's own upload, which secagg={config.secagg} hides; set secagg=none"
    if min(config.cohort, config.partition.clients) < 2:
        yield f"a secure sum of one client is its upload: secagg={config.secagg} needs a cohort of 2 or more"
    room = config.secure.bits - 1 - config.secure.fraction_bits - math.log2(config.partition.clients)
    if room < 0:
        yield (
            f"secure.fraction_bits={config.secure.fraction_bits} leaves no room in secure.bits={config.secure.bits} "
            f"for sums of {config.partition.clients} clients; lower it by {math.ceil(-room)} or more"
        )


def _attack(config: RunConfig) -> Iterator[str]:
    """Yield why hostile clients cannot be simulated: uploads are replaced where the server would see them."""
    if config.attack.name in ("none", "label_flip"):
        return
    if config.secagg != "none":
        yield f"attack.name={config.attack.name} replaces uploads, which secagg={config.secagg} hides; set secagg=none"
    if config.dp.level != "none":
        yield (
            f"attack.name={config.attack.name} replaces uploads after clipping and noise, so dp.level="
            f"{config.dp.level} would not bound them; set dp.level=none"
        )


def _budget(config: RunConfig) -> Iterator[str]:
    """Yield faults of the privacy budget, dp.target_epsilon or dp.noise_multiplier, and of the noise's source."""
    given = [name for name in ("target_epsilon", "noise_multiplier") if getattr(config.dp, name) is not None]
    if config.dp.level == "none":
        useless = [*given, *(["noise_seed"] if config.dp.noise_seed != "run" else [])]
        yield from (f"dp.{name} is set, but dp.level is none; set dp.level to client or example" for name in useless)
    elif len(given) != 1:
        what = "takes only one of dp.target_epsilon and" if given else "needs dp.target_epsilon or"
        yield f"dp.level={config.dp.level} {what} dp.noise_multiplier"


def _accounting(methods: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield options against the accountants' assumptions on sampling and weights."""
    dp, strategy = config.dp, methods["strategy"]
    plan = Checked(strategy).plan(0, 2, 2)  # of the first task; `check_schedule` sees later tasks
    released = releases(plan, config)
    if not released:
        name = name_of("strategy", strategy, config)
        yield f"dp.protect=work protects nothing: '{name}' sends updates only; set dp.protect=all"
    weighs = dp.protect == "all" or strategy.gathers == "mean"
    if weighs and config.agg.weights != "uniform":
        yield "agg.weights=samples gives sums no fixed divisor and reveals sample counts; set agg.weights=uniform"
    yield from _sampling(released, config)


def _sampling(released: Iterable[Phase], config: RunConfig) -> Iterator[str]:
    """Yield why sampling does not amplify privacy in the phases with protected uploads, if dp.amplify is set."""
    drawn = [phase for phase in released if phase.cohort == "sampled" and config.cohort < config.partition.clients]
    if config.dp.level != "client" or not drawn or not config.dp.amplify:
        return
    if config.secagg != "none":
        yield (
            f"with secagg={config.secagg} the server is not trusted and knows who takes part, so sampling does not "
            "amplify privacy; set dp.amplify=false"
        )
    elif config.sampling != "poisson":
        yield (
            f"sampling={config.sampling} has no bound in the accountants, which amplify by Poisson sampling; set "
            "sampling=poisson, or dp.amplify=false to count each round in which a client takes part in full"
        )
    elif config.dp.protect == "work" and any(phase.train for phase in drawn):
        yield (
            "updates, which dp.protect=work does not protect, show who takes part in the same round, so sampling does "
            "not amplify privacy; set dp.amplify=false"
        )


def _uploads(methods: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield methods whose uploads differential privacy cannot protect."""
    for owner, method in methods.items():
        name = name_of(owner, method, config)
        if shows_each(method) and config.secagg == "none":
            yield f"'{name}' needs each client's own upload, but dp.level={config.dp.level} protects sums only"
        # Not inherited: a subclass may use samples in other ways, so it must declare itself safe.
        safe = vars(type(method)).get("per_sample", False)
        if config.dp.level == "example" and not safe and (config.dp.protect == "all" or owner == "strategy"):
            if foreign(type(method)):
                yield (
                    f"'{name}' does not declare that samples reach its uploads through gradients of single samples "
                    "alone; if this holds, set per_sample = True in its class, else dp.level=client"
                )
            else:
                yield f"'{name}' uses samples beyond the gradients that dp.level=example bounds; set dp.level=client"
