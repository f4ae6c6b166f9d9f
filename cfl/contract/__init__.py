"""The contract between methods and engines: clients' data, the context of a step, rounds, and the hooks of methods."""

from cfl.contract.client import MEMORY, Client
from cfl.contract.context import Ctx, Forward
from cfl.contract.regularizer import Gathers, GradFn, LocalRegularizer
from cfl.contract.rounds import STAGES, Phase, Pixels, Privacy, RoundInfo, RoundInputs, Server, TreesByOwner
from cfl.contract.samples import EMPTY, Batch, Samples, Share
from cfl.contract.strategy import Strategy, with_consolidation

__all__ = [
    "EMPTY", "MEMORY", "STAGES", "Batch", "Client", "Ctx", "Forward", "Gathers", "GradFn", "LocalRegularizer",
    "Phase", "Pixels", "Privacy", "RoundInfo", "RoundInputs", "Samples", "Server", "Share", "Strategy", "TreesByOwner",
    "with_consolidation",
]  # fmt: skip
