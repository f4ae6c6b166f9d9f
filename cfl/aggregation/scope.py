"""Scope of differential privacy: the phases that release protected uploads, and the privacy of a round."""

from collections.abc import Iterable

from cfl.config.schema import RunConfig
from cfl.contract import Phase, Privacy


def releases(phases: Iterable[Phase], config: RunConfig) -> list[Phase]:
    """Return the phases with uploads that differential privacy protects."""
    return [
        phase for phase in phases if phase.protected and (phase.work or (phase.train and config.dp.protect == "all"))
    ]


def privacy(phase: Phase, drawn: bool, config: RunConfig) -> Privacy | None:
    """Return the differential privacy of a phase's rounds. drawn: whether the cohort is a sample of the clients."""
    if config.dp.level == "none" or phase.diagnostic:
        return None
    hidden = config.dp.level == "client" and config.dp.amplify and drawn and bool(releases([phase], config))
    return Privacy(config.dp.level, config.dp.clip, hidden)
