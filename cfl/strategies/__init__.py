"""Strategies: the method of a run, one file each."""

from cfl.strategies.base import Strategy
from cfl.strategies.fot import FOT

__all__ = ["FOT", "Strategy"]
