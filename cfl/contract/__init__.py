"""What methods and engines agree on: clients' data, the context of a step, rounds, and the hooks of methods."""

from cfl.contract.context import Ctx, Forward
from cfl.contract.data import EMPTY, MEMORY, Batch, Client, Samples, Share
from cfl.contract.regularizer import Gathers, GradFn, LocalRegularizer
from cfl.contract.rounds import STAGES, Phase, Privacy, RoundInfo, Server, TreesByOwner
from cfl.contract.strategy import Strategy, with_consolidation

__all__ = [
    "EMPTY",
    "MEMORY",
    "STAGES",
    "Batch",
    "Client",
    "Ctx",
    "Forward",
    "Gathers",
    "GradFn",
    "LocalRegularizer",
    "Phase",
    "Privacy",
    "RoundInfo",
    "Samples",
    "Server",
    "Share",
    "Strategy",
    "TreesByOwner",
    "with_consolidation",
]
