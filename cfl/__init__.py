"""Continual federated learning: orthogonal-subspace methods, baselines and benchmarks."""

import sys

from cfl import contract as types
from cfl.assembly.resolve import resolve
from cfl.config.schema import RunConfig
from cfl.contract import (
    MEMORY,
    Batch,
    Client,
    Ctx,
    LocalRegularizer,
    Phase,
    RoundInfo,
    Strategy,
    losses,
    strategy,
    with_consolidation,
)
from cfl.core import CflError, errors, option, options, packages, plugins, rng, tree
from cfl.core.version import __version__
from cfl.models import Model
from cfl.runtime import callbacks, mlflow, sinks, tensorboard, wandb
from cfl.runtime.callbacks import Callback
from cfl.runtime.result import Result
from cfl.runtime.runner import run
from cfl.runtime.saved_run import SavedRun, load
from cfl.streams import Stream, from_tensors

packages.declare_operators()  # so that a user can import torchvision and Avalanche

# Documented modules keep their addresses wherever their files stand: `from cfl.losses import masked_mean`.
_ADDRESSES = {
    "callbacks": callbacks, "errors": errors, "losses": losses, "mlflow": mlflow, "options": options,
    "plugins": plugins, "rng": rng, "sinks": sinks, "strategies": strategy, "strategies.base": strategy,
    "tensorboard": tensorboard, "tree": tree, "types": types, "wandb": wandb,
}  # fmt: skip
sys.modules.update({f"{__name__}.{name}": module for name, module in _ADDRESSES.items()})

__all__ = [
    "MEMORY", "Batch", "Callback", "CflError", "Client", "Ctx", "LocalRegularizer", "Model", "Phase", "Result",
    "RoundInfo", "RunConfig", "SavedRun", "Strategy", "Stream", "__version__", "callbacks", "errors", "from_tensors",
    "load", "losses", "option", "plugins", "resolve", "rng", "run", "sinks", "tree", "with_consolidation",
]  # fmt: skip
