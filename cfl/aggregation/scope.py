"""What differential privacy protects: the phases that release something private, and how a round states it."""

from __future__ import annotations

from collections.abc import Iterable

from cfl.config.schema import RunConfig
from cfl.contract.rounds import Phase, Privacy


def releases(phases: Iterable[Phase], config: RunConfig) -> list[Phase]:
    """Those of the phases in which something goes up that differential privacy protects."""
    return [
        phase
        for phase in phases
        if not (phase.diagnostic or phase.stores) and (phase.work or (phase.train and config.dp.protect == "all"))
    ]


def privacy(phase: Phase, drawn: bool, config: RunConfig) -> Privacy | None:
    """The differential privacy of a phase's rounds. drawn: whether not all clients that might take part do."""
    if config.dp.level == "none" or phase.diagnostic:
        return None
    hidden = config.dp.level == "client" and config.dp.amplify and drawn and bool(releases([phase], config))
    return Privacy(config.dp.level, config.dp.clip, hidden)
