"""Local regularizers, one file each: methods that compose with most strategies, some of them with a server half."""

from cfl.contract import LocalRegularizer
from cfl.methods.regularizers.bulyan import Bulyan
from cfl.methods.regularizers.fedasam import FedASAM
from cfl.methods.regularizers.fedavgm import FedAvgM
from cfl.methods.regularizers.feddf import FedDF
from cfl.methods.regularizers.feddyn import FedDyn
from cfl.methods.regularizers.fedet import FedET
from cfl.methods.regularizers.fednova import FedNova
from cfl.methods.regularizers.fedntd import FedNTD
from cfl.methods.regularizers.fedproj import FedProj
from cfl.methods.regularizers.fedprox import FedProx
from cfl.methods.regularizers.fedrcl import FedRCL
from cfl.methods.regularizers.fedsam import FedSAM
from cfl.methods.regularizers.fedsol import FedSOL
from cfl.methods.regularizers.kl import KL
from cfl.methods.regularizers.krum import Krum
from cfl.methods.regularizers.median import Median
from cfl.methods.regularizers.moon import Moon
from cfl.methods.regularizers.norm_bound import NormBound
from cfl.methods.regularizers.prox_projection import ProxProjection
from cfl.methods.regularizers.rfa import RFA
from cfl.methods.regularizers.scaffold import Scaffold
from cfl.methods.regularizers.trimmed_mean import TrimmedMean

__all__ = [
    "KL", "RFA", "Bulyan", "FedASAM", "FedAvgM", "FedDF", "FedDyn", "FedET", "FedNTD", "FedNova", "FedProj", "FedProx",
    "FedRCL", "FedSAM", "FedSOL", "Krum", "LocalRegularizer", "Median", "Moon", "NormBound", "ProxProjection",
    "Scaffold", "TrimmedMean",
]  # fmt: skip
