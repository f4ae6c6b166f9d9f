"""A run that starts from the model of another run, or from weights that were trained elsewhere."""

from pathlib import Path

from cfl.config.overrides import assignment, flat, read_yaml
from cfl.config.schema import ModelConfig
from cfl.core import ConfigError, Tree
from cfl.core.errors import MOST_NAMES, few
from cfl.models import Model, adapters, pretrained
from cfl.runtime import model_file
from cfl.runtime.saved_run import check_masks, checkpointed


def started(model: Model, folder: str, config: ModelConfig) -> tuple[Tree, str]:
    """Return the initial parameters of a model, taken from the run in a folder, and a note for the user.

    Every parameter and buffer of the same name and shape is taken. Heads and buffers of a task that do not fit, and
    adapters that the run there lacks, keep their own initial values. Raises ConfigError if another parameter is missing
    there or has another shape, and for adapters of another rank or alpha than there.
    """
    try:
        given = checkpointed(Path(folder))[0]["params"]
    except ConfigError as error:
        raise ConfigError(f"start={folder}: {error} (relative paths begin at the working directory)") from None
    check_masks(model, model_file.read(Path(folder))["masks"], Path(folder))
    if any(name in given for pair in adapters.pairs(model.module) for name in pair):
        _check_adapters(config, Path(folder))
    plain = adapters.plain_names(model.module)  # of a run without adapters
    given = {**given, **{name: given[own] for name, own in plain.items() if own in given and name not in given}}
    taken = {
        name: given[name].to(leaf)
        for name, leaf in model.params.items()
        if name in given and given[name].shape == leaf.shape
    }
    new = _new(model)
    left = [name for name in model.params if name not in taken]
    for name in left:
        if name not in new and "@" not in name:
            there = f"shape {tuple(given[name].shape)}" if name in given else "no such parameter"
            raise ConfigError(
                f"start: '{name}' has shape {tuple(model.params[name].shape)} here, and '{folder}' has {there}; "
                f"{_remedy(model, config, Path(folder), name)}"
            )
    return {**model.params, **taken}, f"starts from the model in '{folder}'{_listed(left)}"


def _check_adapters(config: ModelConfig, folder: Path) -> None:
    """Raise ConfigError if adapters of the run in a folder compute something else here: their rank or alpha differs."""
    options = flat(read_yaml(folder / "config.yaml"))
    rank, alpha = options.get("model.adapter_rank", ModelConfig().adapter_rank), options.get("model.adapter_alpha")
    there, here = (rank, alpha or rank), (config.adapter_rank, config.adapter_alpha or config.adapter_rank)
    if there != here:
        own = {"model.adapter_rank": rank, "model.adapter_alpha": alpha}
        raise ConfigError(
            f"start: adapters have rank {here[0]} and alpha {here[1]:g} here, and rank {rank} and alpha {there[1]:g} "
            f"in '{folder}'; set {', '.join(assignment(name, value) for name, value in own.items())} here, too"
        )


def _remedy(model: Model, config: ModelConfig, folder: Path, name: str) -> str:
    """What to change so that `name`, a parameter or buffer, fits the run in a folder: an option, or the model."""
    options = flat(read_yaml(folder / "config.yaml"))
    statistics = options.get("model.norm_stats", config.norm_stats)
    if not model.is_parameter(name) and statistics != config.norm_stats:
        return f"set {assignment('model.norm_stats', statistics)}, as in that run"
    if options.get("model.adapter", "none") == "none" or adapters.pairs(model.module):
        return "use the model of that run"
    default = flat({"model": ModelConfig().model_dump(mode="json")})
    own = [name for name in default if name.startswith("model.adapter") and options.get(name) != default[name]]
    return f"that run has adapters: set {', '.join(assignment(name, options[name]) for name in own)} here, too"


def pretrained_weights(model: Model, config: ModelConfig) -> tuple[Tree, str]:
    """Return the initial parameters of a model, with those of the folder `model.weights`, and a note for the user.

    Heads and adapters keep their own initial values. Raises ConfigError if the folder does not fit the model.
    """
    assert config.weights is not None
    new = _new(model)
    names = adapters.plain_names(model.module)
    wanted = {names.get(name, name): leaf for name, leaf in model.params.items() if name not in new}
    found = pretrained.tensors(config.weights, config.options, model.input_shape, wanted)
    taken = {name: found[names.get(name, name)].to(leaf) for name, leaf in model.params.items() if name not in new}
    left = [name for name in model.params if name in new]
    return {**model.params, **taken}, f"starts from the weights in '{config.weights}'{_listed(left)}"


def _new(model: Model) -> set[str]:
    """Names of the parameters of heads and adapters, which may start anew."""
    heads = {name for task in range(model.tasks) for name in model.new_head(task)}
    return heads | {name for pair in adapters.pairs(model.module) for name in pair}


def _listed(names: list[str]) -> str:
    return f"; new: {few(names, MOST_NAMES)}" if names else ""
