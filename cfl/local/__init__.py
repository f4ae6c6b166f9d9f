"""Local regularizers: what composes with any strategy, a file each; some have a server half."""

from cfl.local.base import LocalRegularizer
from cfl.local.fedavgm import FedAvgM
from cfl.local.feddf import FedDF
from cfl.local.feddyn import FedDyn
from cfl.local.fedet import FedET
from cfl.local.fednova import FedNova
from cfl.local.fedntd import FedNTD
from cfl.local.fedproj import FedProj
from cfl.local.fedprox import FedProx
from cfl.local.fedrcl import FedRCL
from cfl.local.fedsol import FedSOL
from cfl.local.kl import KL
from cfl.local.moon import Moon
from cfl.local.prox_projection import ProxProjection
from cfl.local.sam import FedASAM, FedSAM
from cfl.local.scaffold import Scaffold

__all__ = [
    "FedASAM",
    "FedAvgM",
    "FedDF",
    "FedDyn",
    "FedET",
    "FedNTD",
    "FedNova",
    "FedProj",
    "FedProx",
    "FedRCL",
    "FedSAM",
    "FedSOL",
    "KL",
    "LocalRegularizer",
    "Moon",
    "ProxProjection",
    "Scaffold",
]
