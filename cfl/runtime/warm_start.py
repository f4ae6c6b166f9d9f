"""A run that starts from the model of another run."""

from pathlib import Path

from cfl.core import ConfigError, Tree
from cfl.models import Model, adapters
from cfl.runtime.saved_run import checkpointed


def started(model: Model, folder: str) -> tuple[Tree, str]:
    """Return the initial parameters of a model, taken from the run in a folder, and a note for the user.

    Every parameter and buffer of the same name and shape is taken. Heads and buffers of a task that do not fit keep
    their own initial values. Raises ConfigError if another parameter is missing there, or has another shape.
    """
    given = checkpointed(Path(folder))[0]["params"]
    plain = adapters.plain_names(model.module)  # of a run without adapters
    given = {**given, **{name: given[own] for name, own in plain.items() if own in given and name not in given}}
    taken = {
        name: given[name].to(leaf)
        for name, leaf in model.params.items()
        if name in given and given[name].shape == leaf.shape
    }
    heads = {name for task in range(model.tasks) for name in model.new_head(task)}
    heads |= {name for pair in adapters.pairs(model.module) for name in pair}
    left = [name for name in model.params if name not in taken]
    for name in left:
        if name not in heads and "@" not in name:
            there = f"shape {tuple(given[name].shape)}" if name in given else "no such parameter"
            raise ConfigError(
                f"start: '{name}' has shape {tuple(model.params[name].shape)} here, and '{folder}' has {there}; "
                "use the model of that run"
            )
    new = f"; new: {', '.join(left)}" if left else ""
    return {**model.params, **taken}, f"starts from the model in '{folder}'{new}"
