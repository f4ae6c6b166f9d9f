"""Runs on Flower (flwr): clients on the nodes of a federation, or of a simulation on a cluster."""

import os
from importlib.util import find_spec

from cfl.core import ConfigError

if find_spec("flwr") is None:
    raise ConfigError("engine=flower, serve and join need Flower; install it with: pip install 'cfl[flower]'")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when imported

from cfl.flower import simulation  # noqa: E402  registers the engine

__all__ = ["simulation"]
