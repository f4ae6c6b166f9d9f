"""Strategies, the methods of a run: one method per file."""

from cfl.methods.strategies.er import ER
from cfl.methods.strategies.ewc import EWC
from cfl.methods.strategies.fedavg import FedAvg
from cfl.methods.strategies.fedcil import FedCIL
from cfl.methods.strategies.fedprotip import FedProTIP
from cfl.methods.strategies.fot import FOT
from cfl.methods.strategies.glfc import GLFC
from cfl.methods.strategies.gpm import GPM
from cfl.methods.strategies.joint import Joint
from cfl.methods.strategies.lorm import LoRM
from cfl.methods.strategies.lwf import LwF
from cfl.methods.strategies.olora import OLoRA
from cfl.methods.strategies.rgo import RGO
from cfl.methods.strategies.single_task import SingleTask
from cfl.methods.strategies.target import TARGET

__all__ = [
    "ER", "EWC", "FOT", "GLFC", "GPM", "RGO", "TARGET", "FedAvg", "FedCIL", "FedProTIP", "Joint", "LoRM", "LwF",
    "OLoRA", "SingleTask",
]  # fmt: skip
