"""FedAvg (McMahan et al., 2017, Algorithm 1): the unchanged base class `Strategy`, which every strategy extends."""

from cfl.contract import Strategy
from cfl.core import plugins

FedAvg = plugins.strategies.register("fedavg")(Strategy)
