"""Runs on Flower (flwr): clients on the nodes of a federation, or of a simulation on a cluster."""

from importlib.util import find_spec

from cfl.core import ConfigError

if find_spec("flwr") is None:
    raise ConfigError("engine=flower needs Flower; install it with: pip install 'cfl[flower]'")

from cfl.flower import simulation  # registers the engine

__all__ = ["simulation"]
