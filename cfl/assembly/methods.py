"""The members of a run, a strategy and its local regularizers: their names, objects, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from cfl.config.schema import RunConfig
from cfl.core import options, plugins
from cfl.core.errors import ConfigError, unknown
from cfl.models import sample


def build(config: RunConfig) -> dict[str, Any]:
    """The objects of a run by owner: "strategy", then its local regularizers in order."""
    made = {"strategy": options.build(plugins.strategies.get(config.method), config.strategy, "strategy")}
    for name in config.regularizers:
        values = config.regularizer.get(name, {})
        made[name] = options.build(plugins.local.get(name), values, f"regularizer.{name}")
    return made


def need_public(members: Mapping[str, Any]) -> bool:
    """Whether any of them reads public data."""
    return any(member.needs_public for member in members.values())


def check(members: Mapping[str, Any], config: RunConfig, public: bool = False) -> None:
    """Raise ConfigError where a run's members do not fit each other or the configuration.

    public: whether the stream has public data of its own.
    """
    run = {**config.model_dump(mode="json"), "regularizers": [name for name in members if name != "strategy"]}
    deciding: dict[str, str] = {}
    for owner, member in members.items():
        if owner == "work" or set(owner) & set("+,/"):
            raise ConfigError(f"a regularizer cannot be called '{owner}'; give it a plain name")
        name = config.method if owner == "strategy" else owner
        if member.needs_public and config.public.name is None and not public:
            raise ConfigError(f"'{name}' needs public data; set public.name to a data set, such as cifar100")
        if member.needs_public and len(members["strategy"].sees(0, 2)) > 1:
            raise ConfigError(f"'{name}' distils one task, and '{config.method}' trains on all tasks at once")
        if lender := member.borrows:
            if lender not in members and lender not in plugins.local.names():
                raise unknown(f"regularizer whose terms '{name}' takes,", lender, plugins.local.names())
            if lender not in members:
                raise ConfigError(f"'{name}' takes the terms of '{lender}', which is not used; add --local {lender}")
            if lender == owner or not members[lender].lends:
                raise ConfigError(
                    f"'{name}' takes the terms of '{lender}', which has none in the local loss; take another's"
                )
        if reason := member.refuses(run):
            raise ConfigError(f"'{name}' cannot run like this: {reason}")
        if member.decides in deciding:
            raise ConfigError(f"'{deciding[member.decides]}' and '{name}' both decide {member.decides}; use one")
        if member.decides:
            deciding[member.decides] = name


def check_model(module: nn.Module, config: RunConfig) -> None:
    """Raise ConfigError for a model with batch statistics under differential privacy."""
    if config.dp.level == "none" or (config.dp.level == "client" and config.dp.protect == "work"):
        return
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            kind = type(layer).__name__.rstrip("123d")
            raise ConfigError(
                f"dp.level={config.dp.level} cannot run with the {kind} layer '{name}' of model.name="
                f"{config.model.name}: its statistics mix the samples of a batch, and travel without a bound; "
                "take a model without it"
            )


def check_network(config: RunConfig) -> None:
    """Raise ConfigError where the network has layers that differential privacy excludes."""
    if config.dp.level != "none" and (module := sample(config.model.name, config.model.options)) is not None:
        check_model(module, config)
