"""The members of a run, a strategy and its local regularizers: their names, objects, and what fits together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cfl import options, plugins
from cfl.errors import ConfigError, unknown

if TYPE_CHECKING:
    from cfl.config import RunConfig

DEFAULT_METHOD = "fedavg"


def roles(label: str) -> tuple[str, tuple[str, ...]]:
    """The strategy and the local regularizers of "fot+fedsol"; regularizers alone run under FedAvg.

    Raises ConfigError for a name that is neither, with the nearest one that is.
    """
    first, *rest = (name.strip() for name in label.split("+"))
    if first not in plugins.strategies.names() and first in plugins.local.names():
        first, rest = DEFAULT_METHOD, [first, *rest]
    if first not in plugins.strategies.names():
        raise unknown("method", first, [*plugins.strategies.names(), *plugins.local.names()])
    for name in rest:
        if name in plugins.strategies.names() and name not in plugins.local.names():
            raise ConfigError(f"'{label}' names two strategies; name one, and local regularizers after it")
        plugins.local.get(name)
    return first, tuple(rest)


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
