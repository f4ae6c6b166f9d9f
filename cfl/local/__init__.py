"""Local regularizers: additions to local training that compose with any strategy."""

from cfl.local.base import LocalRegularizer
from cfl.local.fedprox import FedProx

__all__ = ["FedProx", "LocalRegularizer"]
