"""FedAvg (McMahan et al., 2017, Algorithm 1): the unchanged base class `Strategy`, which every strategy extends."""

from cfl.contract import Strategy
from cfl.core import plugins

FedAvg = plugins.strategies.register("fedavg", source="McMahan et al., AISTATS 2017, Algorithm 1")(Strategy)
