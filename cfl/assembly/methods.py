"""The methods of a run, its strategy and local regularizers: build them, and check that they fit together."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Phase, Strategy
from cfl.contract.checked import Checked
from cfl.contract.combining import caps
from cfl.contract.hook_names import check_method
from cfl.core import ConfigError, options, plugins, unknown
from cfl.models import sample


def build(config: RunConfig) -> dict[str, Any]:
    """Return the methods of a run by owner: "strategy", then the names of the local regularizers in order."""
    made = {"strategy": options.build(plugins.strategies.get(config.method), config.strategy, "strategy")}
    for name in config.regularizers:
        check_name(name)
        values = config.regularizer.get(name, {})
        made[name] = options.build(plugins.local.get(name), values, f"regularizer.{name}")
    return made


def check_name(name: Any) -> None:
    """Raise ConfigError for a name that no regularizer can have: another owner of trees, or one with a mark."""
    if (
        not isinstance(name, str)
        or name.strip() in ("", "strategy", "work", "weights", "params", "server")
        or set(name) & set("+,/")
    ):
        raise ConfigError(f"a regularizer cannot be called {name!r}; give it a plain name")


def name_of(owner: str, method: Any, config: RunConfig) -> str:
    """Return a method's name in errors: that of its option, or the class of a strategy that is passed as an object."""
    if owner != "strategy":
        return owner
    return config.method if type(method) is plugins.strategies.get(config.method) else type(method).__name__


def phases(strategy: Strategy) -> list[Phase]:
    """Return the phases of two tasks with two training rounds each, which stand for those of any run."""
    checked = Checked(strategy)
    return [phase for task in range(2) for phase in checked.plan(task, 2, 2)]


def need_public(methods: Mapping[str, Any]) -> bool:
    """Return whether any method reads public data."""
    return any(method.needs_public for method in methods.values())


def check(methods: Mapping[str, Any], config: RunConfig, public: bool = False) -> None:
    """Raise ConfigError if methods do not fit each other or the configuration.

    methods: owner to strategy or regularizer; public: whether the stream provides public data.
    """
    run = {**config.model_dump(mode="json"), "regularizers": [name for name in methods if name != "strategy"]}
    strategy = name_of("strategy", methods["strategy"], config)
    deciding: dict[str, str] = {}
    for owner, method in methods.items():
        name = name_of(owner, method, config)
        check_method(method)
        if method.needs_public and config.public.name is None and not public:
            raise ConfigError(
                f"'{name}' needs public data; set public.name to a data set, such as cifar100, or to stream for that "
                "of your own stream"
            )
        if method.needs_public and len(Checked(methods["strategy"]).sees(0, 2)) > 1:
            raise ConfigError(f"'{name}' distils one task at a time, but '{strategy}' trains on all tasks at once")
        if method.borrows:
            _check_lender(name, owner, method.borrows, methods)
        if not methods["strategy"].averaged and owner != "strategy" and _changes_mean(method):
            raise ConfigError(
                f"'{name}' acts on the mean of the updates, of which '{strategy}' sends only a part; leave it out"
            )
        if reason := Checked(method).refuses(run):
            raise ConfigError(f"'{name}' cannot run like this: {reason}")
        decided = method.decides or ("how updates are combined" if owner != "strategy" and method.sees_each else "")
        if decided in deciding:
            raise ConfigError(f"'{deciding[decided]}' and '{name}' both decide {decided}; use one")
        if decided:
            deciding[decided] = name
    _check_training(methods, strategy)
    _check_attack(methods["strategy"], strategy, config.attack.name)


def _check_training(methods: Mapping[str, Any], strategy: str) -> None:
    """Raise ConfigError if no phase trains, and regularizers other than a cap at the server would have no effect."""
    idle = [owner for owner, own in methods.items() if owner != "strategy" and not (own.sees_each and caps(own))]
    if idle and not any(phase.train for phase in phases(methods["strategy"])):
        raise ConfigError(
            f"'{strategy}' plans no phase with train=True, in which {', '.join(idle)} could act; leave it out"
        )


def _check_attack(strategy: Strategy, name: str, attack: str) -> None:
    """Raise ConfigError for an attack on uploads that the strategy `name` does not send."""
    if attack == "sketch" and type(strategy).poisoned is Strategy.poisoned:
        raise ConfigError(f"attack.name=sketch poisons the sketches of 'fot', and '{name}' sends none")
    if attack not in ("none", "label_flip", "sketch") and not any(phase.train for phase in phases(strategy)):
        raise ConfigError(f"attack.name={attack} replaces updates, and '{name}' sends none; use attack.name=label_flip")


def _changes_mean(method: Any) -> bool:
    """Whether a regularizer has a hook on the update, or on the mean of the updates."""
    hooks = "send", "aggregate", "server_step"
    return any(getattr(type(method), hook) is not getattr(LocalRegularizer, hook) for hook in hooks)


def _check_lender(name: str, owner: str, lender: str, methods: Mapping[str, Any]) -> None:
    """Raise ConfigError if the method `name` cannot borrow the terms of the regularizer `lender`."""
    if lender not in methods and lender not in plugins.local.names():
        raise unknown(f"regularizer borrowed by '{name}':", lender, plugins.local.names())
    if lender not in methods:
        raise ConfigError(f"'{name}' borrows the terms of '{lender}', which is not used; add --local {lender}")
    if lender == owner or not methods[lender].lends:
        raise ConfigError(f"'{name}' borrows the terms of '{lender}', which has none to lend; use another regularizer")


def check_network(config: RunConfig) -> None:
    """Raise ConfigError if the configured network has layers that differential privacy excludes."""
    if config.dp.level != "none" and (module := sample(config.model.name, config.model.options)) is not None:
        check_model(module, config)


def check_model(module: nn.Module, config: RunConfig) -> None:
    """Raise ConfigError for a model with batch statistics under differential privacy."""
    if config.dp.level == "none" or (config.dp.level == "client" and config.dp.protect == "work"):
        return
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _NormBase) and layer.track_running_stats):
            kind = type(layer).__name__.rstrip("123d")
            raise ConfigError(
                f"dp.level={config.dp.level} cannot run with the {kind} layer '{name}' of model.name="
                f"{config.model.name}: its statistics mix the samples of a batch, and leave the client without a "
                "bound; use a model without this layer"
            )
