"""Strategies: the method of a run, one file each."""

from cfl.strategies.base import Strategy
from cfl.strategies.er import ER
from cfl.strategies.ewc import EWC
from cfl.strategies.fot import FOT
from cfl.strategies.glfc import GLFC
from cfl.strategies.gpm import GPM
from cfl.strategies.joint import Joint
from cfl.strategies.lwf import LwF
from cfl.strategies.rgo import RGO
from cfl.strategies.single_task import SingleTask

__all__ = ["ER", "EWC", "FOT", "GLFC", "GPM", "RGO", "Joint", "LwF", "SingleTask", "Strategy"]
