"""Runs on Flower (flwr): clients on the nodes of a federation, or of a simulation on a cluster."""

import os

from cfl.core import packages

packages.need("flower", "a run on Flower (engine=flower, serve, join)")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reads it when imported

from cfl.flower import simulation  # noqa: E402  registers the engine

__all__ = ["simulation"]
