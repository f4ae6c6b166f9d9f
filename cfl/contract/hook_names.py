"""Methods of users' classes that no run would call: misspelt hooks, and hooks of the other role."""

from collections.abc import Collection
from difflib import get_close_matches
from inspect import isfunction

from cfl.contract.promises import PROMISES
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.strategy import Strategy
from cfl.core import ConfigError, content

_OF_REGULARIZERS = frozenset(("init_shared", "provide", "send", "cap", "aggregate", "server_step"))
_OF_STRATEGIES = frozenset(name for name in PROMISES if not hasattr(LocalRegularizer, name)) - {"around gradient"}
_SIMILAR = 0.8  # ratio of difflib from which a name is taken for a misspelt hook


def check_method(member: LocalRegularizer) -> None:
    """Raise ConfigError if a strategy or regularizer has a method that looks like a hook and is none of its own."""
    if isinstance(member, Strategy):
        check_names(member, Strategy, _OF_REGULARIZERS, "local regularizers")
    else:
        check_names(member, LocalRegularizer, _OF_STRATEGIES, "strategies")


def check_names(member: object, base: type, others: Collection[str] = (), role: str = "") -> None:
    """Raise ConfigError if an object has a method whose name is that of a hook with a typing error, or of another role.

    others: hooks that the base class lacks, or never calls, since they belong to another role.
    """
    hooks = [name for name in dir(base) if isfunction(getattr(base, name)) and name not in others]
    own = [(kind, name, value) for kind in filter(content.foreign, type(member).__mro__)
           for name, value in vars(kind).items() if isfunction(value)]  # fmt: skip
    used = {name for *_, function in own for name in function.__code__.co_names}
    for kind, name, _ in own:
        if name not in hooks and name not in used:
            near = next(iter(get_close_matches(name, hooks, n=1, cutoff=_SIMILAR)), "")
            if name in others:
                why = f"only {role} have this hook"
            elif not name.startswith("_") and near and not (near.startswith(name) or name.startswith(near)):
                why = f"did you mean '{near}'?"
            else:
                continue
            raise ConfigError(
                f"no run calls {kind.__name__}.{name}: {why}; the name of a helper method begins with an underscore"
            )
