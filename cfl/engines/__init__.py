"""Engines compute the clients of a round. All of them run the same local step, `step.py`."""

from collections.abc import Iterable
from typing import Any

from cfl.engines.base import Engine, Outcome
from cfl.engines.loop import LoopEngine
from cfl.engines.pool import PoolEngine
from cfl.engines.vmapped import VmappedEngine

ENGINES = ("loop", "vmapped", "pool", "pool+vmapped")
CHUNKS = 16  # default number of chunks of a cohort in a pool; fixed, because results depend on it


def build(
    name: str,
    *,
    block: int | None,
    cohort: int,
    workers: int,
    known: Iterable[object],
    compile: bool = False,
    **options: Any,
) -> Engine:
    """Return the engine `name`, for "flower" that of its nodes.

    block: clients in a block; compile: see `VmappedEngine`; options: of `LoopEngine`.
    """
    if name == "flower":
        block = block or -(-cohort // CHUNKS)
        name = "vmapped" if block > 1 or compile else "loop"
    vmapped = "vmapped" in name
    inner = VmappedEngine(**options, block=block or cohort, compile=compile) if vmapped else LoopEngine(**options)
    return PoolEngine(inner, workers, block or -(-cohort // CHUNKS), known) if "pool" in name else inner


__all__ = ["ENGINES", "Engine", "LoopEngine", "Outcome", "PoolEngine", "VmappedEngine", "build"]
