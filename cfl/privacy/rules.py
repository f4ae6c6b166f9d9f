"""What secure aggregation and differential privacy exclude, refused with the reason before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cfl.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from cfl.config import RunConfig


PROTECTIONS: dict[str, list[str]] = {
    "secagg=full": [],
    "dp.level=client": ["dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"],
    "dp.level=example": ["dp.noise_multiplier=1", "agg.weights=uniform"],
}
"""What can protect a run's uploads, with what else it takes."""


def refused(method: str, settings: list[str]) -> str | None:
    """Why a method or regularizer, at its defaults, cannot run under one of `PROTECTIONS`; None where it can.

    settings: overrides as for `cfl-run --set`.
    """
    from cfl.config import resolve

    try:
        resolve("permuted-digits", method=method, overrides=[*settings, "public.name=mnist"])
    except ConfigError as error:
        return str(error)
    return None


def check(members: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError with all that a run's members and options hold against the protection that is asked for.

    members: owner to strategy or regularizer.
    """
    faults = [*_secure(members, config), *_budget(config)]
    if config.dp.level != "none":
        faults += [*_assumptions(members, config), *_members(members, config)]
    if faults:
        raise ConfigError("; ".join(faults))


def check_model(module: nn.Module, config: RunConfig) -> None:
    """Raise ConfigError for a model with batch statistics under differential privacy."""
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

    for name, layer in module.named_modules() if config.dp.level != "none" and config.dp.protect == "all" else ():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            kind = type(layer).__name__.rstrip("123d")
            raise ConfigError(
                f"dp.level={config.dp.level} cannot run with the {kind} layer '{name}' of model.name="
                f"{config.model.name}: its statistics mix the samples of a batch, and travel without a bound; "
                "take a model without it"
            )


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
        found = "both" if given else "none"
        yield f"dp.level={config.dp.level} needs one of dp.target_epsilon and dp.noise_multiplier, not {found}"


def _assumptions(members: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """What the accountants assume of sampling and weights."""
    dp, strategy = config.dp, members["strategy"]
    phases = [phase for phase in strategy.plan(0, 2, 2) if not (phase.diagnostic or phase.stores)]
    released = [phase for phase in phases if phase.work or (phase.train and dp.protect == "all")]
    if not released:
        yield f"dp.protect=work protects nothing: '{config.method}' sends updates only; set dp.protect=all"
    if dp.protect == "all" and config.agg.weights != "uniform":
        yield "agg.weights=samples gives sums no fixed divisor, and tells what clients hold; set agg.weights=uniform"
    drawn = any(phase.cohort == "sampled" for phase in released) and config.cohort < config.partition.clients
    if dp.level == "client" and drawn and config.sampling == "fixed" and dp.amplify:
        yield (
            "sampling=fixed has no bound in the accountants, which amplify by Poisson sampling; set sampling=poisson, "
            "or dp.amplify=false to count each round in which a client takes part in full"
        )
    elif dp.level == "client" and drawn and config.secagg != "none" and dp.amplify:
        yield (
            f"with secagg={config.secagg} the server is not trusted, and it knows who takes part, so that no sampling "
            "amplifies; set dp.amplify=false"
        )


def _members(members: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    for owner, member in members.items():
        name = config.method if owner == "strategy" else owner
        if member.gathers == "stack" and (config.secagg, config.dp.level) == ("none", "client"):
            yield f"'{name}' shows what each client sends, and dp.level=client protects sums only"
        # Not inherited: a subclass that looks at data in another way must say for itself that it is safe.
        safe = vars(type(member)).get("per_sample", False)
        if config.dp.level == "example" and not safe and (config.dp.protect == "all" or owner == "strategy"):
            yield f"'{name}' uses samples beyond the gradients that dp.level=example bounds; set dp.level=client"
