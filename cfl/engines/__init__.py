"""Engines: how the clients of a round are computed. All run the one local step of `step.py`."""

from cfl.engines.loop import LoopEngine, Outcome

ENGINES = {"loop": LoopEngine}

__all__ = ["ENGINES", "LoopEngine", "Outcome"]
