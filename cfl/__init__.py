"""Continual federated learning: orthogonal-subspace methods, baselines and benchmarks."""

from cfl.config import RunConfig, resolve
from cfl.errors import CflError
from cfl.local.base import LocalRegularizer
from cfl.models.handle import Model
from cfl.options import option
from cfl.runner import run
from cfl.session import Result
from cfl.strategies.base import Strategy
from cfl.streams import Stream, from_tensors
from cfl.types import Batch, Ctx, Phase, RoundInfo

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "CflError",
    "Ctx",
    "LocalRegularizer",
    "Model",
    "Phase",
    "Result",
    "RoundInfo",
    "RunConfig",
    "Strategy",
    "Stream",
    "from_tensors",
    "option",
    "resolve",
    "run",
]
