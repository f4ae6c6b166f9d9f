"""Engines: how the clients of a round are computed. All run the one local step of `step.py`."""

from collections.abc import Iterable
from typing import Any

from cfl.engines.base import Engine, Outcome
from cfl.engines.loop import LoopEngine
from cfl.engines.pool import PoolEngine
from cfl.engines.vmapped import VmappedEngine

ENGINES = ("loop", "vmapped", "pool", "pool+vmapped")
CHUNKS = 16  # of a cohort, where nobody says otherwise; a number of its own, lest results depend on the machine


def build(
    name: str, *, block: int | None, cohort: int, workers: int, known: Iterable[object], **options: Any
) -> Engine:
    """The engine of that name. block: clients trained, or handed to a worker, at a time; options: of `LoopEngine`."""
    inner = VmappedEngine(**options, block=block or cohort) if "vmapped" in name else LoopEngine(**options)
    return PoolEngine(inner, workers, block or -(-cohort // CHUNKS), known) if "pool" in name else inner


__all__ = ["ENGINES", "Engine", "LoopEngine", "Outcome", "PoolEngine", "VmappedEngine", "build"]
